"""The ledger's part of CASES B and its finer rules, on every engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stoker.broker.base import (
    ActionsRequest,
    Append,
    AppendBatch,
    Attach,
    Cancel,
    CancelDisposition,
    CompleteDisposition,
    EventsRequest,
    HoldVerdict,
    JournalRequest,
    LeaseReply,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
)
from stoker.errors import LedgerFenced, LedgerRefused
from stoker.model.action import ActionState, Effect, LatePolicy
from stoker.model.completion import CompletionStatus, EnvironmentState
from stoker.model.ids import ActionId, EnvironmentId, Fence, RolloutId, WorkerId
from stoker.model.value import INLINE_BYTES_MAX, Value
from support.ledger import (
    ENGINES,
    ROLLOUT,
    RUN,
    WORKER,
    Harness,
    act,
    action,
    with_ledger,
)

OTHER = WorkerId("wrk_2")
LEASE = LedgerLimits().lease_seconds
BOX = EnvironmentId("env_1")
BOUND = 30.0

Run = Callable[[Callable[[Harness], Awaitable[None]]], None]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_b1_lost_before_started_is_requeued_without_spending_an_attempt(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, effect=Effect.EXTERNAL))
        [first] = await h.lease()
        await h.enroll(OTHER, replaces=WORKER)
        [second] = await h.lease(OTHER)
        assert (second.delivery, second.attempt) == (2, 1)
        assert await h.start(first) == [HoldVerdict.LOST]

    with_ledger(engine, tmp_path, scenario)


@pytest.mark.parametrize(
    ("effect", "environment", "status"),
    [
        (Effect.PURE, None, None),
        (Effect.IDEMPOTENT, None, None),
        (Effect.CONTAINED, None, None),
        (Effect.CONTAINED, BOX, CompletionStatus.ERROR),
        (Effect.EXTERNAL, None, CompletionStatus.AMBIGUOUS),
    ],
)
def test_b1_lost_after_started_is_decided_by_effect(
    engine: str,
    tmp_path: Path,
    effect: Effect,
    environment: EnvironmentId | None,
    status: CompletionStatus | None,
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, effect=effect, environment_id=environment))
        [lease] = await h.lease()
        await h.start(lease)
        await h.enroll(OTHER, replaces=WORKER)
        again = await h.lease(OTHER)
        if status is None:
            assert [one.attempt for one in again] == [2]
            return
        assert again == []
        result = (await h.completed())[act(1)]
        assert (result.status, result.fence) == (status, 0)
        assert result.external_effect_possible == (effect is Effect.EXTERNAL)
        assert result.fault is not None
        if environment is not None:
            assert result.fault.code == "environment_lost"
            assert result.environment is EnvironmentState.LOST
        assert await h.complete(lease) == [CompleteDisposition.STALE]

    with_ledger(engine, tmp_path, scenario)


def test_b1_completed_but_the_reply_was_lost(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, effect=Effect.EXTERNAL))
        [lease] = await h.lease()
        await h.start(lease)
        await h.complete(lease)
        await h.crash()
        assert await h.complete(lease) == [CompleteDisposition.ALREADY]
        await h.enroll(OTHER, replaces=WORKER)
        assert (await h.completed())[act(1)].status is CompletionStatus.OK

    with_ledger(engine, tmp_path, scenario)


def test_a_lost_worker_takes_the_queued_actions_of_its_environments_along(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        mine: dict[str, Any] = {"holder": WORKER, "environment_id": BOX}
        await h.submit(action(1, **mine), action(2, **mine), action(3))
        [first] = await h.lease(slots=1)
        assert first.action.action_id == act(1)
        await h.enroll(OTHER, replaces=WORKER)
        await h.submit(action(4, **mine))
        lost = await h.completed()
        assert set(lost) == {act(1), act(2), act(4)}
        assert {r.fault.code for r in lost.values() if r.fault} == {"environment_lost"}
        assert [one.action.action_id for one in await h.lease(OTHER)] == [act(3)]
        with pytest.raises(LedgerRefused, match="fresh id"):
            await h.lease(WORKER)
        with pytest.raises(LedgerRefused, match="fresh id"):
            await h.heartbeat()

    with_ledger(engine, tmp_path, scenario)


def test_an_action_with_a_holder_goes_to_nobody_else(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER)
        await h.submit(action(1, holder=OTHER), action(2))
        assert [one.action.action_id for one in await h.lease()] == [act(2)]
        assert [one.action.action_id for one in await h.lease(OTHER)] == [act(1)]

    with_ledger(engine, tmp_path, scenario)


def test_b18_one_poison_among_innocents_costs_them_no_attempt(engine: str, tmp_path: Path) -> None:
    innocents = 64

    async def scenario(h: Harness) -> None:
        poison = act(5)
        await h.submit(*(action(n, attempts_max=4) for n in range(innocents + 1)))
        finished: set[ActionId] = set()
        kills = 0
        for turn in range(8):
            worker = WorkerId(f"wrk_{turn:02}")
            await h.enroll(worker, slots=innocents + 1)
            leases = await h.lease(worker, slots=innocents + 1)
            while leases:
                assert await h.lease(worker) == [] or not leases[0].alone
                await h.start(*leases, worker=worker)
                if poison in {lease.action.action_id for lease in leases}:
                    kills += 1
                    await h.enroll(WorkerId(f"wrk_{turn:02}x"), replaces=worker)
                    break
                await h.complete(*leases, worker=worker)
                finished |= {lease.action.action_id for lease in leases}
                leases = await h.lease(worker)
        results = await h.completed()
        assert kills == 5, "once in the crowd, then alone until its attempts are used up"
        assert results.pop(poison).status is CompletionStatus.DEAD
        assert len(results) == innocents
        assert {(r.status, r.attempt) for r in results.values()} == {(CompletionStatus.OK, 1)}

    with_ledger(engine, tmp_path, scenario)


def test_i5_releases_are_deliveries_and_bounded_too(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, deliveries_max=3))
        for delivery in (1, 2, 3):
            [lease] = await h.lease()
            assert lease.delivery == delivery
            assert await h.release(lease) == [HoldVerdict.OK]
        assert await h.lease() == []
        assert (await h.completed())[act(1)].status is CompletionStatus.DEAD

    with_ledger(engine, tmp_path, scenario)


def test_b19_cancel_release_and_acknowledge_pass_every_cap(engine: str, tmp_path: Path) -> None:
    limits = LedgerLimits(results_max=1, queued_max=1, outstanding_per_rollout_max=1)

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(4)))
        [lease] = await h.lease()
        reply = await h.cancel(act(3), act(0))
        assert set(reply.dispositions.values()) == {CancelDisposition.CANCELLED}
        assert await h.release(lease) == [HoldVerdict.OK]
        await h.acknowledge(act(3), act(0))
        [lease] = await h.lease()
        assert lease.action.action_id == act(1)

    with_ledger(engine, tmp_path, scenario, limits)


def test_b7_the_newer_coordinator_fences_the_older(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        old = h.fence
        assert await h.attach("coordinator-1") == old, "attaching twice is idempotent"
        waiting = asyncio.create_task(h.events(wait=BOUND))
        await asyncio.sleep(0)
        await h.attach("coordinator-2")
        with pytest.raises(LedgerFenced):
            await waiting
        new, h.fence = h.fence, old
        with pytest.raises(LedgerFenced):
            await h.submit(action(2))
        with pytest.raises(LedgerFenced):
            await h.cancel(act(1))
        with pytest.raises(LedgerFenced):
            await h.events()
        h.fence = new
        assert await h.submit(action(2)) == ["accepted"]
        assert [one.action.action_id for one in await h.lease()] == [act(1), act(2)]

    with_ledger(engine, tmp_path, scenario)


def test_b7_partitions_are_fenced_apart_and_write_their_own_rollouts(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        attached = await h.ledger.attach(Attach(run_id=RUN, partition="1", incarnation="other"))
        fence = attached.fence
        assert await h.submit(action(2)) == ["accepted"], "the other partition fences nobody here"
        theirs = Append(rollout_id=RolloutId("rol_2"), expected_seq=0, events=(b"first",))
        batch = AppendBatch(run_id=RUN, partition="1", fence=fence, appends=(theirs,))
        await h.ledger.append(batch)
        with pytest.raises(LedgerFenced):
            await h.ledger.append(replace(batch, partition="0"))
        mine = Append(rollout_id=ROLLOUT, expected_seq=2, events=(b"not theirs",))
        with pytest.raises(LedgerRefused, match="belongs to partition '0'"):
            await h.ledger.append(replace(batch, appends=(theirs, mine)))
        cancel = Cancel(run_id=RUN, partition="1", fence=fence, action_ids=(act(1),))
        reply = await h.ledger.cancel(cancel)
        assert reply.dispositions == {act(1): CancelDisposition.UNKNOWN}
        await h.complete(*await h.lease())
        events = EventsRequest(run_id=RUN, partition="1", fence=fence)
        assert (await h.ledger.events(events)).events == ()
        assert set(await h.completed()) == {act(1), act(2)}
        journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
        assert journal.events == (b"event", b"event"), "nothing refused was written"

    with_ledger(engine, tmp_path, scenario)


def test_late_adopt_takes_a_stale_result_before_the_end(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, late=LatePolicy.ADOPT))
        [old] = await h.lease()
        await h.start(old)
        await h.enroll(OTHER, replaces=WORKER)
        [live] = await h.lease(OTHER)
        assert await h.complete(old, said=b"adopted") == [CompleteDisposition.ADOPTED]
        assert await h.heartbeat(live, worker=OTHER) == [HoldVerdict.CANCEL]
        assert await h.complete(live, worker=OTHER) == [CompleteDisposition.STALE]
        result = (await h.completed())[act(1)]
        assert result.observation is not None
        assert result.observation.inline == b"adopted"

    with_ledger(engine, tmp_path, scenario)


def test_late_reconcile_adds_an_event_and_leaves_the_result(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, late=LatePolicy.RECONCILE))
        [lease] = await h.lease()
        await h.start(lease)
        await h.cancel(act(1))
        await h.acknowledge(act(1))
        assert await h.complete(lease, said=b"late") == [CompleteDisposition.STALE]
        events = await h.events()
        [late] = [e for e in events if e.kind is LedgerEventKind.LATE]
        assert late.completion is not None
        assert late.completion.observation is not None
        assert late.completion.observation.inline == b"late"
        await h.acknowledge(act(1))
        assert all(e.kind is not LedgerEventKind.LATE for e in await h.events())

    with_ledger(engine, tmp_path, scenario)


def test_b11_wall_jumps_change_nothing(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, deadline_seconds=100.0), action(2, deadline_seconds=100.0))
        [lease] = await h.lease(slots=1)
        await h.start(lease)
        for jump in (3600.0, -7200.0, 3600.0):
            h.clock.wall += jump
            await h.advance(1.0)
        await h.crash()
        await h.advance(1.0)
        assert await h.heartbeat(lease) == [HoldVerdict.OK]
        assert await h.completed() == {}
        await h.advance(100.0)
        assert (await h.completed())[act(2)].status is CompletionStatus.TIMED_OUT

    with_ledger(engine, tmp_path, scenario)


def test_after_a_restart_no_lease_expires_in_the_grace(engine: str, tmp_path: Path) -> None:
    limits = LedgerLimits(lease_seconds=10.0, grace_seconds=15.0)

    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.start(lease)
        await h.advance(9.0)
        await h.crash()
        await h.advance(14.0)
        assert await h.start(lease) == [HoldVerdict.OK], "the restart was not the worker's fault"
        await h.advance(11.0)
        assert [e.kind for e in await h.events()] == [LedgerEventKind.REQUEUED]

    with_ledger(engine, tmp_path, scenario, limits)


def test_a_lease_that_never_arrived_is_lost_although_its_worker_lives(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [known] = await h.lease(slots=1)
        [unknown] = await h.lease(slots=1)
        for _ in range(4):
            await h.heartbeat(known)
            await h.advance(LEASE / 3)
        await h.heartbeat(known)
        [again] = await h.lease(slots=1)
        assert again.action.action_id == unknown.action.action_id
        assert await h.heartbeat(known) == [HoldVerdict.OK]

    with_ledger(engine, tmp_path, scenario)


def test_b15_large_content_stays_out_of_the_row(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        large = b"x" * (INLINE_BYTES_MAX + 1)
        inline = Value(digest="0" * 64, size_bytes=len(large), inline=large)
        with pytest.raises(LedgerRefused, match="artifact store"):
            await h.submit(replace(action(1), input=inline))
        address = Value(digest="0" * 64, size_bytes=20_000_000)
        assert await h.submit(replace(action(1), input=address)) == ["accepted"]
        [lease] = await h.lease()
        assert lease.action.input == address
        with pytest.raises(LedgerRefused, match="artifact store"):
            await h.complete(lease, said=inline)
        assert await h.complete(lease, said=address) == [CompleteDisposition.OK]
        result = (await h.completed())[act(1)]
        assert result.observation == address, "a result of 20 MB is told by its address"

    with_ledger(engine, tmp_path, scenario)


def test_content_that_is_not_its_digest_is_refused(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        damaged = Value(digest="0" * 64, size_bytes=3, inline=b"abc")
        with pytest.raises(LedgerRefused, match="digest"):
            await h.submit(action(1), replace(action(2), input=damaged))
        assert await h.lease() == [], "nothing of the refused request was kept"

    with_ledger(engine, tmp_path, scenario)


def test_b13_depth_changes_neither_order_nor_counts(engine: str, tmp_path: Path) -> None:
    count = 2_000

    async def scenario(h: Harness) -> None:
        dispositions = await h.submit(*(action(n, priority=n % 3) for n in range(count)))
        assert dispositions.count("parked") == count - 1_000
        leases = await h.lease(slots=1_000)
        order = [(lease.action.priority, int(lease.action.path)) for lease in leases]
        assert order == sorted(order, key=lambda pair: (-pair[0], pair[1]))
        await h.complete(*leases)
        assert len(await h.lease(slots=1_000)) == 1_000

    limits = LedgerLimits(queued_max=1_000, outstanding_per_rollout_max=count)
    with_ledger(engine, tmp_path, scenario, limits)


def test_tickets_lease_exactly_the_named_actions(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2), action(3))
        request = LeaseRequest(worker_id=WORKER, action_ids=(act(2), act(9)))
        reply = await h.ledger.lease(request)
        assert [one.action.action_id for one in reply.leases] == [act(2)]
        assert (await h.ledger.lease(request)).leases == ()

    with_ledger(engine, tmp_path, scenario)


def test_waiting_polls_are_woken_by_what_they_wait_for(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, wait_seconds=BOUND)
        polling = asyncio.create_task(h.ledger.lease(request))
        hearing = asyncio.create_task(h.events(wait=BOUND))
        await asyncio.sleep(0)
        await h.submit(action(1))
        [lease] = (await polling).leases
        await h.complete(lease)
        assert [e.action_id for e in await hearing] == [act(1)]
        request = replace(request, wait_seconds=0.05)
        assert (await h.ledger.lease(request)).leases == (), "an empty reply ends the wait"

    with_ledger(engine, tmp_path, scenario)


def test_a_cancelled_poll_takes_no_work_with_it(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, wait_seconds=BOUND)
        for number in range(5):
            polling = asyncio.create_task(h.ledger.lease(request))
            await asyncio.sleep(0)
            submitting = asyncio.create_task(h.submit(action(number)))
            for _ in range(number):
                await asyncio.sleep(0)
            polling.cancel()
            await submitting
            [polled] = await asyncio.gather(polling, return_exceptions=True)
            got = list(polled.leases) if isinstance(polled, LeaseReply) else []
            [lease] = got or await h.lease(slots=1)
            assert lease.action.action_id == act(number)
            await h.complete(lease)

    with_ledger(engine, tmp_path, scenario)


def test_unknown_actions_and_fences_change_nothing(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        forged = replace(lease, fence=Fence(lease.fence + 1))
        stranger = replace(lease, action=action(9))
        assert await h.start(forged, stranger) == [HoldVerdict.LOST] * 2
        assert await h.complete(forged, stranger) == [CompleteDisposition.STALE] * 2
        assert await h.release(forged, stranger) == [HoldVerdict.LOST] * 2
        assert await h.start(lease) == [HoldVerdict.OK]
        assert await h.start(lease) == [HoldVerdict.OK], "starting twice counts once"
        [view] = (await h.ledger.actions(ActionsRequest(rollout_id=ROLLOUT))).actions
        assert (view.state, view.attempts, view.deliveries) == (ActionState.STARTED, 1, 1)

    with_ledger(engine, tmp_path, scenario)
