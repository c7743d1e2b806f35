"""Where a rollout can be branched, what its branch's journal holds, and what is exported of it."""

import msgspec
import pytest

from stoker.coordinator.branching import Point, PointBranches, ProgramBranches, branch_id, point_at
from stoker.coordinator.rebuild import rebuild
from stoker.errors import BadInput
from stoker.export.segments import model_calls
from stoker.model.events import (
    Branched,
    Delivered,
    Dropped,
    Finished,
    Issued,
    JournalEvent,
    Verb,
    encode_event,
)
from stoker.model.generation import GenerateArguments, Generation, Sampling
from stoker.model.ids import CallPath
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.value import Value, canonical_bytes, inline_value
from stoker.rollout.arguments import BranchArguments, TimerArguments
from support.journals import ADMITTED

ASKED = GenerateArguments(parent=None, suffix=(), tools=(), sampling=Sampling())


def fetch(value: Value) -> bytes:
    assert value.inline is not None
    return value.inline


def issued(path: str, verb: Verb = Verb.GENERATE) -> Issued:
    record = ASKED if verb is Verb.GENERATE else TimerArguments(seconds=9.0)
    return Issued(
        path=CallPath(path), verb=verb, digest=path, arguments=inline_value(canonical_bytes(record))
    )


def delivered(path: str) -> Delivered:
    value = inline_value(canonical_bytes(Generation(text=path)))
    return Delivered(path=CallPath(path), value=value, at=5.0)


def journal(*events: JournalEvent) -> list[JournalEvent]:
    return [ADMITTED, *events]


def branch_of(
    events: list[JournalEvent], point: Point, number: int, at: float
) -> list[JournalEvent]:
    branches = PointBranches(events, point)
    one = branches.branch(number, at)
    made = branches.past.events(one)
    assert branches.past.encoded(one) == tuple(map(encode_event, made))
    return made


SEQUENTIAL = journal(
    issued("0"), delivered("0"), issued("1"), delivered("1"), issued("2"), delivered("2"),
    Finished(outcome=Outcome(kind=OutcomeKind.COMPLETED, reward=1.0), at=9.0),
)  # fmt: skip
TIMED = journal(
    issued("0"), delivered("0"), issued("1", Verb.TIMER), issued("2"), delivered("2"), issued("3"),
    delivered("3"), issued("4"),
)  # fmt: skip


def test_a_point_is_the_last_result_before_the_next_model_call() -> None:
    for step, last in ((1, 2), (2, 4)):
        assert (point_at(SEQUENTIAL, step).step, point_at(SEQUENTIAL, step).last) == (step, last)
    with pytest.raises(BadInput, match="shares no result"):
        point_at(SEQUENTIAL, 0)
    with pytest.raises(BadInput, match="has steps 0 to 2; nothing"):
        point_at(SEQUENTIAL, 3)
    with pytest.raises(BadInput, match="has no step"):
        point_at(journal(), 0)


def test_where_a_timeout_is_outstanding_the_nearest_point_before_is_taken() -> None:
    assert [point_at(TIMED, step).step for step in (1, 2, 3)] == [1, 1, 1]


def test_a_branch_holds_the_past_and_its_last_turn_is_open_until_the_program_goes_on() -> None:
    made = branch_of(SEQUENTIAL, point_at(SEQUENTIAL, 2), 3, 77.0)
    standing = rebuild(made, fetch)
    assert [turn.open for turn in standing.turns] == [False, False, True]
    assert standing.outstanding == {}
    root, own = standing.became
    assert (root.turn, root.identity.rollout_id) == (0, ADMITTED.rollout_id)
    assert (own.turn, own.identity.rollout_id) == (2, standing.admitted.rollout_id)
    assert own.identity.epoch == standing.admitted.epoch != ADMITTED.epoch
    went_on = rebuild([*made, issued("2")], fetch)
    assert [turn.open for turn in went_on.turns] == [False, False, False]
    assert (went_on.shared, went_on.at) == (2, 77.0)
    again = branch_of(SEQUENTIAL, point_at(SEQUENTIAL, 2), 4, 77.0)
    assert rebuild(again, fetch).admitted.epoch != own.identity.epoch


def test_what_was_sampled_before_the_branch_point_is_not_the_branchs() -> None:
    made = branch_of(SEQUENTIAL, point_at(SEQUENTIAL, 1), 0, 77.0)
    whole = rebuild([*made, issued("1"), delivered("1")], fetch)
    assert [call.shared for call in model_calls(whole, fetch)] == [True, False]
    assert not any(call.shared for call in model_calls(rebuild(SEQUENTIAL, fetch), fetch))


def test_a_branch_of_a_branch_names_both_and_begins_as_the_first() -> None:
    first = [*branch_of(SEQUENTIAL, point_at(SEQUENTIAL, 1), 0, 77.0), issued("1"), delivered("1"),
             issued("2")]  # fmt: skip
    second = rebuild(branch_of(first, point_at(first, 2), 0, 88.0), fetch)
    names = [became.identity.rollout_id for became in second.became]
    parent = rebuild(first, fetch).admitted.rollout_id
    assert names == [ADMITTED.rollout_id, parent, second.admitted.rollout_id]
    assert [became.turn for became in second.became] == [0, 1, 2]
    assert sum(isinstance(event, Branched) for event in first) == 1


def asked_for(path: str) -> Issued:
    record = BranchArguments(count=3)
    value = inline_value(canonical_bytes(record))
    return Issued(path=CallPath(path), verb=Verb.BRANCH, digest=path, arguments=value)


def test_a_branch_of_a_program_is_of_its_group_and_begins_with_its_number() -> None:
    events = journal(issued("0"), delivered("0"), asked_for("1"), Dropped(path=CallPath("x")))
    branches = ProgramBranches(events, CallPath("1"))
    assert ProgramBranches(events[:-1], CallPath("1")).branch(2, 7.0) == branches.branch(2, 7.0)
    one = branches.branch(2, 77.0)
    assert one.rollout_id == branch_id(ADMITTED.rollout_id, CallPath("1"), 2)
    assert (one.admitted.group_id, one.admitted.index) == (ADMITTED.group_id, ADMITTED.index)
    assert one.admitted.sample == ADMITTED.rollout_id
    made = branches.past.events(one)
    standing = rebuild(made, fetch)
    assert standing.outstanding == {}
    last = standing.turns[-1]
    assert last.open
    assert last.result is not None
    assert (last.result.path, last.result.value) == ("1", canonical_bytes(2))
    assert one.admitted.branched is not msgspec.UNSET
    assert (one.admitted.branched.step, one.admitted.branched.entries) == (1, 4)
    deeper = [*made, issued("2"), delivered("2"), asked_for("3")]
    again = ProgramBranches(deeper, CallPath("3")).branch(1, 88.0).admitted
    assert again.sample == ADMITTED.rollout_id
    assert again.branched is not msgspec.UNSET
    assert (again.branched.generation, again.branched.parent) == (2, one.rollout_id)
    names = {
        ADMITTED.epoch,
        one.admitted.epoch,
        again.epoch,
        branches.branch(1, 0.0).admitted.epoch,
    }
    assert len(names) == 4
