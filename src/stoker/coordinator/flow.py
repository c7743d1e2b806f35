"""The life of every active rollout: results in, turns out, one journal append per turn.

A turn's append carries the delivered result, the calls that followed, the actions they became and
the acknowledgement of the result: one transaction (I11). Timers and model calls start after the
append is queued; actions reach workers only after it is committed (I13).
"""

import msgspec

from stoker.broker.base import Append
from stoker.coordinator.actions import TOOLS, parked
from stoker.coordinator.calls import Call
from stoker.coordinator.dispatch import Dispatcher
from stoker.coordinator.flow_parts import FlowOwner, FlowParts
from stoker.coordinator.hosts import HostPool
from stoker.coordinator.noting import note
from stoker.coordinator.outcomes import outcome_of
from stoker.coordinator.results import taints
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import StokerError
from stoker.model.action import Action
from stoker.model.completion import Completion
from stoker.model.events import (
    Admitted,
    Delivered,
    Dropped,
    Finished,
    Issued,
    JournalEvent,
    Recovered,
    Reissued,
    Tainted,
    Verb,
    Withdrawn,
    encode_event,
)
from stoker.model.faults import FaultRecord
from stoker.model.generation import GenerateArguments
from stoker.model.ids import ActionId, CallPath, RolloutId, action_id
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.rollout.messages import Deliver, RecordedTurn, Turn
from stoker.seams.faultpoints import declare, reach

DELIVER_BEFORE = declare("coordinator.deliver.before", "a result is about to go to its program")
DELIVER_AFTER = declare("coordinator.deliver.after", "a program has a result; its turn is to come")
TURNED = declare("coordinator.turned", "a turn has come back and nothing of it is queued")
FINISHED = declare("coordinator.finished", "an outcome is queued and not yet committed")


