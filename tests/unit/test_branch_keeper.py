"""Making a program's branches where some are there already, of before a kill."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker.broker.base import Append
from stoker.coordinator.branch_keeper import BranchKeeper
from stoker.coordinator.branching import branch_id
from stoker.coordinator.calls import Call
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import VerbMisused
from stoker.model.events import Issued, JournalEvent, Verb, encode_event
from stoker.model.ids import CallPath, RolloutId
from stoker.model.value import canonical_bytes, inline_value
from stoker.rollout.arguments import BranchArguments
from stoker.seams.clock import SystemClock
from support.journals import ADMITTED

PATH = CallPath("0")
ASKED = canonical_bytes(BranchArguments(count=4))
JOURNAL: tuple[JournalEvent, ...] = (
    ADMITTED,
    Issued(path=PATH, verb=Verb.BRANCH, digest="0", arguments=inline_value(ASKED)),
)


class World:
    """Everybody a branch keeper deals with."""

    def __init__(self, *there: int, before: int = 0, most: int = 64) -> None:
        self.appended: list[RolloutId] = []
        self.results: list[Result] = []
        known = {branch_id(ADMITTED.rollout_id, PATH, number) for number in there}
        keeper = SimpleNamespace(
            branched=Counter({ADMITTED.rollout_id: before}),
            is_branch=known.__contains__,
            knows=lambda admitted, _: known.add(admitted.rollout_id),
        )
        parts = SimpleNamespace(
            ledger=self,
            appender=self,
            plan=SimpleNamespace(run_id="run", branches_max=most),
            clock=SystemClock(),
            flow=SimpleNamespace(arrived=lambda _, result: self.results.append(result)),
        )
        self.keeper = BranchKeeper(cast("Any", parts), cast("Any", keeper), lambda: None)

    async def flush(self) -> None:
        pass

    async def journal(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(events=tuple(map(encode_event, JOURNAL)))

    def append(self, append: Append) -> None:
        assert append.expected_seq == 0
        self.appended.append(append.rollout_id)

    def branch(self) -> Result:
        call = Call(path=PATH, verb=Verb.BRANCH, arguments=ASKED, issued_at=0.0)
        rollout = ActiveRollout(admitted=ADMITTED, seq=2)
        asyncio.run(self.keeper._branch(rollout, call))
        (result,) = self.results
        return result


@pytest.mark.parametrize("there", [(), (1,), (1, 2), (1, 2, 3)])
def test_only_branches_that_are_not_there_are_made(there: tuple[int, ...]) -> None:
    world = World(*there, before=len(there), most=3)
    assert world.branch().value == inline_value(canonical_bytes(0))
    left = [branch_id(ADMITTED.rollout_id, PATH, n) for n in range(1, 4) if n not in there]
    assert world.appended == left
    assert list(world.keeper.waiting) == left


def test_past_the_bound_none_is_made_and_what_was_granted_stays_granted() -> None:
    world = World(before=1, most=3)
    fault = world.branch().fault
    assert fault is not None
    assert fault.code == VerbMisused.code
    assert "run.branches_max is 3; no branch was made" in fault.message
    assert world.appended == []
    granted = World(1, before=3, most=3)  # set lower by a resume, say
    assert granted.branch().fault is None
    assert len(granted.appended) == 2
