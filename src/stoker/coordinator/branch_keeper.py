"""Making branches of a run that goes on: journalled first, then told of, then they begin.

For ``ctx.branch`` its program is told; for ``stoker branch`` nobody waits.

A branch has one id, made of its parent's, the call and its number, and its journal is written whole
at once. So whoever finds the call without a result, after whatever kill, writes those that are not
there and tells the program: none is lost and none is there twice. Whoever ends the parent before
they are written ends the call.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from stoker.broker.base import Append, JournalRequest
from stoker.coordinator.branch_requests import BranchRequest
from stoker.coordinator.branching import (
    Branch,
    Past,
    PointBranches,
    ProgramBranches,
    branch_id,
    point_at,
)
from stoker.coordinator.calls import Call
from stoker.coordinator.coordinator_parts import Parts
from stoker.coordinator.group_keeper import GroupKeeper
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import BadInput, VerbMisused
from stoker.model.events import Admitted, JournalEvent, decode_event
from stoker.model.ids import RolloutId
from stoker.model.value import canonical_bytes, inline_value
from stoker.rollout.arguments import BranchArguments
from stoker.seams.faultpoints import declare, reach

BRANCH_BEFORE = declare("coordinator.branch.before", "a program's branches are about to be queued")
BRANCH_AFTER = declare("coordinator.branch.after", "branches are committed, their program not told")


class BranchKeeper:
    """Makes the branches that programs and persons ask for."""

    def __init__(self, parts: Parts, keeper: GroupKeeper, news: Callable[[], None]) -> None:
        self._parts = parts
        self._keeper = keeper
        self._news = news
        self.waiting: deque[RolloutId] = deque()
        """Branches that are journalled and have not begun; ``news`` is told of more."""

    def start(self, rollout: ActiveRollout, call: Call) -> None:
        """Carry ``call`` out in a task of its own; withdrawing the call ends it.

        Not before its turn is queued; what is shared is what was journalled up to the call.
        """
        call.task = asyncio.create_task(self._branch(rollout, call))
        call.task.add_done_callback(self._parts.flow.dispatcher.ended)

    async def _branch(self, rollout: ActiveRollout, call: Call) -> None:
        await self._parts.appender.flush()
        refusal = self._queue(rollout, call, await self._events(rollout.rollout_id))
        if refusal is not None:
            result = Result(path=call.path, fault=refusal.record())
        else:
            await self._parts.appender.flush()
            reach(BRANCH_AFTER)
            result = Result(path=call.path, value=inline_value(canonical_bytes(0)))
        self._parts.flow.arrived(rollout, result)

    def _queue(
        self, rollout: ActiveRollout, call: Call, events: Sequence[JournalEvent]
    ) -> VerbMisused | None:
        """Queue the journals of those branches that are not there, or return why there are none.

        All of them or none for whoever sees this process only; nothing waits in between.
        """
        count = msgspec.msgpack.decode(call.arguments, type=BranchArguments).count
        refusal = self._refusal(rollout, call, count)
        if refusal is not None:
            return refusal
        branches = ProgramBranches(events, call.path)
        self._journal(branches.past, [branches.branch(n, self._now) for n in range(1, count)])
        return None

    @property
    def _now(self) -> float:
        return self._parts.clock.now().wall

    def _journal(self, past: Past, wanted: list[Branch]) -> None:
        """Queue the journals of those of ``wanted`` that are not there; they begin in turn."""
        reach(BRANCH_BEFORE)
        for one in wanted:
            if self._keeper.is_branch(one.rollout_id):
                continue
            self._parts.appender.append(
                Append(rollout_id=one.rollout_id, expected_seq=0, events=past.encoded(one))
            )
            self._keeper.knows(one.admitted, None)
            self.waiting.append(one.rollout_id)
        self._news()

    async def carry_out(self, request: BranchRequest) -> None:
        """Make those branches of a request that are not there; one that cannot be is logged.

        What the request shares may be gone with a power cut, and a restart with another program
        leaves nothing that could be shared.
        """
        if all(map(self._keeper.is_branch, request.rollouts)):
            return
        await self._parts.appender.flush()
        events = await self._events(request.parent)
        admitted = events[0] if events else None
        same = isinstance(admitted, Admitted) and self._parts.plan.has_program_of(admitted)
        with suppress(BadInput):
            if same and point_at(events, request.point.step) == request.point:
                branches = PointBranches(events, request.point, request.first)
                numbers = range(request.first, request.first + request.count)
                self._journal(branches.past, [branches.branch(n, self._now) for n in numbers])
                return
        self._parts.flow.parts.log.event(
            "branch_refused",
            level="warning",
            rollout=request.parent,
            step=request.point.step,
            count=request.count,
        )

    async def _events(self, rollout_id: RolloutId) -> list[JournalEvent]:
        asked = JournalRequest(run_id=self._parts.plan.run_id, rollout_id=rollout_id)
        return [decode_event(one) for one in (await self._parts.ledger.journal(asked)).events]

    def _refusal(self, rollout: ActiveRollout, call: Call, count: int) -> VerbMisused | None:
        """Return why no branch is made; where the first is there, they were granted before."""
        sample, most = rollout.admitted.sample, self._parts.plan.branches_max
        made = self._keeper.branched[sample] + count - 1
        first = branch_id(rollout.rollout_id, call.path, 1)
        if made <= most or self._keeper.is_branch(first):
            return None
        return VerbMisused(
            f"ctx.branch({count}) of {rollout.rollout_id} would bring the branches of rollout "
            f"{sample} to {made}, and run.branches_max is {most}; no branch was made; ask for "
            "fewer or raise it"
        )