class Flow:
    """Moves rollouts; everything happens on the coordinator's loop, nothing here waits."""

    def __init__(self, parts: FlowParts) -> None:
        self.parts = parts
        self.owner: FlowOwner
        """Set once by the coordinator, as are the next two: they call each other."""
        self.hosts: HostPool
        self.dispatcher: Dispatcher
        self.active: dict[RolloutId, ActiveRollout] = {}
        self.finished_seq: dict[RolloutId, int] = {}
        """Journal length of finished rollouts, to acknowledge what still comes for them."""

    # --- beginning ---------------------------------------------------------------------------

    def admit(self, rollout: ActiveRollout) -> None:
        """Begin a new rollout: journal its admission, give it a host."""
        self._enter(rollout)
        self._append(rollout, [rollout.admitted])
        self._start(rollout, ())

    def resume(self, rollout: ActiveRollout, history: tuple[RecordedTurn, ...]) -> None:
        """Go on with a rollout that was read back from its journal."""
        self._enter(rollout)
        self._start(rollout, history)

    def restart_on_host(self, rollout: ActiveRollout, history: tuple[RecordedTurn, ...]) -> None:
        """Replay a rollout on another host after its own was lost."""
        if rollout.current is not None:
            rollout.waiting.appendleft(rollout.current)
            rollout.current = None
        self._start(rollout, history)

    def _enter(self, rollout: ActiveRollout) -> None:
        self.active[rollout.rollout_id] = rollout
        rollout.began = self.parts.clock.monotonic()
        self.parts.figures.admitted(rollout)

    def _start(self, rollout: ActiveRollout, history: tuple[RecordedTurn, ...]) -> None:
        rollout.in_turn = True
        rollout.replaying = bool(history)
        try:
            self.hosts.place(rollout, history)
        except StokerError as error:  # its history is too long to be sent
            self.fail(rollout, error.record())

    # --- results in --------------------------------------------------------------------------

    def arrived(self, rollout: ActiveRollout, result: Result) -> None:
        """Take a result; it is delivered when the turn before it has been answered."""
        if rollout.finished:
            return
        rollout.waiting.append(result)
        self._deliver_next(rollout)

    def _deliver_next(self, rollout: ActiveRollout) -> None:
        while rollout.waiting and not rollout.in_turn and not rollout.finished:
            result = rollout.waiting.popleft()
            if result.path not in rollout.calls:
                self.drop(rollout, result.path, result.spent, result.completion)
            elif result.truncates:
                self.finish(
                    rollout,
                    Outcome(kind=OutcomeKind.TRUNCATED, reason=result.truncates),
                    acknowledges=result.spent,
                )
            else:
                self._deliver(rollout, result)

    def _deliver(self, rollout: ActiveRollout, result: Result) -> None:
        rollout.current = result
        rollout.in_turn = True
        result.at = self.parts.clock.now().wall
        try:
            content = None if result.value is None else self.parts.artifacts.get(result.value)
            message = Deliver(
                rollout_id=rollout.rollout_id,
                path=result.path,
                value=content,
                fault=result.fault,
                at=result.at,
            )
            reach(DELIVER_BEFORE)
            self.hosts.deliver(rollout, message)
        except StokerError as error:  # damaged on the disk, or too large: this rollout's end only
            self.fail(rollout, error.record())
            return
        reach(DELIVER_AFTER)

    def drop(
        self,
        rollout: ActiveRollout,
        path: CallPath,
        spent: tuple[ActionId, ...],
        completion: Completion | None = None,
    ) -> None:
        """Record and acknowledge a result that no scope waits for; close what it opened."""
        closes: list[Action] = []
        environment = rollout.opened(path, completion)
        if environment is not None:
            environment.lost = True
            closes.append(self.parts.factory.close(rollout, environment))
            rollout.routes[closes[0].action_id] = path
        last = spent[-1] if spent else None
        dropped = Dropped(path=path, action_id=last)
        self._append(rollout, [dropped], submits=closes, acknowledges=spent)

    # --- turns out ---------------------------------------------------------------------------

    def turned(self, rollout: ActiveRollout, turn: Turn) -> None:
        """Journal a turn, start what it asked for, deliver the next result."""
        if rollout.finished or not rollout.in_turn:
            return
        rollout.in_turn = False
        if rollout.replaying:
            rollout.replaying = False
            if turn.outcome is None and not turn.calls:
                self._deliver_next(rollout)
                return
        reach(TURNED)
        self._journal_turn(rollout, turn)
        if not rollout.finished:
            self._deliver_next(rollout)

    def _journal_turn(self, rollout: ActiveRollout, turn: Turn) -> None:
        result, rollout.current = rollout.current, None
        events: list[JournalEvent] = []
        spent: tuple[ActionId, ...] = ()
        if result is not None:
            spent = result.spent
            events += self._delivered(rollout, result)
        try:
            calls, actions, issued = self._issue(rollout, turn)
        except StokerError as error:  # not journalled: half a turn could not be replayed
            failed = Outcome(kind=OutcomeKind.FAILED, fault=error.record())
            self.finish(rollout, failed, acknowledges=spent)
            return
        events += issued
        spent = (*spent, *rollout.earlier(turn.withdrawn))
        events += self._withdraw(rollout, turn.withdrawn)
        events += self._taint(rollout, turn)
        if turn.outcome is not None:
            outcome = outcome_of(turn.outcome, rollout.tainted)
            self.finish(rollout, outcome, events=events, acknowledges=spent)
            return
        self._append(rollout, events, submits=actions, acknowledges=spent)
        self._launch(rollout, calls)

    def _delivered(self, rollout: ActiveRollout, result: Result) -> list[JournalEvent]:
        call = rollout.calls.pop(result.path)
        if call.verb is Verb.GENERATE:
            rollout.answered_at = self.parts.clock.monotonic()
        completion = result.completion
        changed = self._remember(rollout, call, result)
        events: list[JournalEvent] = [
            Delivered(
                path=result.path,
                value=result.value,
                fault=result.fault,
                at=result.at,
                action_id=call.action_id,
                attempt=completion.attempt if completion else 0,
                worker_id=completion.worker_id if completion else None,
                status=completion.status if completion else "",
                changed=changed,
                paused_seconds=rollout.paused or msgspec.UNSET,
                queue_seconds=completion.timings.queue_seconds if completion else 0.0,
                run_seconds=completion.timings.run_seconds if completion else 0.0,
                latency_seconds=result.latency_seconds,
            )
        ]
        rollout.paused = 0.0
        if result.fault is not None:
            self.met(rollout, result.fault)
            if taints(result.fault):
                rollout.tainted[result.fault.code] = result.fault
                events.append(Tainted(path=result.path, fault=result.fault))
        for spent in result.spent:
            rollout.routes.pop(spent, None)
        return events

    def met(self, rollout: ActiveRollout, fault: FaultRecord) -> None:
        """Count and log a fault of a rollout."""
        rollout.faults.append(fault.code)
        self.parts.figures.fault(fault.code)
        self.parts.log.event(
            "fault",
            level="warning",
            rollout=rollout.rollout_id,
            code=fault.code,
            side=fault.side,
            taints=taints(fault),
            message=fault.message,
        )

    def _remember(self, rollout: ActiveRollout, call: Call, result: Result) -> bool:
        """Keep what a later rebuild of the environment needs; return whether it changed one."""
        completion = result.completion
        if completion is None:
            return False
        rollout.count(completion)
        if call.verb is Verb.ENVIRONMENT and result.fault is None:
            rollout.environments[call.path].holder = completion.worker_id
        return note(rollout, call, result, self.parts.artifacts)

    def _issue(
        self, rollout: ActiveRollout, turn: Turn
    ) -> tuple[list[Call], list[Action], list[JournalEvent]]:
        """Turn the calls of a turn into what is started here, what is submitted, what is recorded.

        A call that was withdrawn in the turn that issued it is recorded and never begins.
        """
        now = self.parts.clock.monotonic()
        calls: list[Call] = []
        actions: list[Action] = []
        events: list[JournalEvent] = []
        for host_call in turn.calls:
            call = rollout.call(host_call, now)
            self.learn(rollout, call)
            if call.path in turn.withdrawn:
                pass
            elif call.verb in TOOLS:
                actions += self._hand_off(rollout, call)
            else:
                calls.append(call)
            events.append(
                Issued(
                    path=call.path,
                    verb=call.verb,
                    digest=host_call.digest,
                    arguments=self.parts.artifacts.put(host_call.arguments),
                    action_id=call.action_id,
                )
            )
        return calls, actions, events

    def _hand_off(self, rollout: ActiveRollout, call: Call) -> list[Action]:
        """Return the action of ``call``; none yet while its environment is being rebuilt."""
        if not parked(rollout, call):
            return [self.prepare(rollout, call, "")]
        call.action_id = action_id(rollout.rollout_id, call.path)
        rollout.actions += 1
        return []

    def learn(self, rollout: ActiveRollout, call: Call) -> None:
        """Take from a call what later calls stand on: its history, its environment."""
        if call.verb is Verb.GENERATE:
            arguments = msgspec.msgpack.decode(call.arguments, type=GenerateArguments)
            rollout.history.issue(call.path, arguments)
        elif call.verb is Verb.ENVIRONMENT:
            rollout.environments[call.path] = self.parts.factory.environment(rollout, call)

    def prepare(self, rollout: ActiveRollout, call: Call, suffix: str) -> Action:
        """Build the action that stands for ``call`` from now on and route its result to it."""
        action = self.parts.factory.build(rollout, call, suffix, self.left(rollout))
        rollout.actions += call.action_id is None
        call.action_id = action.action_id
        call.worker_class = action.worker_class
        call.generation = action.generation
        rollout.routes[action.action_id] = call.path
        return action

    def left(self, rollout: ActiveRollout) -> float:
        """Return the seconds that remain of the rollout, at least one."""
        return max(1.0, rollout.deadline - self.parts.clock.monotonic())

    def _withdraw(self, rollout: ActiveRollout, paths: tuple[CallPath, ...]) -> list[JournalEvent]:
        events: list[JournalEvent] = []
        cancelled: list[ActionId] = []
        for path in paths:
            call = rollout.calls.pop(path, None)
            if call is not None:
                self.dispatcher.withdraw(call)
                if call.action_id is not None:
                    cancelled.append(call.action_id)
            events.append(Withdrawn(path=path))
        if cancelled:
            self.owner.cancel(cancelled)
        return events

    def _taint(self, rollout: ActiveRollout, turn: Turn) -> list[JournalEvent]:
        events: list[JournalEvent] = []
        if turn.tainted is not None:
            rollout.tainted[turn.tainted.code] = turn.tainted
            events.append(Tainted(path=CallPath(""), fault=turn.tainted))
        events += [
            Recovered(code=code)
            for code in turn.recovered
            if rollout.tainted.pop(code, None) is not None
        ]
        return events

    def _launch(self, rollout: ActiveRollout, calls: list[Call]) -> None:
        for call in calls:
            if call.verb is Verb.GENERATE and rollout.answered_at is not None:
                self.parts.figures.thought(self.parts.clock.monotonic() - rollout.answered_at)
                rollout.answered_at = None
            self.dispatcher.start(rollout, call)

    def relaunch(self, rollout: ActiveRollout, calls: list[tuple[Call, float]]) -> None:
        """Start again, after a resume, what had no durable hand-off: model calls and timers."""
        again = [call for call, _ in calls if call.verb is Verb.GENERATE]
        self._append(rollout, [Reissued(path=call.path) for call in again])
        rollout.reissued.update(call.path for call in again)
        for call, waited in calls:
            self.dispatcher.start(rollout, call, waited)

    # --- submitting outside a turn -----------------------------------------------------------

    def submit(
        self,
        rollout: ActiveRollout,
        actions: list[Action],
        *,
        events: list[JournalEvent] | None = None,
        acknowledges: tuple[ActionId, ...] = (),
    ) -> None:
        """Hand actions to the ledger that no turn issued: retries and restorations."""
        self._append(rollout, events or [], submits=actions, acknowledges=acknowledges)

    # --- ends --------------------------------------------------------------------------------

    def finish(
        self,
        rollout: ActiveRollout,
        outcome: Outcome,
        *,
        events: list[JournalEvent] | None = None,
        acknowledges: tuple[ActionId, ...] = (),
    ) -> None:
        """Journal the outcome, let go of everything the rollout holds."""
        self._conclude(rollout, outcome, events or [], acknowledges)
        self.owner.finished(rollout, outcome)

    def abandon(self, rollout: ActiveRollout, outcome: Outcome) -> None:
        """Journal the outcome of a rollout that is not brought back; let go of what it held."""
        self._conclude(rollout, outcome, [], ())

    def _conclude(
        self,
        rollout: ActiveRollout,
        outcome: Outcome,
        events: list[JournalEvent],
        acknowledges: tuple[ActionId, ...],
    ) -> None:
        assert not rollout.finished, f"{rollout.rollout_id} finishes twice"
        rollout.finished = True
        if rollout.timeout is not None:
            rollout.timeout.cancel()
        undelivered = [*rollout.waiting, *([rollout.current] if rollout.current else [])]
        for result in undelivered:
            rollout.opened(result.path, result.completion)
        closes = [
            self.parts.factory.close(rollout, environment)
            for environment in rollout.environments.values()
            if environment.holder is not None and not environment.lost
        ]
        waiting = [action for result in undelivered for action in result.spent]
        waiting += [*rollout.earlier(rollout.calls), *rollout.rebuilt]
        finished = Finished(
            outcome=outcome,
            at=self.parts.clock.now().wall,
            steps=rollout.history.calls,
            actions=rollout.actions,
            tokens=rollout.tokens,
            box_seconds=rollout.run_seconds,
        )
        self._append(
            rollout,
            [*events, finished],
            submits=closes,
            acknowledges=(*acknowledges, *waiting),
            finished=True,
        )
        reach(FINISHED)
        self._let_go(rollout)

    def _let_go(self, rollout: ActiveRollout) -> None:
        running = [call.action_id for call in rollout.calls.values() if call.action_id is not None]
        running += rollout.restoring
        for call in rollout.calls.values():
            self.dispatcher.withdraw(call)
        if running:
            self.owner.cancel(running)
        self.hosts.evict(rollout)
        self.finished_seq[rollout.rollout_id] = rollout.seq
        self.active.pop(rollout.rollout_id, None)
        for completion in rollout.unrouted.values():
            self.settle_after(rollout.rollout_id, completion)

    def settle_after(self, rollout_id: RolloutId, completion: Completion) -> None:
        """Settle what ended after its rollout; what it opened has nobody else to close it."""
        if completion.leaves_open:
            self.owner.opened_late(rollout_id, completion)
        else:
            self.acknowledge_finished(rollout_id, completion)

    def fail(self, rollout: ActiveRollout, fault: FaultRecord) -> None:
        """End a rollout with a fault met outside its program."""
        if not rollout.finished:
            self.met(rollout, fault)
            self.finish(rollout, Outcome(kind=OutcomeKind.FAILED, fault=fault))

    def acknowledge_finished(
        self, rollout_id: RolloutId, completion: Completion, opened: Action | None = None
    ) -> None:
        """Acknowledge a result that came for a rollout after its outcome.

        ``opened``: the action was an opening that succeeded; what it opened is closed again, since
        nobody else knows of it.
        """
        submits: tuple[Action, ...] = ()
        if opened is not None and completion.worker_id is not None:
            submits = (self.parts.factory.close_opened(opened, completion.worker_id),)
        self.parts.appender.append(
            Append(
                rollout_id=rollout_id,
                expected_seq=self.finished_seq[rollout_id],
                submits=submits,
                acknowledges=(completion.action_id,),
            )
        )

    def _append(
        self,
        rollout: ActiveRollout,
        events: list[JournalEvent],
        *,
        submits: list[Action] | None = None,
        acknowledges: tuple[ActionId, ...] = (),
        finished: bool = False,
    ) -> None:
        if not (events or submits or acknowledges):
            return
        assert isinstance(rollout.admitted, Admitted)
        self.parts.appender.append(
            Append(
                rollout_id=rollout.rollout_id,
                expected_seq=rollout.seq,
                events=tuple(encode_event(event) for event in events),
                submits=tuple(submits or ()),
                acknowledges=acknowledges,
                finished=finished,
            )
        )
        rollout.seq += len(events)
