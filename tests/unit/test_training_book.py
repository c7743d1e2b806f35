"""The journal of deliveries, folded; and which outcomes make a group complete."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from stoker.coordinator.delivery_book import DeliveryBook, read_book
from stoker.coordinator.groups import STRAGGLER, Groups
from stoker.model.deliveries import (
    Committed,
    DeliveryEvent,
    HandedOut,
    Published,
    Rewound,
    decode_delivery,
    encode_delivery,
)
from stoker.model.events import Admitted, BranchedFrom, Identity
from stoker.model.ids import GroupId, RolloutId, RunId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task

A, B, C = GroupId("grp_a"), GroupId("grp_b"), GroupId("grp_c")


def handed(group: GroupId, number: int = 1) -> HandedOut:
    return HandedOut(group_id=group, number=number)


def committed(group: GroupId, number: int = 1) -> Committed:
    return Committed(group_id=group, number=number)


def test_a_rewind_takes_back_commits_and_policies_after_it() -> None:
    events: list[DeliveryEvent] = [
        Published(version=1),
        handed(A),
        committed(A),
        handed(B),
        committed(B),
        Published(version=2),
        Rewound(position=3),
    ]
    book = read_book(events)
    assert book.committed == {A}
    assert book.open == {}
    assert book.handed == {A: 1, B: 1}, "how often a group went out is never forgotten"
    assert book.policy_version == 1
    assert [version for version in range(4) if book.abandoned(version)] == [2]
    events += [Published(version=3), Rewound(position=6)]
    back = read_book(events)
    assert back.committed == {A, B}
    assert back.line == [1, 2]
    assert [version for version in range(5) if back.abandoned(version)] == [3]


def test_staleness_counts_publications_of_this_line() -> None:
    book = read_book([Published(version=v) for v in (2, 5)] + [Rewound(position=1)])
    assert (book.lag(2), book.lag(5)) == (0, 0)
    book.apply(Published(version=9))
    book.apply(Published(version=9))
    assert (book.lag(9), book.lag(5), book.lag(2)) == (0, 1, 1)
    assert book.lag(0) == 2, "what was never published is what the model began with"
    assert book.lag(2**31 - 1) == 2, "a number made of a name has no order"


@pytest.mark.parametrize("seed", range(20))
def test_the_book_is_a_function_of_its_events(seed: int) -> None:
    draw = random.Random(seed)
    events: list[DeliveryEvent] = []
    whole = DeliveryBook()
    for _ in range(60):
        event = _some_event(draw, events)
        then = None
        if isinstance(event, Rewound):
            then = read_book(events[: event.position]).standing()
        whole.apply(event, then)
        events.append(event)
        assert decode_delivery(encode_delivery(event)) == event
    again = read_book(events)
    assert vars(again) == vars(whole)
    assert whole.position == len(events)
    assert not whole.open.keys() & whole.committed
    assert whole.line == sorted(set(whole.line))
    cut = read_book(events[:-1])
    assert cut.digest != whole.digest


def test_a_trainer_that_came_back_often_is_read_in_one_pass() -> None:
    events: list[DeliveryEvent] = []
    for number in range(1, 65):  # each state is saved after the restore before it
        events += [handed(A, number), Rewound(position=len(events))]
    book = read_book(events)  # reading each prefix anew would take 2 ** 64 steps
    assert book.handed == {A: 64}
    assert (book.open, book.committed) == ({}, set())


def _some_event(draw: random.Random, events: Sequence[DeliveryEvent]) -> DeliveryEvent:
    book = read_book(events)
    group = draw.choice([A, B, C])
    kind = draw.randrange(8)
    if kind == 0 and events:
        return Rewound(position=draw.randrange(len(events) + 1))
    if kind == 1:
        return Published(version=max(book.published, default=0) + draw.randrange(1, 3))
    if kind < 5 and book.open:
        open_group = next(iter(book.open))
        return committed(open_group, book.open[open_group])
    if group in book.committed:
        return Published(version=max(book.published, default=0) + 1)
    return handed(group, book.handed.get(group, 0) + 1)


def admitted(index: int, group: GroupId = A) -> Admitted:
    return Admitted(
        run_id=RunId("r"), rollout_id=RolloutId(f"rol_{group}{index}"), group_id=group,
        index=index, task=Task(task_id="t"), program="p", program_version="1",
        program_digest="d", python="3.11", hash_seed=0, epoch="e", at=0.0, timeout_seconds=1.0,
    )  # fmt: skip


COMPLETED = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)
TRUNCATED = Outcome(kind=OutcomeKind.TRUNCATED, reason="limit")
FAILED = Outcome(kind=OutcomeKind.FAILED)
CUT = Outcome(kind=OutcomeKind.CANCELLED, reason=STRAGGLER)


def test_without_spares_a_group_waits_for_everybody() -> None:
    groups = Groups(3, 0, listening=True)
    told = [groups.ended(admitted(i), out, at=i) for i, out in enumerate((FAILED, COMPLETED))]
    assert told == [False, False]
    assert groups.ended(admitted(2), FAILED, at=9.0)
    assert groups.complete == {A: 9.0}
    assert len(groups.members(A)) == 3


@pytest.mark.parametrize("spare", [0, 2])
def test_a_group_was_complete_when_it_was_whatever_order_it_is_counted_in(spare: int) -> None:
    """Live in order of outcomes; after a crash in order of admission."""
    ends = [(0, COMPLETED, 9.0), (1, COMPLETED, 1.0), (2, FAILED, 4.0), (3, TRUNCATED, 5.0)]
    times = []
    for order in (sorted(ends, key=lambda one: one[2]), ends, ends[::-1]):
        groups = Groups(4 - spare, spare, listening=True)
        for index, outcome, at in order:
            groups.ended(admitted(index), outcome, at=at)
        times.append(groups.complete[A])
    assert times == [5.0 if spare else 9.0] * 3


def test_a_fault_takes_nobodys_place_while_others_may_end() -> None:
    groups = Groups(2, 2)
    outcomes = (FAILED, COMPLETED, FAILED)
    assert not any(groups.ended(admitted(i), one, at=i) for i, one in enumerate(outcomes))
    assert groups.ended(admitted(3), TRUNCATED, at=3.0)
    other = Groups(2, 1)
    assert not any(other.ended(admitted(i), FAILED, at=i) for i in range(2))
    assert other.ended(admitted(2), FAILED, at=2.0), "nobody is left to wait for"


def branch(number: int, of: int, group: GroupId = A) -> Admitted:
    parent = admitted(of, group)
    root = Identity(rollout_id=parent.rollout_id, group_id=group, index=of, epoch="e", at=0.0)
    branched = BranchedFrom(
        parent=parent.rollout_id, step=1, entries=2, digest="d", generation=1, root=root,
        sample=parent.rollout_id,
    )  # fmt: skip
    name = RolloutId(f"{parent.rollout_id}.{number}")
    return msgspec.structs.replace(parent, rollout_id=name, branched=branched)


def test_a_group_grows_by_what_its_programs_branch_off_and_waits_for_it() -> None:
    groups = Groups(2, 0, listening=True)
    for number in (1, 2):
        groups.grows(branch(number, 0))
    assert not groups.ended(admitted(0), COMPLETED, at=1.0)
    assert not groups.ended(branch(2, 0), FAILED, at=2.0)
    assert not groups.ended(admitted(1), COMPLETED, at=3.0)
    assert groups.ended(branch(1, 0), COMPLETED, at=4.0)
    assert (groups.complete, len(groups.members(A))) == ({A: 4.0}, 4)


def test_what_a_program_branched_off_counts_as_one_in_whatever_order() -> None:
    """0 is late by a branch, of 1 its branch alone ended by itself, 2 failed."""
    ends = [
        (admitted(0), COMPLETED, 1.0), (branch(1, 0), COMPLETED, 9.0), (admitted(1), FAILED, 2.0),
        (branch(1, 1), COMPLETED, 3.0), (admitted(2), FAILED, 4.0),
    ]  # fmt: skip
    for order in (sorted(ends, key=lambda one: one[2]), ends[::-1]):
        groups = Groups(2, 1, listening=True)
        for of in (0, 1):
            groups.grows(branch(1, of))
        told = [groups.ended(who, outcome, at=at) for who, outcome, at in order]
        assert told == [False] * 4 + [True], order
        assert groups.complete == {A: 9.0}
    again = Groups(2, 1, listening=True)
    for who, outcome, at in ends[:-1]:
        again.counted(who, outcome, at=at)
        again.grows(branch(2, 2))
    assert again.complete == {}
    again.settle()
    assert again.complete == {A: 9.0}


def test_a_straggler_that_goes_on_in_a_branch_is_not_of_a_complete_group() -> None:
    groups = Groups(1, 1, listening=True)
    groups.grows(branch(1, 0))
    assert not groups.ended(admitted(0), COMPLETED, at=1.0)
    assert groups.ended(admitted(1), COMPLETED, at=2.0)
    assert groups.members(A) == (admitted(1).rollout_id,), "not yet: its branch goes on"
    assert not groups.ended(branch(1, 0), CUT, at=3.0)
    assert (groups.complete, len(groups.members(A))) == ({A: 2.0}, 3)


def test_a_forgotten_group_is_the_same_again_while_a_stragglers_branch_goes_on() -> None:
    groups, fresh = Groups(1, 1, listening=True), Groups(1, 1, listening=True)
    for one in (groups, fresh):
        one.grows(branch(1, 0))
        one.counted(admitted(0), COMPLETED, at=1.0)
        one.counted(admitted(1), COMPLETED, at=2.0)
        one.settle()
    before = groups.members(A)
    groups.forget(A)
    groups.take_over(fresh)
    assert groups.members(A) == before == (admitted(1).rollout_id,)
    groups.ended(branch(1, 0), CUT, at=3.0)
    assert len(groups.members(A)) == 3


def test_the_bias_of_what_was_cut_off_is_a_lower_bound() -> None:
    groups = Groups(2, 1, listening=True)
    assert groups.bias.tokens_bias_at_least is None
    groups.ended(admitted(0), COMPLETED, at=1.0, tokens=100)
    assert groups.ended(admitted(1), COMPLETED, at=2.0, tokens=200)
    assert not groups.ended(admitted(2), CUT, at=3.0, tokens=450)
    bias = groups.bias
    assert (bias.groups, bias.kept, bias.kept_tokens) == (1, 2, 300)
    assert (bias.cut, bias.cut_tokens) == (1, 450)
    assert bias.tokens_bias_at_least == pytest.approx(250 / 150 - 1)
    assert bias.told() == (
        "1 cut off as stragglers in 1 group; begun rollouts are ≥ 67% longer than kept ones"
    )
    # Who ended under an earlier coordinator has not been measured here.
    groups.ended(admitted(0, B), COMPLETED, at=1.0)
    groups.ended(admitted(1, B), COMPLETED, at=2.0, tokens=10)
    groups.ended(admitted(2, B), CUT, at=3.0, tokens=10)
    assert groups.bias.groups == 1
