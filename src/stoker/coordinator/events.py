"""What the ledger says of actions, carried to the rollouts they belong to.

Completions become results (or a retry, or the rebuild of an environment); late results are
journalled with what was decided; everything for a rollout that has ended is acknowledged.
"""

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.coordinator.actions import environment_path, parked
from stoker.coordinator.calls import Call
from stoker.coordinator.environments import GENERATIONS_MAX
from stoker.coordinator.flow import Flow
from stoker.coordinator.restoring import Restorer
from stoker.coordinator.results import on_timeout, retry_reason, seen
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import EnvironmentLost
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.events import Late, Verb
from stoker.seams.faultpoints import declare, reach

EVENT_BEFORE = declare("coordinator.event.before", "the ledger has told of an action")
EVENT_AFTER = declare("coordinator.event.after", "what the ledger told was applied here, not kept")


class EventRouter:
    """Applies ledger events; idempotent, since events are delivered again after a resume."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._restorer = Restorer(flow, self._completed)

    def apply(self, event: LedgerEvent) -> None:
        """Apply one event."""
        reach(EVENT_BEFORE)
        self._apply(event)
        reach(EVENT_AFTER)

    def _apply(self, event: LedgerEvent) -> None:
        if event.kind is LedgerEventKind.REQUEUED:
            self._flow.parts.figures.retried(event.detail)
            self._flow.parts.log.event(
                "action_requeued",
                action=event.action_id,
                rollout=event.rollout_id,
                why=event.detail,
            )
            return
        rollout = self._flow.active.get(event.rollout_id)
        if event.kind is LedgerEventKind.LATE:
            self._late(rollout, event)
        elif event.kind is LedgerEventKind.COMPLETED and event.completion is not None:
            if rollout is not None:
                self._completed(rollout, event.completion)
            elif event.rollout_id in self._flow.finished_seq:
                self._flow.settle_after(event.rollout_id, event.completion)

    def replay_unrouted(self, rollout: ActiveRollout) -> None:
        """Apply completions that came before their action was known again (after a resume)."""
        for action_id in [a for a in rollout.unrouted if a in rollout.routes]:
            completion = rollout.unrouted.pop(action_id, None)
            if completion is not None and not rollout.finished:
                self._completed(rollout, completion)

    def _late(self, rollout: ActiveRollout | None, event: LedgerEvent) -> None:
        status = event.completion.status if event.completion else ""
        late = Late(action_id=event.action_id, status=status, disposition=event.detail)
        if rollout is not None and late in rollout.late:
            rollout.late.remove(late)  # an earlier coordinator has heard of it
            return
        self._flow.parts.figures.late()
        self._flow.parts.log.event(
            "late_result",
            action=event.action_id,
            rollout=event.rollout_id,
            decided=event.detail,
        )
        if rollout is not None:
            self._flow.submit(rollout, [], events=[late])

    def _completed(self, rollout: ActiveRollout, completion: Completion) -> None:
        if self._restorer.takes(rollout, completion):
            return
        path = rollout.routes.get(completion.action_id)
        if path is None:
            rollout.unrouted[completion.action_id] = completion
            return
        call = rollout.calls.get(path)
        if call is None:
            self._flow.drop(rollout, path, (completion.action_id,), completion)
        elif call.action_id == completion.action_id and not _awaits(rollout, call):
            self._answer(rollout, call, completion)

    def _answer(self, rollout: ActiveRollout, call: Call, completion: Completion) -> None:
        if self._lost(rollout, call, completion) or self._again(rollout, call, completion):
            self.replay_unrouted(rollout)
            return
        self._flow.parts.figures.completed(call, completion)
        what = seen(call.verb, completion)
        latency = self._flow.parts.clock.monotonic() - call.issued_at
        self._flow.parts.figures.latency(call, latency)
        late = on_timeout(call.verb, call.arguments)
        timed_out = completion.status is CompletionStatus.TIMED_OUT and completion.attempt > 0
        cut = timed_out and late.kind == "truncate"
        self._flow.arrived(
            rollout,
            Result(
                path=call.path,
                value=what.value,
                fault=what.fault,
                completion=completion,
                spent=(*call.spent, completion.action_id),
                latency_seconds=latency,
                truncates="tool timeout" if cut else "",
            ),
        )

    def _lost(self, rollout: ActiveRollout, call: Call, completion: Completion) -> bool:
        """Begin to rebuild the environment when that is what the completion asks for."""
        path = environment_path(call)
        fault = completion.fault
        if fault is None or fault.code != EnvironmentLost.code:
            return False
        if call.verb is Verb.ENVIRONMENT and call.retries + 1 < GENERATIONS_MAX:
            # Lost while it was opened: nothing has happened in it, so it is opened once more.
            self._retry(rollout, call, completion, "environment lost")
            return True
        if path is None:
            return False
        return self._restorer.begin(rollout, rollout.environments[path], call)

    def _again(self, rollout: ActiveRollout, call: Call, completion: Completion) -> bool:
        """Submit the call once more where that is safe, or where the program asked for it."""
        why = retry_reason(call, completion)
        if not why:
            return False
        self._retry(rollout, call, completion, why)
        return True

    def _retry(self, rollout: ActiveRollout, call: Call, completion: Completion, why: str) -> None:
        call.retries += 1
        call.spent.append(completion.action_id)
        self._flow.parts.figures.retried(why)
        if parked(rollout, call):
            return
        life = f"~g{call.generation}" if call.generation else ""
        action = self._flow.prepare(rollout, call, f"{life}~r{call.retries}")
        self._flow.submit(rollout, [action])


def _awaits(rollout: ActiveRollout, call: Call) -> bool:
    """Whether this call's result is already on its way (the event came a second time)."""
    if rollout.current is not None and rollout.current.path == call.path:
        return True
    return any(result.path == call.path for result in rollout.waiting)
