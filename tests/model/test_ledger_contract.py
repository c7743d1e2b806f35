"""One suite for every engine of the ledger: invariants I1-I11, I13 and cases of CASES B."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from stoker.broker.base import (
    ActionsRequest,
    Append,
    AppendBatch,
    AppendDisposition,
    CancelDisposition,
    CompleteDisposition,
    DeadLettersRequest,
    HoldVerdict,
    JournalRequest,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    RolloutsRequest,
    SubmitDisposition,
)
from stoker.model.action import ActionState, Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import EnvironmentId, RolloutId, WorkerId
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


def test_i1_an_accepted_action_exists_until_acknowledged_and_its_id_for_ever(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1)) == ["accepted"]
        await h.crash()
        [lease] = await h.lease()
        await h.start(lease)
        await h.complete(lease)
        await h.crash()
        assert set(await h.completed()) == {act(1)}
        await h.acknowledge(act(1))
        assert await h.completed() == {}
        await h.crash()
        [view] = (await h.ledger.actions(ActionsRequest(action_ids=(act(1),)))).actions
        assert view.state is ActionState.ACKNOWLEDGED
        assert await h.submit(action(1)) == ["duplicate"]
        assert await h.lease() == []

    with_ledger(engine, tmp_path, scenario)


def test_i2_b9_a_completion_three_times_out_of_order_and_one_older_is_applied_once(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [old] = await h.lease()
        assert await h.release(old) == [HoldVerdict.OK]
        [lease] = await h.lease()
        assert lease.fence > old.fence
        assert await h.complete(lease, said=b"first") == [CompleteDisposition.OK]
        assert await h.complete(old, said=b"older") == [CompleteDisposition.STALE]
        assert await h.complete(lease, said=b"again") == [CompleteDisposition.ALREADY]
        assert await h.complete(lease, old) == [
            CompleteDisposition.ALREADY,
            CompleteDisposition.STALE,
        ]
        result = (await h.completed())[act(1)]
        assert result.observation is not None
        assert result.observation.inline == b"first"
        late = [e for e in await h.events() if e.kind is LedgerEventKind.LATE]
        assert len(late) == 1, "recorded once per stale fence"
        await h.acknowledge(act(1))
        assert await h.complete(lease) == [CompleteDisposition.ALREADY]

    with_ledger(engine, tmp_path, scenario)


def test_i3_b6_fences_only_rise_over_restarts(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        fences = [h.fence]
        for _ in range(3):
            [lease] = await h.lease(slots=1)
            fences.append(lease.fence)
            await h.release(lease)
            await h.crash()
            fences.append(await h.attach(f"after-{lease.fence}"))
        assert fences == sorted(set(fences))

    with_ledger(engine, tmp_path, scenario)


def test_i4_b2_a_worker_stopped_past_its_lease_completes_stale(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.start(lease)
        await h.advance(LEASE + 1)
        await h.enroll(OTHER)
        [second] = await h.lease(OTHER)
        assert second.attempt == 2
        assert await h.heartbeat(lease) == [HoldVerdict.LOST]
        assert await h.complete(lease, said=b"stale") == [CompleteDisposition.STALE]
        assert await h.completed() == {}
        kinds = [event.kind for event in await h.events()]
        assert kinds == [LedgerEventKind.REQUEUED, LedgerEventKind.LATE]
        assert await h.start(second, worker=OTHER) == [HoldVerdict.OK]
        assert await h.complete(second, worker=OTHER) == [CompleteDisposition.OK]

    with_ledger(engine, tmp_path, scenario)


def test_i5_b10_a_poison_ends_as_a_dead_letter_with_every_cause(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, attempts_max=3))
        for number in range(3):
            worker = WorkerId(f"wrk_{number}")
            await h.enroll(worker)
            [lease] = await h.lease(worker)
            assert lease.attempt == number + 1
            await h.start(lease, worker=worker)
            await h.enroll(WorkerId(f"wrk_{number}x"), replaces=worker)
        result = (await h.completed())[act(1)]
        assert result.status is CompletionStatus.DEAD
        assert result.fault is not None
        assert result.fault.code == "dead_letter"
        await h.acknowledge(act(1))
        [dead] = (await h.ledger.dead_letters(DeadLettersRequest(run_id=RUN))).actions
        assert (dead.attempts, dead.deliveries, len(dead.causes)) == (3, 3, 3)
        assert dead.completion is not None

    with_ledger(engine, tmp_path, scenario)


def test_i5_deliveries_are_bounded_too(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, deliveries_max=2))
        for number in range(2):
            worker = WorkerId(f"wrk_{number}")
            await h.enroll(worker)
            assert len(await h.lease(worker)) == 1
            await h.enroll(WorkerId(f"wrk_{number}x"), replaces=worker)
        result = (await h.completed())[act(1)]
        assert (result.status, result.attempt) == (CompletionStatus.DEAD, 0)

    with_ledger(engine, tmp_path, scenario)


def test_i6_over_cap_submits_are_parked_and_come_in_order(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(*(action(n) for n in range(5))) == [
            "accepted",
            "accepted",
            "parked",
            "parked",
            "parked",
        ]
        await h.crash()
        order = []
        while leases := await h.lease(slots=1):
            order.append(leases[0].action.action_id)
            await h.complete(*leases)
        assert order == [act(n) for n in range(5)]
        stats = await h.ledger.stats()
        assert stats.classes["fast"].parked == 0

    with_ledger(engine, tmp_path, scenario, LedgerLimits(queued_max=2))


def test_i6_one_rollout_cannot_fill_the_queue(engine: str, tmp_path: Path) -> None:
    other = RolloutId("rol_2")

    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1), action(2), action(3)) == ["accepted", "accepted", "parked"]
        reply = await h.append(action(4, rollout_id=other), rollout=other)
        assert reply.replies[0].submits == (SubmitDisposition.ACCEPTED,)
        leases = await h.lease()
        assert [one.action.action_id for one in leases] == [act(1), act(2), act(4)]
        await h.complete(leases[0])
        assert [one.action.action_id for one in await h.lease()] == [act(3)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(outstanding_per_rollout_max=2))


def test_i6_b19_result_cap_of_one_pauses_leasing_and_never_deadlocks(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(4)))
        done = []
        for _ in range(4):
            [lease] = await h.lease()
            assert await h.lease() == [], "the lease has reserved the only result slot"
            assert await h.complete(lease) == [CompleteDisposition.OK]
            assert await h.lease() == [], "a result that was not applied holds its slot"
            [done_id] = await h.completed()
            await h.acknowledge(done_id)
            done.append(done_id)
        assert len(set(done)) == 4

    with_ledger(engine, tmp_path, scenario, LedgerLimits(results_max=1))


def test_i7_same_digest_is_a_duplicate_another_a_conflict(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1)) == ["accepted"]
        assert await h.submit(action(1), action(2)) == ["duplicate", "accepted"]
        assert await h.submit(action(1, b"other"), action(3)) == ["conflict", "accepted"]
        assert len(await h.lease()) == 3
        journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
        assert len(journal.events) == 3, "a conflict rejects its submit only"

    with_ledger(engine, tmp_path, scenario)


def test_i8_events_come_again_from_zero_until_acknowledged(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        for lease in await h.lease():
            await h.complete(lease)
        first = await h.events()
        assert [e.action_id for e in first] == [act(1), act(2)]
        assert first[0].event_id < first[1].event_id
        assert [e.action_id for e in await h.events(after=first[0].event_id)] == [act(2)]
        await h.crash()
        await h.attach("coordinator-2")
        assert await h.events() == first, "B5: results wait for the next coordinator"
        await h.acknowledge(act(1))
        assert [e.action_id for e in await h.events()] == [act(2)]

    with_ledger(engine, tmp_path, scenario)


def test_i9_deadlines_end_queued_leased_and_started_actions(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(
            action(1, deadline_seconds=20.0),
            action(2, deadline_seconds=20.0),
            action(3, deadline_seconds=20.0, effect=Effect.EXTERNAL),
            action(4, deadline_seconds=20.0),
        )
        leased = await h.lease(slots=3)
        await h.start(*leased[1:])
        for _ in range(4):
            await h.advance(5.0)
            await h.heartbeat(*leased)
        results = await h.completed()
        assert {i: r.status for i, r in results.items()} == {
            act(1): CompletionStatus.TIMED_OUT,
            act(4): CompletionStatus.TIMED_OUT,
        }
        assert await h.heartbeat(*leased) == [
            HoldVerdict.CANCEL,
            HoldVerdict.OK,
            HoldVerdict.OK,
        ]
        for _ in range(2):
            await h.advance(LEASE / 2)
            await h.heartbeat(*leased)
        results = await h.completed()
        assert results[act(2)].status is CompletionStatus.TIMED_OUT
        assert results[act(3)].status is CompletionStatus.AMBIGUOUS
        assert results[act(3)].external_effect_possible

    with_ledger(engine, tmp_path, scenario)


def test_i10_b8_cancel_queued_leased_running_and_completed(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(4)))
        leases = await h.lease(slots=3)
        await h.start(*leases[1:])
        await h.complete(leases[2])
        reply = await h.cancel(*(act(n) for n in range(5)))
        assert reply.dispositions == {
            act(0): CancelDisposition.CANCELLED,
            act(1): CancelDisposition.CANCELLED,
            act(2): CancelDisposition.TOO_LATE,
            act(3): CancelDisposition.CANCELLED,
            act(4): CancelDisposition.UNKNOWN,
        }
        results = await h.completed()
        assert results[act(0)].status is results[act(1)].status is CompletionStatus.CANCELLED
        assert results[act(2)].status is CompletionStatus.OK
        assert await h.heartbeat(*leases[:2]) == [HoldVerdict.CANCEL] * 2
        told = await h.ledger.lease(LeaseRequest(worker_id=WORKER, wait_seconds=30.0))
        assert set(told.revoked) == {act(0), act(1)}
        assert await h.release(leases[0]) == [HoldVerdict.OK]
        assert await h.complete(leases[1]) == [CompleteDisposition.STALE]
        kinds = [(e.kind, e.action_id) for e in await h.events()]
        assert (LedgerEventKind.RECLAIMED, act(0)) in kinds
        assert (LedgerEventKind.RECLAIMED, act(1)) in kinds
        assert (LedgerEventKind.LATE, act(1)) in kinds
        again = await h.cancel(act(0))
        assert again.dispositions == {act(0): CancelDisposition.CANCELLED}, "repeating is harmless"

    with_ledger(engine, tmp_path, scenario)


def test_i10_a_dead_worker_lets_go_of_cancelled_actions(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        await h.lease()
        await h.cancel(act(1))
        await h.enroll(OTHER, replaces=WORKER)
        assert [e.kind for e in await h.events()][-1] is LedgerEventKind.RECLAIMED

    with_ledger(engine, tmp_path, scenario)


def test_i11_appends_are_checked_repeated_and_refused_by_position(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        one = Append(rollout_id=ROLLOUT, expected_seq=0, events=(b"a", b"b"), submits=(action(1),))
        batch = AppendBatch(run_id=RUN, fence=h.fence, appends=(one,))
        applied = (await h.ledger.append(batch)).replies[0]
        assert (applied.disposition, applied.seq) == (AppendDisposition.APPLIED, 2)
        await h.crash()
        again = (await h.ledger.append(batch)).replies[0]
        assert (again.disposition, again.seq) == (AppendDisposition.ALREADY, 2)
        assert again.submits == (SubmitDisposition.DUPLICATE,)
        for wrong in (
            replace(one, events=(b"a", b"c")),
            replace(one, expected_seq=1),
            replace(one, expected_seq=7),
            replace(one, submits=(action(2),)),
        ):
            reply = (await h.ledger.append(replace(batch, appends=(wrong,)))).replies[0]
            assert reply.disposition is AppendDisposition.CONFLICT, wrong
        journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
        assert journal.events == (b"a", b"b")
        assert len(await h.lease()) == 1

    with_ledger(engine, tmp_path, scenario)


def test_i11_the_journal_lists_rollouts_in_order_with_their_ends(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        for name in ("rol_c", "rol_a", "rol_b"):
            await h.append(events=(name.encode(), b"second"), rollout=RolloutId(name))
        await h.append(events=(b"over",), rollout=RolloutId("rol_a"), finished=True)
        await h.crash()
        listed = (await h.ledger.rollouts(RolloutsRequest(run_id=RUN))).rollouts
        assert [(s.rollout_id, s.seq, s.first, s.last) for s in listed] == [
            ("rol_c", 2, b"rol_c", None),
            ("rol_a", 3, b"rol_a", b"over"),
            ("rol_b", 2, b"rol_b", None),
        ]
        page = await h.ledger.rollouts(RolloutsRequest(run_id=RUN, after=RolloutId("rol_c")))
        assert [s.rollout_id for s in page.rollouts] == ["rol_a", "rol_b"]

    with_ledger(engine, tmp_path, scenario)
