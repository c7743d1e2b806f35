"""One run's coordinator: admits rollouts, carries events, and ends when nothing is left to do.

Everything happens on one loop. A part that breaks (fenced, ledger gone, no host, no worker) ends
the coordinator with that error; what was journalled is resumed later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from stoker.broker.base import (
    ActionsRequest,
    Cancel,
    EventsRequest,
)
from stoker.coordinator.actions import OPENING_TOOL
from stoker.coordinator.branch_keeper import BranchKeeper
from stoker.coordinator.coordinator_parts import Parts
from stoker.coordinator.group_keeper import GroupKeeper
from stoker.coordinator.hosts import STRIKES_MAX
from stoker.coordinator.reviving import Reviver
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import (
    InternalError,
    ProgramRaised,
    ProgramStuck,
    StokerError,
)
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, RolloutId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task
from stoker.observe.log import RolloutLine
from stoker.rollout.messages import Differed, LocalDone, Turn
from stoker.seams.faultpoints import declare, reach

REVIVED = declare("coordinator.revived", "what an earlier coordinator left is back")
CANCEL_BEFORE = declare("coordinator.cancel.before", "the ledger is about to be told to cancel")
CANCEL_AFTER = declare("coordinator.cancel.after", "the ledger has ended what was withdrawn")
SETTLED = declare("coordinator.settled", "every outcome is on disk; workers still live")

_EVENTS_WAIT_SECONDS = 30.0
_ADMIT_SECONDS = 0.1
_LOOK_SECONDS = 0.25
_WIND_UP_SECONDS = 5.0
"""For so long, at most, a run that is over waits for what its rollouts left behind."""
_ENDED_AT_ONCE = 256
"""Rollouts ended without having begun between two flushes: the appender's queue stays short."""


