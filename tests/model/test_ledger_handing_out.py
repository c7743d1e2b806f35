"""Who is given what: suspects alone, caps and quotas exactly, leases named or let go."""

from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import (
    Cancel,
    CancelDisposition,
    CompleteDisposition,
    CompleteRequest,
    Enroll,
    HeartbeatRequest,
    HoldVerdict,
    Lease,
    LeaseRequest,
    LedgerLimits,
)
from stoker.errors import LedgerRefused
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId
from stoker.model.value import Value
from support.ledger import ENGINES, WORKER, Harness, act, action, held, with_ledger

OTHER = WorkerId("wrk_2")
LEASE = 16.0
"""A power of two: halves of it are exact."""


@pytest.fixture(params=[one for one in ENGINES if one != "owner"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ids(leases: list[Lease]) -> list[ActionId]:
    return [lease.action.action_id for lease in leases]


async def suspects(h: Harness, *numbers: int, **more: Any) -> None:
    """Let a worker die with these actions started, so that any of them may have killed it."""
    doomed = WorkerId("wrk_doomed")
    await h.enroll(doomed)
    await h.submit(*(action(n, **more) for n in numbers))
    request = LeaseRequest(worker_id=doomed, action_ids=tuple(act(n) for n in numbers))
    await h.start(*(await h.ledger.lease(request)).leases, worker=doomed)
    await h.enroll(WorkerId("wrk_heir"), slots=0, replaces=doomed)


async def by_ticket(h: Harness, *numbers: int, worker: WorkerId = WORKER) -> list[ActionId]:
    request = LeaseRequest(worker_id=worker, action_ids=tuple(act(n) for n in numbers))
    return ids(list((await h.ledger.lease(request)).leases))


def test_i5_one_worker_drains_for_a_suspect_that_has_waited_a_lease(
    engine: str, tmp_path: Path
) -> None:
    first = WorkerId("wrk_0z")  # of those that could serve it the first in name drains

    async def scenario(h: Harness) -> None:
        await h.enroll(WorkerId("wrk_00_dead"))
        await h.enroll(first, slots=1)
        await h.ledger.enroll(Enroll(worker_id=WorkerId("wrk_00_x"), name="x", slots={"x": 4}))
        await h.submit(action(10), action(11))
        mine = await h.lease(first, slots=1)
        others = await h.lease(slots=1)

        async def pass_time(seconds: float) -> None:
            for _ in range(2):
                await h.advance(seconds / 2)
                await h.heartbeat(*mine, worker=first)
                await h.heartbeat(*others)
                await h.heartbeat(worker=WorkerId("wrk_00_x"))

        await h.submit(action(1), action(2))
        await pass_time(LEASE / 2)  # queued before it was ever leased: that is no waiting
        await suspects(h, 1, 2)
        await h.submit(*(action(n, deadline_seconds=3600.0) for n in range(20, 26)))
        await pass_time(LEASE - 1.0)
        mine += await h.lease(first, slots=1)
        assert ids(mine) == [act(10), act(20)], "the suspects have not waited long enough"
        await h.submit(action(30, worker_class="x"))
        poll = LeaseRequest(worker_id=WorkerId("wrk_00_x"), slots={"x": 4})
        assert ids(list((await h.ledger.lease(poll)).leases)) == [act(30)], "not of their class"
        await pass_time(1.0)
        assert await h.lease(first, slots=1) == [], "now it empties its hands"
        others += await h.lease(slots=1)
        assert ids(others) == [act(11), act(21)], "only one of them drains"
        await h.complete(*mine, worker=first)
        [alone] = await h.lease(first, slots=4)
        assert (alone.action.action_id, alone.alone) == (act(1), True)
        assert await h.lease(first, slots=4) == [], "nothing runs beside it"
        await h.complete(alone, worker=first)
        assert ids(await h.lease(first, slots=4)) == [act(2)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(lease_seconds=LEASE))


def test_i5_suspects_go_alone_by_ticket_too(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER)
        await suspects(h, 1, 2, worker_class="queued")
        await h.submit(*(action(n, worker_class="queued") for n in (3, 4)))
        assert await by_ticket(h, 3) == [act(3)]
        assert await by_ticket(h, 1) == [], "its hands are full"
        assert await by_ticket(h, 4) == [act(4)]
        assert await by_ticket(h, 1, 2, worker=OTHER) == [act(1)]
        await h.submit(action(5, worker_class="queued"))
        assert await by_ticket(h, 5, worker=OTHER) == [], "nothing runs beside it"
        assert await by_ticket(h, 5) == [act(5)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(ticket_classes=("queued",)))


def test_i6_tickets_keep_to_quotas_and_room_for_results(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n, worker_class="queued") for n in range(4)))
        assert await by_ticket(h, 0, 1, 2) == [act(0), act(1)], "two of a run at once"
        other = await h.beside(RunId("run_2"))
        mine: dict[str, Any] = {
            "run_id": other.run,
            "rollout_id": RolloutId("rol_2"),
            "worker_class": "queued",
        }
        await other.append(action(8, **mine), action(9, **mine), rollout=RolloutId("rol_2"))
        assert await by_ticket(h, 8, 9) == [act(8)], "three results have room"
        assert await by_ticket(h, 9) == []

    limits = LedgerLimits(ticket_classes=("queued",), leased_per_run_max=2, results_max=3)
    with_ledger(engine, tmp_path, scenario, limits)


