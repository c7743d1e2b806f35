"""Bringing back the rollouts of an earlier coordinator: journals in, active rollouts out.

What had a durable hand-off (actions) is found in the ledger; what had none (model calls, timers)
is started again. Nothing finished is run twice.
"""

from collections.abc import Iterable

import msgspec

from stoker.broker.base import ActionsRequest, ActionView, JournalRequest, Ledger
from stoker.config.tree import WorkerSettings
from stoker.coordinator.actions import CLOSING_TOOL
from stoker.coordinator.calls import Call
from stoker.coordinator.environments import Environment, opened
from stoker.coordinator.rebuild import Standing, generations, rebuild, returned
from stoker.coordinator.rollouts import ActiveRollout
from stoker.journal.artifacts import ArtifactStore
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.events import Admitted, Issued, Verb, decode_event
from stoker.model.ids import ActionId, CallPath, RolloutId, RunId, action_id
from stoker.model.value import Value
from stoker.rollout.arguments import BoxArguments
from stoker.seams.clock import Clock


class Resumer:
    """Reads rollouts back."""

    def __init__(
        self, ledger: Ledger, artifacts: ArtifactStore, clock: Clock, workers: WorkerSettings
    ) -> None:
        self._ledger = ledger
        self._artifacts = artifacts
        self._clock = clock
        self._workers = workers

    async def standing(self, run_id: RunId, rollout_id: RolloutId) -> Standing:
        """Return where a rollout stands by its journal."""
        reply = await self._ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout_id))
        return rebuild((decode_event(stored) for stored in reply.events), self._artifacts.get)

    async def husk(self, run_id: RunId, rollout_id: RolloutId) -> ActiveRollout:
        """Return a rollout with nothing but its admission and the length of its journal."""
        reply = await self._ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout_id))
        admitted = decode_event(reply.events[0])
        assert isinstance(admitted, Admitted), "a journal begins with its admission"
        return ActiveRollout(admitted=admitted, seq=len(reply.events))

    async def revive(self, standing: Standing) -> ActiveRollout:
        """Return the rollout as the coordinator before held it, less what was on its way."""
        rollout = ActiveRollout(admitted=standing.admitted, seq=standing.seq)
        rollout.tainted = dict(standing.tainted)
        rollout.resumed = 1
        rollout.paused = max(0.0, self._clock.now().wall - standing.at)
        rollout.actions = standing.actions
        rollout.became = tuple(standing.became)
        own = standing.delivered[standing.shared :]  # what a branch shares has been counted
        rollout.attempts = sum(delivered.attempt for delivered in own)
        rollout.run_seconds = sum(delivered.run_seconds for delivered in own)
        rollout.queue_seconds = sum(delivered.queue_seconds for delivered in own)
        paths = {delivered.path for delivered in own}
        rollout.reissued = set(standing.reissued)
        rollout.late = list(standing.late)
        for path, arguments in generations(standing, self._artifacts.get):
            rollout.history.issue(path, arguments)
        for path, generation in returned(standing, self._artifacts.get):
            rollout.history.returned(path, generation)
            rollout.tokens += generation.token_count * (path in paths)
            rollout.policy_versions.update(span.policy_version for span in generation.spans)
        now = self._clock.monotonic()
        for issued in standing.outstanding.values():
            rollout.calls[issued.path] = self._call(issued, now)
        self._environments(rollout, standing)
        await self._routes(rollout, standing)
        return rollout

    def waited(self, standing: Standing, call: Call) -> float:
        """Return for how long ``call`` had been waiting when its coordinator went on.

        A pause has passed on the wall clock. The clock of ``ctx.timeout`` counts up to the latest
        turn only, as the rollout's own does: time without a coordinator is no tool's fault.
        """
        if call.verb is Verb.TIMER:
            return standing.ran - standing.ran_at.get(call.path, standing.ran)
        until = self._clock.now().wall
        return max(0.0, until - standing.issued_at.get(call.path, until))

    def _call(self, issued: Issued, now: float) -> Call:
        return Call(
            path=issued.path,
            verb=issued.verb,
            arguments=self._artifacts.get(issued.arguments),
            issued_at=now,
            action_id=issued.action_id,
        )

    def _environments(self, rollout: ActiveRollout, standing: Standing) -> None:
        for issued in standing.issued.values():
            if issued.verb is not Verb.ENVIRONMENT:
                continue
            opening = rollout.calls.get(issued.path) or self._call(issued, 0.0)
            rollout.environments[issued.path] = opened(rollout.rollout_id, opening, self._workers)
        for place, delivered in enumerate(standing.delivered):
            issued = standing.issued[delivered.path]
            if issued.verb is Verb.ENVIRONMENT and delivered.fault is None:
                # Nobody holds what a branch has of its parent: its first action has it rebuilt.
                held = place >= standing.shared
                rollout.environments[issued.path].holder = delivered.worker_id if held else None
            elif issued.verb is Verb.CHECKPOINT and delivered.value is not None:
                self._keep(rollout, issued, delivered.value)
            elif issued.verb in {Verb.RUN, Verb.WRITE} and delivered.changed:
                self._log(rollout, issued, CompletionStatus(delivered.status))
        for path, restored in standing.restored.items():
            environment = rollout.environments[path]
            environment.generation = restored.generation
            environment.holder = restored.worker_id

    def _keep(self, rollout: ActiveRollout, issued: Issued, value: Value) -> None:
        arguments = msgspec.msgpack.decode(self._artifacts.get(issued.arguments), type=BoxArguments)
        rollout.environments[arguments.environment].keep(self._artifacts.get(value))

    def _log(self, rollout: ActiveRollout, issued: Issued, status: CompletionStatus) -> None:
        call = self._call(issued, 0.0)
        call.status = status
        arguments = msgspec.msgpack.decode(call.arguments, type=BoxArguments)
        rollout.environments[arguments.environment].ran(call)

    async def _routes(self, rollout: ActiveRollout, standing: Standing) -> None:
        """Find the action that stands for each call now: the latest retry or generation."""
        if not any(issued.action_id for issued in standing.issued.values()):
            return
        reply = await self._ledger.actions(ActionsRequest(rollout_id=rollout.rollout_id))
        over = {v.action.action_id for v in reply.actions if v.state is ActionState.ACKNOWLEDGED}
        for environment in rollout.environments.values():
            # A life that was opened and acknowledged is over, also where its rebuild was given up:
            # what was acknowledged is never told again.
            while _reopening(rollout, environment) in over:
                environment.generation += 1
        given_up = standing.issued.keys() - standing.outstanding.keys()
        given_up -= {delivered.path for delivered in standing.delivered}
        for view in reply.actions:
            path = CallPath(view.action.path.partition("~")[0])
            if path in given_up and view.action.tool != CLOSING_TOOL:
                rollout.routes[view.action.action_id] = path
        for call in rollout.calls.values():
            if call.action_id is None:
                continue
            views = sorted(_standing_for(call.path, reply.actions), key=_life)
            if not views:
                continue  # it waited for a rebuild and was not submitted
            *spent, latest = views
            call.action_id = latest.action.action_id
            call.worker_class = latest.action.worker_class
            call.spent = [view.action.action_id for view in spent]
            call.generation = latest.action.generation
            call.retries = max(_life(view)[1] for view in views)
            for view in views:
                rollout.routes[ActionId(view.action.action_id)] = call.path


def _reopening(rollout: ActiveRollout, environment: Environment) -> ActionId:
    """Return the action that opens the next life of ``environment``."""
    path = CallPath(f"{environment.path}~g{environment.generation + 1}")
    return action_id(rollout.rollout_id, path)


def _standing_for(path: CallPath, views: Iterable[ActionView]) -> list[ActionView]:
    return [v for v in views if v.action.path == path or v.action.path.startswith(path + "~")]


def _life(view: ActionView) -> tuple[int, int]:
    """Return (generation, retry) of an action from the suffixes of its path."""
    generation = retry = 0
    for part in view.action.path.split("~")[1:]:
        if part.startswith("g"):
            generation = int(part[1:])
        elif part.startswith("r"):
            retry = int(part[1:])
    return generation, retry
