"""What a coordinator does for whole groups: counts them, cuts off who is no longer wanted.

Stragglers of a complete group and rollouts of too old a policy end here; what is complete goes to
the trainer's feed, where there is a trainer. Nothing here waits, save at the beginning.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

import msgspec

from stoker.broker.base import Ledger
from stoker.coordinator.budget import Budget
from stoker.coordinator.feed import GroupFeed
from stoker.coordinator.flow import Flow
from stoker.coordinator.groups import STRAGGLER, Groups
from stoker.coordinator.listing import admitted_of, finished_of, summaries
from stoker.coordinator.plan import RESTARTED, Plan
from stoker.coordinator.rollouts import ActiveRollout
from stoker.model.events import Admitted, Finished
from stoker.model.ids import RolloutId, group_id
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task


class GroupKeeper:
    """Keeps the groups of one partition."""

    def __init__(self, plan: Plan, flow: Flow, feed: GroupFeed | None, budget: Budget) -> None:
        self._plan = plan
        self._flow = flow
        self._feed = feed
        self.budget = budget
        self.groups = self._no_groups()
        self.spared = 0
        """Rollouts that were never begun, since their groups were complete without them."""
        self._branches: set[RolloutId] = set()
        self._given_up = 0
        """Branches that a restart has ended."""
        self.branched: Counter[RolloutId] = Counter()
        """Rollout → how many its program, and theirs, branched off it."""

    @property
    def total(self) -> int:
        """Rollouts that end some time or have: those of the plan that begin, and branches."""
        return self._plan.total - self.spared + len(self._branches) - self._given_up

    def knows(self, admitted: Admitted, finished: Finished | None) -> None:
        """Count a rollout that the plan has not begun: a branch."""
        restarted = finished is not None and finished.outcome.reason == RESTARTED
        if admitted.branched is msgspec.UNSET:
            return
        self._branches.add(admitted.rollout_id)
        self._given_up += restarted
        self.branched[admitted.sample] += admitted.sample != admitted.rollout_id
        self._expect(self.groups, admitted)

    def is_branch(self, rollout_id: RolloutId) -> bool:
        """Whether it is a branch that is on record, or on its way there."""
        return rollout_id in self._branches

    def restarted(self, rollout: ActiveRollout) -> None:
        """Settle a rollout of before a restart; nothing takes the place of a branch."""
        self.budget.ended(rollout)
        self._given_up += rollout.rollout_id in self._branches
        outcome = Outcome(kind=OutcomeKind.CANCELLED, reason=RESTARTED)
        finished = Finished(outcome=outcome, at=self._flow.parts.clock.now().wall)
        self._count(self.groups, rollout.admitted, finished)

    async def begin(self, ledger: Ledger) -> None:
        """Go on where an earlier coordinator left: everything that ended has been counted."""
        self.groups.settle()
        if self._plan.spare:
            self._cut_stragglers()  # perhaps it had no time to
        if self._feed is not None:
            plan = self._plan
            await self._feed.begin(ledger, plan.run_id, plan.partition.name, self.groups)

    def counted(self, admitted: Admitted, finished: Finished) -> None:
        """Count a rollout that ended under an earlier coordinator."""
        self.budget.counted(finished)
        self._count(self.groups, admitted, finished)

    def ended(self, rollout: ActiveRollout, outcome: Outcome, at: float) -> None:
        """Count a rollout that has its outcome now, at wall time ``at``."""
        self.budget.ended(rollout)
        if not self._awaited(rollout.admitted):
            return
        if not self.groups.ended(rollout.admitted, outcome, at=at, tokens=rollout.tokens):
            return
        if self._feed is not None:
            self._feed.completed(rollout.admitted.group_id)
        if self._plan.spare:
            # Not in this turn: whoever called goes through a list of rollouts of its own.
            asyncio.get_running_loop().call_soon(self._cut_stragglers)

    def passes_over(self, task: Task) -> bool:
        """Whether the next rollout of ``task`` need not begin: its group is complete. Counts it."""
        complete = group_id(self._plan.run_id, task.task_id) in self.groups.complete
        self.spared += complete
        return complete

    def holds(self, index: int) -> bool:
        """Whether a new group would begin with this rollout and the trainer does not read."""
        return index == 0 and bool(self.held)

    def spend(self, now: float) -> None:
        """Look at the budget; once it is spent, what is active may be cut."""
        active = self._flow.active
        if self.budget.look(active.values(), len(active), now) and (cut := self.budget.truncated):
            for rollout in list(active.values()):
                self._flow.finish(rollout, cut)

    @property
    def held(self) -> str:
        """Why no new group begins; empty where one may."""
        if self._feed is None or not self._feed.full:
            return ""
        return "the trainer does not read its complete groups (training.unread_max)"

    def cut_stale(self, rollouts: Iterable[ActiveRollout]) -> None:
        """Truncate those of ``rollouts`` that hold tokens of too old a policy."""
        if self._feed is None:
            return
        for rollout in rollouts:
            if not rollout.finished and (why := self._feed.stale(rollout.policy_versions)):
                self._flow.finish(rollout, Outcome(kind=OutcomeKind.TRUNCATED, reason=why))

    async def count_again(self, ledger: Ledger) -> Groups:
        """Return every group as the ledger has it, those that were forgotten included."""
        found = self._no_groups()
        tasks = {task.task_id for task in self._plan.tasks}
        async for summary in summaries(ledger, self._plan.run_id):
            admitted = admitted_of(summary)
            if admitted.task.task_id not in tasks:
                continue
            self._expect(found, admitted)
            if (finished := finished_of(summary)) is not None:
                self._count(found, admitted, finished)
        found.settle()
        return found

    def straggles(self, admitted: Admitted) -> Outcome | None:
        """Return what becomes of a branch that would begin now; ``None``: it is wanted."""
        cut = admitted.group_id in self.groups.complete
        return Outcome(kind=OutcomeKind.CANCELLED, reason=STRAGGLER) if cut else None

    def _cut_stragglers(self) -> None:
        for rollout in list(self._flow.active.values()):
            if cut := self.straggles(rollout.admitted):
                self._flow.finish(rollout, cut)

    def _no_groups(self) -> Groups:
        return Groups(self._plan.group_size, self._plan.spare, listening=self._feed is not None)

    def _count(self, groups: Groups, admitted: Admitted, finished: Finished) -> None:
        gone = finished.outcome.reason == RESTARTED and admitted.branched is msgspec.UNSET
        if not gone and self._awaited(admitted):
            groups.counted(admitted, finished.outcome, at=finished.at)

    def _expect(self, groups: Groups, admitted: Admitted) -> None:
        """Let the group of a branch wait for it."""
        if admitted.branched is msgspec.UNSET or not self._awaited(admitted):
            return
        if admitted.sample == admitted.rollout_id:
            groups.asked(admitted)
        else:
            groups.grows(admitted)

    def _awaited(self, admitted: Admitted) -> bool:
        """Whether somebody waits for its group: for those of ``stoker branch`` a trainer does."""
        ours = admitted.group_id == group_id(self._plan.run_id, admitted.task.task_id)
        return ours or self._feed is not None