def test_i6_all_classes_of_a_poll_share_the_room_for_results(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2), *(action(n, worker_class="slow") for n in (3, 4)))
        poll = LeaseRequest(worker_id=WORKER, slots={"fast": 4, "slow": 4})
        assert ids(list((await h.ledger.lease(poll)).leases)) == [act(1), act(2), act(3)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(results_max=3))


def test_i6_leased_and_started_work_counts_for_its_class_and_no_other(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2), action(3))
        [started] = await h.lease(slots=1)
        await h.start(started)
        await h.lease(slots=2)
        said = await h.submit(action(4), action(5), action(7, worker_class="slow"))
        assert said == ["accepted", "parked", "accepted"]
        assert await h.submit(action(6)) == ["parked"], "behind what is parked already"
        await h.complete(started)
        stats = (await h.ledger.stats()).classes["fast"]
        assert (stats.queued, stats.parked) == (2, 1), "one for one, at once"

    with_ledger(engine, tmp_path, scenario, LedgerLimits(queued_per_class_max=4))


def test_i6_a_rollouts_parked_action_waits_its_turn_for_its_runs_quota(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        async def submit(number: int, rollout: str) -> str:
            one = action(number, rollout_id=RolloutId(rollout))
            reply = await h.append(one, rollout=RolloutId(rollout))
            return str(reply.replies[0].submits[0])

        assert [await submit(1, "a"), await submit(2, "b")] == ["accepted", "accepted"]
        assert [await submit(3, "c"), await submit(4, "a")] == ["parked", "parked"]
        first, second = await h.lease()
        await h.complete(first)
        assert ids(await h.lease()) == [act(3)], "it was submitted before"
        await h.complete(second)
        assert ids(await h.lease()) == [act(4)]

    limits = LedgerLimits(outstanding_per_rollout_max=1, queued_per_run_max=2)
    with_ledger(engine, tmp_path, scenario, limits)


def test_i6_quotas_count_what_is_on_its_way_into_the_queue(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1), action(2)) == ["accepted"] * 2
        other = await h.beside(RunId("run_2"))
        theirs = RolloutId("rol_2")
        more: dict[str, Any] = {"run_id": other.run, "rollout_id": theirs}
        reply = await other.append(*(action(n, **more) for n in range(5, 9)), rollout=theirs)
        assert [str(d) for d in reply.replies[0].submits] == ["parked"] * 4
        stats = (await h.ledger.stats()).runs[other.run]
        assert stats.parked == 4
        await h.complete(*await h.lease())
        leases = await h.lease()
        assert ids(leases) == [act(5), act(6)], "the queue takes two"
        await h.complete(*leases)
        assert ids(await h.lease()) == [act(7), act(8)]

    limits = LedgerLimits(queued_max=2, queued_per_run_max=3)
    with_ledger(engine, tmp_path, scenario, limits)


