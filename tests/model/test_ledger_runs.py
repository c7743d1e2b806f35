"""Many runs on one ledger: fair shares of slots and queue places, quotas, what is counted."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.broker.base import Lease, LedgerLimits
from stoker.broker.counts import Line
from stoker.broker.queueing import Claim, shares
from stoker.model.action import Action
from stoker.model.ids import RolloutId, RunId, WorkerId
from support.ledger import ENGINES, RUN, Harness, action, with_ledger

SECOND = RunId("run_2")
ROLLOUT = RolloutId("rol_1")
OTHER = WorkerId("wrk_2")
MANY = 10_000


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def second(number: int) -> Action:
    return action(50_000 + number, run_id=SECOND, rollout_id=ROLLOUT)


def by_run(leases: list[Lease]) -> Counter[str]:
    return Counter(lease.action.run_id for lease in leases)


def test_a_run_with_ten_thousand_queued_does_not_starve_another(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n, priority=9) for n in range(MANY)))
        other = await h.beside(SECOND)
        await other.submit(*(second(n) for n in range(40)))
        leases = await h.lease(slots=32)
        assert by_run(leases) == {RUN: 16, SECOND: 16}, "slots in equal parts, whatever waits"
        mine = [lease for lease in leases if lease.action.run_id == RUN]
        await h.complete(*mine)
        assert by_run(await h.lease(slots=8)) == {RUN: 8}, "the other still has its share"
        await h.crash()
        await h.ledger.stats()  # a lease sent across the crash would repeat the unstarted ones
        assert by_run(await h.lease(slots=8)) == {RUN: 8}, "shares are counted after a restart"
        rest = await h.lease(slots=64)
        assert by_run(rest) == {RUN: 40, SECOND: 24}, "nobody waits while a slot is free"

    limits = LedgerLimits(outstanding_per_rollout_max=2 * MANY, results_max=MANY)
    with_ledger(engine, tmp_path, scenario, limits)


def test_one_slot_alternates_between_runs(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(6)))
        other = await h.beside(SECOND)
        await other.submit(*(second(n) for n in range(3)))
        order = []
        while leases := await h.lease(slots=1):
            order += [lease.action.run_id for lease in leases]
            await h.complete(*leases)
        assert order[:6] in ([RUN, SECOND] * 3, [SECOND, RUN] * 3)
        assert order[6:] == [RUN] * 3

    with_ledger(engine, tmp_path, scenario)


def test_parked_actions_of_a_late_run_are_let_in_before_a_long_backlog(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(200)))
        other = await h.beside(SECOND)
        assert set(await other.submit(*(second(n) for n in range(5)))) == {"parked"}
        await h.complete(*await h.lease(slots=5))
        assert by_run(await h.lease(slots=5))[SECOND] > 0, "the next places were the other run's"

    with_ledger(engine, tmp_path, scenario, LedgerLimits(queued_max=20))


def test_i6_quotas_of_a_run_park_and_hold_it_and_leave_the_others_alone(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        said = await h.submit(*(action(n) for n in range(8)))
        assert said == ["accepted"] * 5 + ["parked"] * 3
        other = await h.beside(SECOND)
        assert await other.submit(second(1)) == ["accepted"]
        leases = await h.lease()
        assert by_run(leases) == {RUN: 2, SECOND: 1}, "two of a run at once"
        assert await h.lease() == []
        runs = (await h.ledger.stats()).runs
        assert (runs[RUN].queued, runs[RUN].leased, runs[RUN].parked) == (3, 2, 3)
        assert runs[RUN].over_caps == 3
        assert (runs[SECOND].queued, runs[SECOND].leased, runs[SECOND].parked) == (0, 1, 0)
        await h.crash()
        done = [lease.action.action_id for lease in leases if lease.action.run_id == RUN]
        await h.complete(*leases)
        while leases := await h.lease():
            assert by_run(leases)[RUN] <= 2
            done += [lease.action.action_id for lease in leases]
            await h.complete(*leases)
        assert done == [action(n).action_id for n in range(8)], "in order, none forgotten"
        assert (await h.ledger.stats()).runs == {}

    limits = LedgerLimits(queued_per_run_max=5, leased_per_run_max=2)
    with_ledger(engine, tmp_path, scenario, limits)


def test_a_run_whose_work_is_held_by_another_worker_leaves_its_share_to_others(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER)
        await h.submit(*(action(n, holder=OTHER) for n in range(20)), action(20))
        other = await h.beside(SECOND)
        await other.submit(*(second(n) for n in range(20)))
        assert by_run(await h.lease(slots=10)) == {RUN: 1, SECOND: 9}

    with_ledger(engine, tmp_path, scenario)


claims = st.dictionaries(
    st.builds(
        Line, st.sampled_from(["fast", "tests"]), st.sampled_from([RUN, SECOND, RunId("r3")])
    ),
    st.builds(Claim, st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)),
)


def by_hand(total: int, asked: dict[Line, Claim], rooms: dict[str, int]) -> dict[Line, int]:
    """Deal places out one at a time, each to whoever has the least."""
    got = dict.fromkeys(asked, 0)
    for _ in range(total):
        able = [
            (claim.has + got[line], claim.served, line)
            for line, claim in asked.items()
            if got[line] < claim.most
            and sum(n for other, n in got.items() if other.worker_class == line.worker_class)
            < rooms[line.worker_class]
        ]
        if not able:
            break
        got[min(able)[2]] += 1
    return {line: count for line, count in got.items() if count}


@given(total=st.integers(-1, 30), asked=claims, room=st.integers(0, 12))
def test_shares_are_max_min_fair(total: int, asked: dict[Line, Claim], room: int) -> None:
    rooms = {"fast": room, "tests": 12}
    assert shares(total, asked, rooms) == by_hand(total, asked, rooms)
    assert rooms == {"fast": room, "tests": 12}, "what was given is left as it is"


def test_counters_follow_an_action_from_queue_to_result(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease] = await h.lease(slots=1)
        for step, counts in (
            (None, (1, 1, 0)),
            (h.start, (1, 0, 1)),
            (h.complete, (1, 0, 0)),
        ):
            if step is not None:
                await step(lease)
            fast = (await h.ledger.stats()).classes["fast"]
            assert (fast.queued, fast.leased, fast.started) == counts

    with_ledger(engine, tmp_path, scenario)
