"""Rules that a mutant of the broker core once broke without a quick test noticing."""

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import (
    Append,
    AppendBatch,
    Attach,
    CompleteDisposition,
    CompleteRequest,
    Durability,
    Enroll,
    HoldVerdict,
    LeaseReply,
    LeaseRequest,
    LedgerLimits,
    Request,
    RolloutsRequest,
)
from stoker.broker.service import LedgerService
from stoker.broker.store_memory import MemoryStore
from stoker.errors import LedgerFenced, LedgerRefused
from stoker.model.action import Action, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import WorkerId
from support.ledger import (
    ENGINES,
    ROLLOUT,
    RUN,
    WORKER,
    Harness,
    ManualClock,
    act,
    action,
    with_ledger,
)
from support.ledger_books import check_books


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_b16_only_what_an_external_start_promises_is_synced(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2, effect=Effect.EXTERNAL))
        plain, external = await h.lease()
        syncs = [(await h.ledger.stats()).syncs_total]
        for lease in (plain, external, external):
            await h.start(lease)
            syncs.append((await h.ledger.stats()).syncs_total)
        assert [after - before for before, after in pairwise(syncs)] == [0, 1, 0]

    with_ledger(engine, tmp_path, scenario)


def test_only_what_must_outlive_a_power_cut_is_synced(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        async def appended(**more: Any) -> int:
            before = (await h.ledger.stats()).syncs_total
            one = Append(
                rollout_id=ROLLOUT,
                expected_seq=h.seqs.get(ROLLOUT, 0),
                events=(b"e",),
                submits=more.pop("submits", ()),
                finished=more.pop("finished", False),
            )
            batch = AppendBatch(run_id=RUN, fence=h.fence, appends=(one,), **more)
            h.seqs[ROLLOUT] = (await h.ledger.append(batch)).replies[0].seq
            return (await h.ledger.stats()).syncs_total - before

        assert await appended() == 0
        assert await appended(sync=True) == 1
        assert await appended(submits=(action(1), action(2))) == 1
        assert await appended(finished=True) == 1
        assert await appended() == 0
        rollouts = RolloutsRequest(run_id=RUN)
        [rollout] = (await h.ledger.rollouts(rollouts)).rollouts
        assert (rollout.seq, rollout.last) == (5, b"e"), "finished, and stays so"
        before = (await h.ledger.stats()).syncs_total
        [first, second] = await h.lease()
        await h.release(second)
        assert (await h.ledger.stats()).syncs_total == before
        for told in (h.complete(first), h.cancel(act(2))):
            before = (await h.ledger.stats()).syncs_total
            await told
            assert (await h.ledger.stats()).syncs_total == before + 1

    with_ledger(engine, tmp_path, scenario)


def test_a_waiting_coordinator_hears_that_it_is_fenced(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        hearing = asyncio.create_task(h.events(wait=600.0))
        await asyncio.sleep(0)
        await h.attach("coordinator-2")
        with pytest.raises(LedgerFenced, match="coordinator-2 owns it now"):
            await hearing

    with_ledger(engine, tmp_path, scenario)


def test_what_was_told_in_passing_is_dropped_once_it_was_heard(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease, other] = await h.lease()
        await h.release(lease)
        await h.complete(other)
        requeued, completed = await h.events()
        assert (str(requeued.kind), str(completed.kind)) == ("requeued", "completed")
        assert await h.events(after=completed.event_id) == []
        assert [event.kind for event in await h.events()] == [completed.kind]

    with_ledger(engine, tmp_path, scenario)


def test_b2_a_waiting_poll_of_a_lost_worker_is_given_nothing(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 4}, wait_seconds=600.0)
        waiting = asyncio.create_task(h.ledger.lease(request))
        await asyncio.sleep(0)
        await h.advance(h.limits.lease_seconds + 1.0)
        await h.submit(action(1))
        await h.enroll(OTHER)
        [lease] = await h.lease(OTHER)
        assert lease.action.action_id == act(1), "the living worker gets it, not the stopped one"
        assert not waiting.done()
        waiting.cancel()

    with_ledger(engine, tmp_path, scenario)


OTHER = WorkerId("wrk_other")


async def polling(h: Harness, worker: WorkerId = WORKER) -> "asyncio.Task[LeaseReply]":
    """Ask for work that is not there yet."""
    request = LeaseRequest(worker_id=worker, slots={"fast": 4}, wait_seconds=600.0)
    waiting = asyncio.create_task(h.ledger.lease(request))
    await asyncio.sleep(0)
    return waiting


async def given(waiting: "asyncio.Task[LeaseReply]") -> list[str]:
    return [lease.action.action_id for lease in (await waiting).leases]


def test_a_poll_is_woken_when_an_applied_result_makes_room(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease] = await h.lease()
        waiting = await polling(h)
        await h.complete(lease)
        assert not waiting.done(), "its result takes the room until it is applied (I6)"
        await h.acknowledge(act(1))
        assert await given(waiting) == [act(2)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(results_max=1))


def test_a_poll_is_woken_when_what_ran_alone_has_ended(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        await h.start(*await h.lease())
        await h.enroll(OTHER, replaces=WORKER)
        [suspect] = await h.lease(OTHER)
        assert suspect.alone
        waiting = await polling(h, OTHER)
        assert await h.complete(suspect, worker=OTHER) == [CompleteDisposition.OK]
        assert await given(waiting) == [act(2)]

    with_ledger(engine, tmp_path, scenario)


def test_a_waiting_worker_hears_once_of_what_was_taken_from_it(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        first, second = await h.lease()
        waiting = await polling(h)
        await h.cancel(act(1))
        assert (await waiting).revoked == (act(1),)
        await h.cancel(act(2))
        assert await h.release(second) == [HoldVerdict.OK], "it let go before it was told"
        await h.submit(action(3))
        reply = await h.ledger.lease(LeaseRequest(worker_id=WORKER, slots={"fast": 1}))
        assert reply.revoked == ()
        assert await h.heartbeat(first) == [HoldVerdict.CANCEL], "until it lets go"

    with_ledger(engine, tmp_path, scenario)


def test_appends_of_one_batch_see_each_others_submits(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        appends = tuple(
            Append(rollout_id=ROLLOUT, expected_seq=seq, events=(b"e",), submits=(action(1),))
            for seq in range(2)
        )
        reply = await h.ledger.append(AppendBatch(run_id=RUN, fence=h.fence, appends=appends))
        assert [str(d) for one in reply.replies for d in one.submits] == ["accepted", "duplicate"]
        assert len(await h.lease()) == 1

    with_ledger(engine, tmp_path, scenario)


def test_requests_of_one_group_see_what_the_earlier_ones_did() -> None:
    """A ledger that was just opened remembers nothing: what it counts it reads in mid-group."""
    store, now = MemoryStore(), ManualClock().now()
    limits = LedgerLimits(outstanding_per_rollout_max=2)

    def opened() -> LedgerService:
        service = LedgerService(store, limits, Durability.POWER_SAFE)
        service.open(now, boot_id="boot", lineage="lin")
        return service

    def group(service: LedgerService, *requests: Request) -> list[Any]:
        service.begin(requests, now)
        replies = [service.handle(request, now) for request in requests]
        service.settle(now)
        service.commit()
        check_books(service)
        return replies

    first = opened()
    fence = group(first, Attach(run_id=RUN, incarnation="c"))[0].fence

    def appending(seq: int, *submits: Action) -> AppendBatch:
        one = Append(rollout_id=ROLLOUT, expected_seq=seq, events=(b"e",), submits=submits)
        return AppendBatch(run_id=RUN, fence=fence, appends=(one,))

    group(first, appending(0, action(1), action(2)))
    enrolled = Enroll(worker_id=WORKER, name="w", slots={"fast": 4})
    _, reply = group(first, enrolled, LeaseRequest(worker_id=WORKER, slots={"fast": 1}))
    done = Completion(action_id=act(1), fence=reply.leases[0].fence, status=CompletionStatus.OK)
    completing = CompleteRequest(worker_id=WORKER, completions=(done,))
    _, appended = group(opened(), completing, appending(1, action(3), action(4)))
    assert [str(d) for d in appended.replies[0].submits] == ["accepted", "parked"]


def test_an_id_that_was_looked_for_in_vain_is_known_for_ever_once_submitted(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.cancel(act(1))
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.complete(lease)
        await h.acknowledge(act(1))
        await h.append()  # the group after it: nothing of the action is at hand any more
        assert await h.submit(action(1)) == ["duplicate"]

    with_ledger(engine, tmp_path, scenario)


def test_a_holder_that_has_not_shown_itself_has_a_lease_to_do_so(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1, holder=OTHER)) == ["accepted"]
        assert await h.completed() == {}
        await h.crash()
        await h.attach("coordinator-2")
        assert await h.completed() == {}
        await h.advance(h.limits.lease_seconds + h.limits.grace_seconds)
        await h.advance(0.0)
        [result] = (await h.completed()).values()
        assert (result.status, result.fault and result.fault.code) == ("error", "environment_lost")

    with_ledger(engine, tmp_path, scenario)


def test_an_operators_counters_count_what_happened(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2, attempts_max=1), action(3), action(4))
        done, poison, given_back, also_done = await h.lease()
        await h.release(given_back)
        await h.release(*await h.lease())
        await h.start(done, poison, also_done)
        await h.complete(done, also_done)
        await h.enroll(OTHER, replaces=WORKER)
        assert await h.complete(poison, worker=OTHER) == [CompleteDisposition.STALE]
        stats = await h.ledger.stats()
        assert (stats.deliveries_total, stats.attempts_total) == (5, 3)
        assert (stats.retries_total, stats.late_total, stats.dead_total) == (2, 1, 1)
        assert stats.completions_total == {CompletionStatus.OK: 2, CompletionStatus.DEAD: 1}
        await h.cancel(act(3))
        stats = await h.ledger.stats()
        assert stats.completions_total[CompletionStatus.CANCELLED] == 1
        assert (stats.dead_total, stats.unacknowledged) == (1, 4)

    with_ledger(engine, tmp_path, scenario)


@pytest.mark.parametrize(
    "unusable",
    [{"attempts_max": 0}, {"deliveries_max": 0}, {"deadline_seconds": math.inf}],
    ids=lambda one: next(iter(one)),
)
def test_an_action_that_could_never_run_or_never_end_is_refused(
    engine: str, tmp_path: Path, unusable: dict[str, Any]
) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(LedgerRefused, match=str(act(1))):
            await h.submit(action(1, **unusable))
        assert await h.lease() == []

    with_ledger(engine, tmp_path, scenario)