def test_i6_cancelling_what_is_parked_lets_nothing_else_in(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(*(action(n) for n in range(3))) == ["accepted", "parked", "parked"]
        await h.cancel(act(1))
        assert ids(await h.lease()) == [act(0)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(outstanding_per_rollout_max=1))


def test_i10_a_rollout_is_cancelled_whole_with_what_is_parked(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(4)))
        [done, _running] = await h.lease(slots=2)
        await h.complete(done)
        request = Cancel(run_id=h.run, fence=h.fence, rollout_ids=(action(0).rollout_id,))
        ended = (await h.ledger.cancel(request)).dispositions
        assert ended == {act(n): CancelDisposition.CANCELLED for n in (1, 2, 3)}
        assert set(await h.completed()) == {act(n) for n in range(4)}

    with_ledger(engine, tmp_path, scenario, LedgerLimits(queued_max=3))


def test_a_lease_is_lost_a_leases_time_after_it_was_last_named(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, holder=WORKER))
        [lease] = await h.lease()
        await h.start(lease)
        for _ in range(4):
            await h.advance(LEASE / 2)
            assert await h.heartbeat(lease) == [HoldVerdict.OK]
        await h.advance(LEASE / 2)
        await h.heartbeat()
        assert await h.lease() == [], "one heartbeat without it is no loss"
        await h.advance(LEASE / 2)
        await h.heartbeat()
        [again] = await h.lease()
        assert (again.attempt, again.alone) == (2, False), "an attempt of its own, no suspect"
        assert await h.start(lease) == [HoldVerdict.LOST]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(lease_seconds=LEASE))


def test_a_release_ends_its_own_lease_and_no_other(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER)
        await h.submit(action(1, attempts_max=3))
        [first] = await h.lease()
        await h.start(first)
        assert await h.release(first) == [HoldVerdict.OK]
        [second] = await h.lease(OTHER)
        assert (second.delivery, second.attempt) == (2, 2), "begun again, its attempt spent"
        await h.start(second, worker=OTHER)
        assert await h.release(first) == [HoldVerdict.LOST]
        assert await h.heartbeat(second, worker=OTHER) == [HoldVerdict.OK]
        assert await h.complete(second, worker=OTHER) == [CompleteDisposition.OK]

    with_ledger(engine, tmp_path, scenario)


def test_an_action_with_one_attempt_and_one_delivery_runs_once(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1, attempts_max=1, deliveries_max=1)) == ["accepted"]
        [lease] = await h.lease()
        assert await h.complete(lease) == [CompleteDisposition.OK]
        await h.append(acknowledges=(act(7), act(1)))  # one that nobody knows changes nothing
        assert await h.completed() == {}

    with_ledger(engine, tmp_path, scenario)


def test_a_result_that_is_not_its_digest_is_refused_and_can_be_sent_again(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        damaged = Completion(
            action_id=act(1),
            fence=lease.fence,
            status=CompletionStatus.OK,
            observation=Value(digest="0" * 64, size_bytes=3, inline=b"abc"),
        )
        with pytest.raises(LedgerRefused, match="digest"):
            await h.ledger.complete(CompleteRequest(worker_id=WORKER, completions=(damaged,)))
        assert await h.complete(lease) == [CompleteDisposition.OK]

    with_ledger(engine, tmp_path, scenario)


def test_a_replaced_incarnation_is_refused_for_ever(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER, replaces=WORKER)
        for _ in range(2):
            with pytest.raises(LedgerRefused, match="reported dead"):
                await h.enroll()
            with pytest.raises(LedgerRefused, match="reported dead"):
                await h.lease()
            with pytest.raises(LedgerRefused, match="reported dead"):
                await h.ledger.heartbeat(HeartbeatRequest(worker_id=WORKER, held=held()))
            await h.crash()

    with_ledger(engine, tmp_path, scenario)