class Coordinator:
    """Runs one partition of one run."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.flow = parts.flow
        self.flow.dispatcher.ended = self._settled
        self.keeper = GroupKeeper(parts.plan, parts.flow, parts.feed, parts.budget)
        parts.appender.refused = self._refused
        self._wake = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.branches = BranchKeeper(parts, self.keeper, self._wake.set)
        self.flow.dispatcher.branch = self.branches.start
        self.reviver = Reviver(parts, self.keeper, self.branches, self)
        self._waiting: Iterator[tuple[Task, int]] = iter(())
        self._next: tuple[Task, int] | None = None
        self._order = 0
        self.asked_end: Callable[[RolloutId], Outcome | None] = lambda _: None
        """What a person has asked to become of a rollout; set once, before the run."""
        self.look_for_branches: Callable[[], Awaitable[None]] = _nothing
        """Makes the branches that a person has asked for since; set once, before the run."""
        self._look_at = 0.0
        self._all_end_as: Outcome | None = None
        """Once a person has ended the whole run: what becomes of rollouts not yet admitted."""
        self.boxes_reserved = 0
        self.state = "starting"

    # --- the run -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit and carry until every rollout has its outcome, or a person ends it earlier.

        Raises:
            StokerError: a part broke; the run can be resumed.
        """
        await self.reviver.revive()
        reach(REVIVED)
        await self.keeper.begin(self.parts.ledger)
        self.state = "running"
        await self._first_to_end(self._work(), self._events(), self.parts.stop.wait_stopping())
        if not self.parts.appender.failure.done():
            await self.parts.appender.flush()
        reach(SETTLED)

    async def _first_to_end(self, *work: Coroutine[Any, Any, None]) -> None:
        tasks = {asyncio.create_task(one) for one in work}
        try:
            ends: set[asyncio.Future[Any]] = {*tasks, self._broken, self.parts.appender.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self.parts.appender.failure.done():
            raise self.parts.appender.failure.result()
        if self._broken.done():
            self._broken.result()
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def close(self) -> None:
        """Withdraw what is on its way; nothing durable changes."""
        for rollout in list(self.flow.active.values()):
            for call in rollout.calls.values():
                self.flow.dispatcher.withdraw(call)
            if rollout.timeout is not None:
                rollout.timeout.cancel()
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._broken.cancel()

    @property
    def left(self) -> int:
        """Rollouts without an outcome."""
        return self.keeper.total - self.parts.figures.ended

    # --- admission ---------------------------------------------------------------------------

    async def _work(self) -> None:
        """Carry every rollout to its outcome, until the trainer leaves if there is one; wind up."""
        self._waiting = self.parts.plan.rollouts(self.reviver.known)
        self._next = next(self._waiting, None)
        feed = self.parts.feed
        if feed is None:
            await self._admit()
        else:
            feed.taken = self._wake.set
            await self._admit()
            feed.no_more()
            while await self._branches_asked_before(feed.left):
                feed.more()
                await self._admit()
                feed.no_more()
        await self._wind_up()

    async def _branches_asked_before(self, left: asyncio.Event) -> bool:
        """Wait until there are branches to begin, or the trainer has left; return which."""
        while not left.is_set():
            if not self._draining:
                await self.look_for_branches()
                if self.branches.waiting:
                    return True
            with suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), _LOOK_SECONDS)
        return False

    @property
    def _draining(self) -> bool:
        """Whether nothing new begins any more."""
        return self.parts.stop.draining or bool(self.parts.budget.held)

    async def _wind_up(self) -> None:
        """Wait a while until what rollouts left behind has ended and is acknowledged.

        Workers and ledger may be others' as well: a tool that is not withdrawn would hold a slot
        until its deadline, and a result that nobody takes would count against the cap of all runs.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_WIND_UP_SECONDS):
                while self._background or not self.parts.appender.settled.is_set():
                    if self._background:
                        await asyncio.wait(self._background)
                    else:
                        await self.parts.appender.settled.wait()

    async def _admit(self) -> None:
        while True:
            self.keeper.spend(self.parts.clock.monotonic())
            draining = self._draining
            if self._all_end_as is not None:
                await self._end_waiting(self._all_end_as)
            elif not draining:
                await self._look_outside()
                self.parts.lane.none_held()  # said again below, while it is so
                await self._begin_branches()
                self._admit_some()
            else:
                self.state = "draining"
            over = self._next is None and not self.branches.waiting
            if not self.flow.active and (over or draining):
                return
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _ADMIT_SECONDS)

    async def _look_outside(self) -> None:
        """See what branches were asked for: a few times a second, and before the run ends."""
        now = self.parts.clock.monotonic()
        if now >= self._look_at or not self.flow.active:
            self._look_at = now + _LOOK_SECONDS
            await self.look_for_branches()

    async def _begin_branches(self) -> None:
        """Begin branches before new rollouts: somebody waits for their groups already."""
        while self.branches.waiting and self._may_begin():
            await self.parts.appender.flush()  # its journal may still be on its way
            await self.reviver.begin(self.branches.waiting.popleft())

    def _may_begin(self) -> bool:
        """Whether there is room for one more rollout."""
        held = self.parts.admission.may_admit(
            len(self.flow.active),
            boxes_reserved=self.boxes_reserved,
            boxes_needed=self.parts.plan.loaded.boxes,
        )
        return held is None and self.parts.lane.may_start()

    def _admit_some(self) -> None:
        while self._next is not None and not self.branches.waiting:
            if self.keeper.passes_over(self._next[0]):
                self._next = next(self._waiting, None)
                continue
            if self.keeper.holds(self._next[1]):
                return
            if not self._may_begin():
                return
            self._admit_next()

    def _admit_next(self, ended: Outcome | None = None) -> None:
        assert self._next is not None
        task, index = self._next
        admitted = self.parts.plan.admit(task, index, self.parts.clock.now().wall)
        rollout = ActiveRollout(admitted=admitted, seq=0)
        self.enter(rollout, admitted.timeout_seconds)
        if ended is None:
            self.parts.lane.started(rollout.rollout_id)
            self.flow.admit(rollout)
        else:
            self.flow.submit(rollout, [], events=[admitted])
            self.flow.finish(rollout, ended)
        self._next = next(self._waiting, None)

    def end_all(self, outcome: Outcome) -> None:
        """End every rollout without an outcome as ``outcome``, also those not yet admitted."""
        self._all_end_as = outcome
        for rollout in list(self.flow.active.values()):
            self.flow.finish(rollout, outcome)
        self._wake.set()

    async def _end_waiting(self, outcome: Outcome) -> None:
        while self.branches.waiting:
            await self.parts.appender.flush()
            await self.reviver.end_unbegun(self.branches.waiting.popleft(), outcome)
        while self._next is not None:
            for _ in range(_ENDED_AT_ONCE):
                if self._next is not None and not self.keeper.passes_over(self._next[0]):
                    self._admit_next(outcome)
                else:
                    self._next = next(self._waiting, None)
            await self.parts.appender.flush()

    def enter(self, rollout: ActiveRollout, seconds: float) -> None:
        """Count a rollout among the active ones; it is cut after ``seconds``."""
        rollout.order = self._order
        self._order += 1
        self.boxes_reserved += self.parts.plan.loaded.boxes
        rollout.deadline = self.parts.clock.monotonic() + seconds
        rollout.timeout = asyncio.get_running_loop().call_later(seconds, self._timed_out, rollout)

    def _timed_out(self, rollout: ActiveRollout) -> None:
        seconds = rollout.admitted.timeout_seconds
        if rollout.quarantined and rollout.in_turn:
            self.flow.fail(
                rollout,
                ProgramStuck(
                    f"rollout {rollout.rollout_id} held its host at {rollout.stuck_where} until "
                    f"its timeout of {seconds:g} s; the host was ended; use ctx.local for blocking "
                    "work"
                ).record(),
            )
        else:
            self.flow.finish(
                rollout,
                Outcome(kind=OutcomeKind.TRUNCATED, reason=f"rollout timeout ({seconds:g} s)"),
            )

    def finished(self, rollout: ActiveRollout, outcome: Outcome) -> None:
        """Count an outcome and make room for the next rollout."""
        self.boxes_reserved -= self.parts.plan.loaded.boxes
        fault = outcome.fault
        if fault is not None and fault.code not in rollout.faults:
            self.flow.met(rollout, fault)
        self.parts.figures.finished(outcome)
        now = self.parts.clock.now().wall
        self.keeper.ended(rollout, outcome, now)
        self.parts.checker.finished(rollout.rollout_id)
        self.parts.lane.ended(rollout.rollout_id)
        self.flow.dispatcher.places.ended(rollout)
        self.parts.lines.append(_line(rollout, outcome, now))
        self._wake.set()

    # --- ledger ------------------------------------------------------------------------------

    async def _events(self) -> None:
        after = 0
        while True:
            reply = await self.parts.ledger.events(
                EventsRequest(
                    run_id=self.parts.plan.run_id,
                    partition=self.parts.plan.partition.name,
                    fence=self.parts.fence,
                    after=after,
                    wait_seconds=_EVENTS_WAIT_SECONDS,
                )
            )
            for event in reply.events:
                after = max(after, event.event_id)
                self.parts.router.apply(event)

    def cancel(self, action_ids: list[ActionId]) -> None:
        """Ask the ledger to end actions, in the background."""
        self._spawn(self._cancel(tuple(action_ids)))

    async def _cancel(self, action_ids: tuple[ActionId, ...]) -> None:
        await self.parts.appender.flush()  # an action is submitted before it is cancelled
        reach(CANCEL_BEFORE)
        await self.parts.ledger.cancel(
            Cancel(
                run_id=self.parts.plan.run_id,
                partition=self.parts.plan.partition.name,
                fence=self.parts.fence,
                action_ids=action_ids,
                reason="withdrawn",
            )
        )
        reach(CANCEL_AFTER)

    def _refused(self, rollout_id: RolloutId, action_id: ActionId) -> None:
        """End a rollout whose action the ledger would not take: it would wait for its timeout."""
        rollout = self.flow.active.get(rollout_id)
        if rollout is not None:
            self.flow.fail(
                rollout,
                InternalError(
                    f"the ledger holds another action under the id {action_id}; it was not "
                    f"submitted and rollout {rollout_id} was ended; please report it"
                ).record(),
            )

    def opened_late(self, rollout_id: RolloutId, completion: Completion) -> None:
        """Look whether an action opened an environment after its rollout's outcome; close it."""
        self._spawn(self._opened_late(rollout_id, completion))

    async def _opened_late(self, rollout_id: RolloutId, completion: Completion) -> None:
        known = await self.parts.ledger.actions(ActionsRequest(action_ids=(completion.action_id,)))
        opened = next((v.action for v in known.actions if v.action.tool == OPENING_TOOL), None)
        self.flow.acknowledge_finished(rollout_id, completion, opened)

    # --- what hosts say (PoolListener) -------------------------------------------------------

    def turned(self, rollout: ActiveRollout, turn: Turn) -> None:
        """Journal a turn and apply completions that waited for its calls to be known."""
        self.flow.turned(rollout, turn)
        self.keeper.cut_stale((rollout,))
        if rollout.unrouted and not rollout.finished:
            self.parts.router.replay_unrouted(rollout)

    def local_done(self, rollout: ActiveRollout, done: LocalDone) -> None:
        """Take the result of a local call."""
        if done.path in rollout.calls:
            value = None if done.value is None else self.flow.parts.artifacts.put(done.value)
            self.flow.arrived(rollout, Result(path=done.path, value=value, fault=done.fault))

    def differed(self, rollout: ActiveRollout, differed: Differed) -> None:
        """End a rollout whose program is not deterministic."""
        self.flow.fail(rollout, differed.fault)

    def hostless(self, rollouts: list[ActiveRollout]) -> None:
        """Replay rollouts on other hosts."""
        self.parts.figures.host_lost()
        where = next((r.stuck_where for r in rollouts if r.stuck_where), "")
        self.flow.parts.log.event(
            "host_lost", level="warning", rollouts=len(rollouts), held_at=where
        )
        for rollout in rollouts:
            if rollout.strikes >= STRIKES_MAX:
                fault = ProgramRaised(
                    f"rollout {rollout.rollout_id} ended its program host {rollout.strikes} times; "
                    "it is given up"
                ).record()
                self.flow.fail(rollout, fault)
                continue
            rollout.in_turn = True  # nothing is delivered before the replay has ended
            rollout.replaying = True
            rollout.resumed += 1
            self._spawn(self._elsewhere(rollout))

    async def _elsewhere(self, rollout: ActiveRollout) -> None:
        await self.parts.appender.flush()
        standing = await self.parts.resumer.standing(self.parts.plan.run_id, rollout.rollout_id)
        if not rollout.finished:
            self.flow.restart_on_host(rollout, tuple(standing.turns))

    def broke(self, error: Exception) -> None:
        """End the run: it cannot go on."""
        if not self._broken.done():
            self._broken.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if isinstance(error, StokerError):
            self.broke(error)
        else:
            self.broke(InternalError(f"the coordinator met a bug: {error!r}"))


async def _nothing() -> None:
    """Nobody asks from outside."""


def _line(rollout: ActiveRollout, outcome: Outcome, now: float) -> RolloutLine:
    admitted = rollout.admitted
    faults: dict[str, int] = {}
    for code in rollout.faults:
        faults[code] = faults.get(code, 0) + 1
    return RolloutLine(
        run=admitted.run_id,
        rollout=admitted.rollout_id,
        group=admitted.group_id,
        index=admitted.index,
        task=admitted.task.task_id,
        outcome=outcome,
        steps=rollout.history.calls,
        actions=rollout.actions,
        attempts=rollout.attempts,
        retries=max(0, rollout.attempts - rollout.actions),
        model_calls=rollout.history.calls,
        tokens=rollout.tokens,
        policy_versions=tuple(sorted(rollout.policy_versions)),
        faults=faults,
        seconds=max(0.0, now - admitted.at),
        queue_seconds=rollout.queue_seconds,
        run_seconds=rollout.run_seconds,
        resumed=rollout.resumed,
    )
