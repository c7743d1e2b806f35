"""Bringing rollouts back from their journals: what an earlier coordinator left, and branches.

One that cannot be read back fails alone; one of before a restart ends, and its place begins anew.
"""

from collections.abc import Callable
from typing import Protocol

from stoker.broker.base import RolloutSummary
from stoker.coordinator.actions import TOOLS
from stoker.coordinator.branch_keeper import BranchKeeper
from stoker.coordinator.coordinator_parts import Parts
from stoker.coordinator.group_keeper import GroupKeeper
from stoker.coordinator.listing import admitted_of, finished_of, summaries
from stoker.coordinator.plan import RESTARTED
from stoker.coordinator.rebuild import Standing
from stoker.coordinator.rollouts import ActiveRollout
from stoker.errors import ArtifactDamaged
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord
from stoker.model.ids import ActionId, RolloutId
from stoker.model.outcome import Outcome, OutcomeKind

_BEGUN_HERE = frozenset({Verb.GENERATE, Verb.SLEEP, Verb.TIMER, Verb.BRANCH})
"""Calls without a durable hand-off, and which no host carries out."""


class ReviverOwner(Protocol):
    """Whom what is brought back belongs to."""

    asked_end: Callable[[RolloutId], Outcome | None]
    """What a person has asked to become of a rollout."""

    def enter(self, rollout: ActiveRollout, seconds: float) -> None:
        """Count a rollout among the active ones; it has ``seconds`` left."""
        ...

    def cancel(self, action_ids: list[ActionId]) -> None:
        """Ask the ledger to end actions; does not wait."""
        ...


class Reviver:
    """Reads one partition's rollouts back."""

    def __init__(
        self, parts: Parts, keeper: GroupKeeper, branches: BranchKeeper, owner: ReviverOwner
    ) -> None:
        self._parts = parts
        self._flow = parts.flow
        self._keeper = keeper
        self._branches = branches
        self._owner = owner
        self._tasks = {task.task_id for task in parts.plan.tasks}
        self.known: set[tuple[str, int]] = set()
        """Places of the plan (task, index) that are not begun any more."""

    async def revive(self) -> None:
        """Bring back what an earlier coordinator left."""
        listed = summaries(self._parts.ledger, self._parts.plan.run_id)
        for rollout_id in [one.rollout_id async for one in listed if self._is_left(one)]:
            await self._revive_one(rollout_id)

    def _is_left(self, summary: RolloutSummary) -> bool:
        """Return whether a rollout of this partition has no outcome; count one that has."""
        admitted, finished = admitted_of(summary), finished_of(summary)
        if admitted.task.task_id not in self._tasks:
            return False
        self._keeper.knows(admitted, finished)
        if finished is None:
            self.known.add(admitted.place)
            return True
        self._flow.finished_seq[summary.rollout_id] = summary.seq
        if finished.outcome.reason != RESTARTED:
            self.known.add(admitted.place)
            self._parts.figures.finished(finished.outcome)
        self._keeper.counted(admitted, finished)
        return False

    async def _revive_one(self, rollout_id: RolloutId) -> None:
        read = await self._read(rollout_id)
        if read is None:
            return
        rollout, standing = read
        if not self._parts.plan.is_of_this_start(standing.admitted):
            self._restart(rollout)
        elif standing.turns and standing.turns[-1].open:
            self._branches.waiting.append(rollout_id)  # it begins when there is room
        else:
            self._go_on(rollout, standing)

    async def begin(self, rollout_id: RolloutId) -> None:
        """Let a branch that is on record begin, or end it where nobody wants it any more."""
        read = await self._read(rollout_id)
        if read is None:
            return
        rollout, standing = read
        rollout.resumed = 0
        if (cut := self._keeper.straggles(rollout.admitted)) is not None:
            self._end(rollout, cut)
        else:
            self._parts.lane.started(rollout_id)
            self._go_on(rollout, standing)

    async def end_unbegun(self, rollout_id: RolloutId, outcome: Outcome) -> None:
        """End a branch that has not begun."""
        self._end(await self._parts.resumer.husk(self._parts.plan.run_id, rollout_id), outcome)

    def _end(self, rollout: ActiveRollout, outcome: Outcome) -> None:
        self._owner.enter(rollout, 0.0)
        self._flow.finish(rollout, outcome)

    async def _read(self, rollout_id: RolloutId) -> tuple[ActiveRollout, Standing] | None:
        """Return a rollout and where it stands; ``None``: it cannot be read back and has failed."""
        try:
            standing = await self._parts.resumer.standing(self._parts.plan.run_id, rollout_id)
            return await self._parts.resumer.revive(standing), standing
        except ArtifactDamaged as error:
            await self._lost(rollout_id, error.record())
            return None

    def _go_on(self, rollout: ActiveRollout, standing: Standing) -> None:
        # A run resumed next week is not out of time, nor one that is resumed a week after that.
        self._owner.enter(rollout, max(0.0, standing.admitted.timeout_seconds - standing.ran))
        if (ended := self._owner.asked_end(rollout.rollout_id)) is not None:
            self._flow.finish(rollout, ended)  # before a result that waits is heard of
            return
        self._flow.resume(rollout, tuple(standing.turns))
        if not rollout.finished:
            self._relaunch(rollout, standing)
            if rollout.given_up:  # perhaps the coordinator before had no time to say so
                self._owner.cancel(rollout.given_up)

    async def _lost(self, rollout_id: RolloutId, fault: FaultRecord) -> None:
        """End a rollout whose journal cannot be read back; the others go on."""
        rollout = await self._parts.resumer.husk(self._parts.plan.run_id, rollout_id)
        outcome = Outcome(kind=OutcomeKind.FAILED, fault=fault)
        self._flow.met(rollout, fault)
        self._flow.abandon(rollout, outcome)
        self._parts.figures.finished(outcome)
        self._keeper.ended(rollout, outcome, self._parts.clock.now().wall)

    def _restart(self, rollout: ActiveRollout) -> None:
        """End an unfinished rollout of before a restart; its place is admitted anew."""
        self._flow.abandon(rollout, Outcome(kind=OutcomeKind.CANCELLED, reason=RESTARTED))
        self._keeper.restarted(rollout)
        self.known.discard(rollout.admitted.place)

    def _relaunch(self, rollout: ActiveRollout, standing: Standing) -> None:
        calls = rollout.calls.values()
        unsent = [call for call in calls if call.verb in TOOLS and not call.worker_class]
        self._flow.submit(rollout, [self._flow.prepare(rollout, call, "") for call in unsent])
        self._flow.relaunch(
            rollout,
            [
                (call, self._parts.resumer.waited(standing, call))
                for call in calls
                if call.verb in _BEGUN_HERE
            ],
        )
