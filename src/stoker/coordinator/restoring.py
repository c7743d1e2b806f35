"""Rebuilding an environment whose box was lost: the next generation, from its last checkpoint up.

A branch's first box is had the same way, though nothing was lost.

Every step is an action of its own, keyed ``path~gN``; all are acknowledged together with the
``Restored`` event that ends the rebuild. A coordinator that dies in between begins the same rebuild
again and finds its steps in the ledger.
"""

from collections import deque
from collections.abc import Callable

from stoker.coordinator.calls import Call
from stoker.coordinator.environments import Environment, Restoration
from stoker.coordinator.flow import Flow
from stoker.coordinator.noting import note_waiting
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import EnvironmentLost
from stoker.model.action import Action
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.events import BRANCHED, Restored
from stoker.model.ids import ActionId

_DONE = frozenset({CompletionStatus.OK, CompletionStatus.TIMED_OUT, CompletionStatus.LIMIT})

Completed = Callable[[ActiveRollout, Completion], None]


class Restorer:
    """Rebuilds environments; one rebuild at a time for each."""

    def __init__(self, flow: Flow, completed: Completed) -> None:
        self._flow = flow
        self._completed = completed

    def begin(self, rollout: ActiveRollout, environment: Environment, call: Call) -> bool:
        """Start a rebuild for ``call``, whose action was lost; ``False``: it cannot be rebuilt."""
        assert call.action_id is not None, "only actions are lost"
        if environment.restoration is not None:
            call.spent.append(call.action_id)
            environment.restoration.parked.append(call)
            return True
        if call.generation < environment.generation and not environment.lost:
            # It was lost with a life before the one that stands.
            call.spent.append(call.action_id)
            self._flow.submit(rollout, [self._in_this_life(rollout, environment, call)])
            return True
        note_waiting(rollout, self._flow.parts.artifacts)
        if not environment.restorable():
            environment.lost = True
            return False
        call.spent.append(call.action_id)
        self._build(rollout, environment, [call], [])
        return True

    def _build(
        self,
        rollout: ActiveRollout,
        environment: Environment,
        parked: list[Call],
        spent: list[ActionId],
    ) -> None:
        # Otherwise a branch begins here, with what no worker held: nothing was tried before.
        was_lost = environment.holder is not None or environment.lost or bool(spent)
        if was_lost:
            self._flow.parts.figures.retried("environment lost")
        environment.generation += 1
        environment.holder = None
        environment.restoration = Restoration(
            reason=EnvironmentLost.code if was_lost else BRANCHED,
            steps=deque([environment.opening, *environment.log]),
            parked=parked,
            spent=spent,
        )
        self._step(rollout, environment, environment.restoration)

    def takes(self, rollout: ActiveRollout, completion: Completion) -> bool:
        """Whether ``completion`` belongs to a rebuild; if so, go on with it."""
        for environment in rollout.environments.values():
            restoration = environment.restoration
            if restoration is None or restoration.running != completion.action_id:
                continue
            restoration.running = None
            restoration.spent.append(completion.action_id)
            if _as_before(restoration.steps[0], completion):
                self._went(rollout, environment, restoration, completion)
            else:
                self._failed(rollout, environment, restoration, completion)
            return True
        return False

    def _went(
        self,
        rollout: ActiveRollout,
        environment: Environment,
        restoration: Restoration,
        completion: Completion,
    ) -> None:
        step = restoration.steps.popleft()
        if step is environment.opening:
            environment.holder = completion.worker_id
        if restoration.steps:
            self._step(rollout, environment, restoration)
        else:
            self._stands(rollout, environment, restoration)

    def _step(
        self, rollout: ActiveRollout, environment: Environment, restoration: Restoration
    ) -> None:
        suffix = f"~g{environment.generation}"
        action = self._flow.parts.factory.build(
            rollout, restoration.steps[0], suffix, self._flow.left(rollout)
        )
        restoration.running = action.action_id
        self._flow.submit(rollout, [action])
        known = rollout.unrouted.pop(action.action_id, None)
        if known is not None:
            self._completed(rollout, known)

    def _stands(
        self, rollout: ActiveRollout, environment: Environment, restoration: Restoration
    ) -> None:
        environment.restoration = None
        assert environment.holder is not None, "an opened environment is held by its worker"
        waiting = [call for call in restoration.parked if call.path in rollout.calls]
        self._flow.submit(
            rollout,
            [self._in_this_life(rollout, environment, call) for call in waiting],
            events=[
                Restored(
                    path=environment.path,
                    generation=environment.generation,
                    worker_id=environment.holder,
                    reason=restoration.reason,
                )
            ],
            acknowledges=tuple(restoration.spent),
        )
        for call in waiting:
            known = rollout.unrouted.pop(call.action_id, None) if call.action_id else None
            if known is not None:
                self._completed(rollout, known)

    def _in_this_life(self, rollout: ActiveRollout, environment: Environment, call: Call) -> Action:
        return self._flow.prepare(rollout, call, f"~g{environment.generation}")

    def _failed(
        self,
        rollout: ActiveRollout,
        environment: Environment,
        restoration: Restoration,
        completion: Completion,
    ) -> None:
        environment.restoration = None
        self._close(rollout, environment)
        waiting = [call for call in restoration.parked if call.path in rollout.calls]
        if waiting and environment.restorable():
            self._build(rollout, environment, waiting, restoration.spent)
            return
        environment.lost = True
        fault = EnvironmentLost(
            f"environment {environment.environment_id} was lost and could not be rebuilt "
            f"(generation {environment.generation}: {completion.status}); its rollout is told"
        ).record()
        environment.generation += 1
        self._flow.submit(rollout, [], acknowledges=tuple(restoration.spent))
        for call in waiting:
            self._flow.arrived(
                rollout, Result(path=call.path, fault=fault, spent=tuple(call.spent))
            )

    def _close(self, rollout: ActiveRollout, environment: Environment) -> None:
        """Let go of a life that was opened and could not be rebuilt; nothing may run in it."""
        if environment.holder is not None:
            close = self._flow.parts.factory.close(rollout, environment)
            rollout.routes[close.action_id] = environment.path
            environment.holder = None
            self._flow.submit(rollout, [close])


def _as_before(step: Call, completion: Completion) -> bool:
    """Whether a step of a rebuild did again what it had done: else another state would stand."""
    ended = completion.status in _DONE and completion.fault is None and completion.attempt > 0
    return ended and not completion.box_gone and completion.status is step.status
