"""The contract every engine is held to: invariants I1-I13, as far as they show from outside.

Each case is one small play against a fresh ledger that is attached to, with one enrolled worker.
Ours run in the tests, anybody's with ``stoker conformance``. What needs a power cut, or a look
inside, is not here.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

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
    TicketsRequest,
)
from stoker.model.action import ActionState, Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import RolloutId, WorkerId
from stoker.testing.ledger_moves import ROLLOUT, RUN, WORKER, LedgerMoves, act, action

OTHER = WorkerId("wrk_2")
LEASE = LedgerLimits().lease_seconds

Scenario = Callable[[LedgerMoves], Awaitable[None]]


class Case(NamedTuple):
    """One promise, tried."""

    invariant: str
    """``I1`` … ``I13`` of the design, or ``tickets``."""
    scenario: Scenario
    limits: LedgerLimits

    @property
    def name(self) -> str:
        """Its name in tests."""
        return f"{self.invariant.lower()}_{getattr(self.scenario, '__name__', '')}"

    @property
    def promise(self) -> str:
        """What is promised, in a sentence."""
        return " ".join((self.scenario.__doc__ or "").split()).rstrip(".")


CASES: list[Case] = []
"""In order of invariants."""


def case(invariant: str, limits: LedgerLimits | None = None) -> Callable[[Scenario], Scenario]:
    """Make a scenario part of the contract."""

    def add(scenario: Scenario) -> Scenario:
        CASES.append(Case(invariant, scenario, limits or LedgerLimits()))
        return scenario

    return add


@case("I1")
async def an_accepted_action_exists_until_acknowledged_and_its_id_for_ever(h: LedgerMoves) -> None:
    """An accepted action exists until acknowledged and its id for ever."""
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


@case("I2")
async def a_completion_three_times_out_of_order_and_one_older_is_applied_once(
    h: LedgerMoves,
) -> None:
    """A completion three times out of order and one older is applied once."""
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


@case("I3")
async def fences_only_rise_over_restarts(h: LedgerMoves) -> None:
    """Fences only rise over restarts."""
    await h.submit(action(1), action(2))
    fences = [h.fence]
    for _ in range(3):
        [lease] = await h.lease(slots=1)
        fences.append(lease.fence)
        await h.release(lease)
        await h.crash()
        fences.append(await h.attach(f"after-{lease.fence}"))
    assert fences == sorted(set(fences))


@case("I4")
async def a_worker_stopped_past_its_lease_completes_stale(h: LedgerMoves) -> None:
    """A worker stopped past its lease completes stale."""
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


@case("I5")
async def a_poison_ends_as_a_dead_letter_with_every_cause(h: LedgerMoves) -> None:
    """A poison ends as a dead letter with every cause."""
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


@case("I5")
async def deliveries_are_bounded_too(h: LedgerMoves) -> None:
    """Deliveries are bounded too."""
    await h.submit(action(1, deliveries_max=2))
    for number in range(2):
        worker = WorkerId(f"wrk_{number}")
        await h.enroll(worker)
        assert len(await h.lease(worker)) == 1
        await h.enroll(WorkerId(f"wrk_{number}x"), replaces=worker)
    result = (await h.completed())[act(1)]
    assert (result.status, result.attempt) == (CompletionStatus.DEAD, 0)


@case("I6", LedgerLimits(queued_max=2))
async def over_cap_submits_are_parked_and_come_in_order(h: LedgerMoves) -> None:
    """Over cap submits are parked and come in order."""
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


@case("I6", LedgerLimits(outstanding_per_rollout_max=2))
async def one_rollout_cannot_fill_the_queue(h: LedgerMoves) -> None:
    """One rollout cannot fill the queue."""
    other = RolloutId("rol_2")
    assert await h.submit(action(1), action(2), action(3)) == ["accepted", "accepted", "parked"]
    reply = await h.append(action(4, rollout_id=other), rollout=other)
    assert reply.replies[0].submits == (SubmitDisposition.ACCEPTED,)
    leases = await h.lease()
    assert [one.action.action_id for one in leases] == [act(1), act(2), act(4)]
    await h.complete(leases[0])
    assert [one.action.action_id for one in await h.lease()] == [act(3)]


@case("I6", LedgerLimits(outstanding_per_rollout_max=2))
async def actions_without_an_entry_beside_them_count_too(h: LedgerMoves) -> None:
    """Actions without an entry beside them count too."""
    replies = [await h.append(action(n), events=()) for n in range(3)]
    replies.append(await h.append(action(3)))
    assert [str(reply.replies[0].submits[0]) for reply in replies] == [
        "accepted",
        "accepted",
        "parked",
        "parked",
    ]
    for n in range(4):
        [lease] = await h.lease(slots=1)
        assert lease.action.action_id == act(n)
        await h.complete(lease)


@case("I6", LedgerLimits(results_max=1))
async def result_cap_of_one_pauses_leasing_and_never_deadlocks(h: LedgerMoves) -> None:
    """Result cap of one pauses leasing and never deadlocks."""
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


@case("I7")
async def same_digest_is_a_duplicate_another_a_conflict(h: LedgerMoves) -> None:
    """Same digest is a duplicate another a conflict."""
    assert await h.submit(action(1)) == ["accepted"]
    assert await h.submit(action(1), action(2)) == ["duplicate", "accepted"]
    assert await h.submit(action(1, b"other"), action(3)) == ["conflict", "accepted"]
    assert len(await h.lease()) == 3
    journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
    assert len(journal.events) == 3, "a conflict rejects its submit only"


@case("I8")
async def events_come_again_from_zero_until_acknowledged(h: LedgerMoves) -> None:
    """Events come again from zero until acknowledged."""
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


@case("I9")
async def deadlines_end_queued_leased_and_started_actions(h: LedgerMoves) -> None:
    """Deadlines end queued leased and started actions."""
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


@case("I10")
async def cancel_queued_leased_running_and_completed(h: LedgerMoves) -> None:
    """Cancel queued leased running and completed."""
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


@case("I10")
async def a_dead_worker_lets_go_of_cancelled_actions(h: LedgerMoves) -> None:
    """A dead worker lets go of cancelled actions."""
    await h.submit(action(1))
    await h.lease()
    await h.cancel(act(1))
    await h.enroll(OTHER, replaces=WORKER)
    assert [e.kind for e in await h.events()][-1] is LedgerEventKind.RECLAIMED


@case("I11")
async def appends_are_checked_repeated_and_refused_by_position(h: LedgerMoves) -> None:
    """Appends are checked repeated and refused by position."""
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


@case("I11")
async def the_journal_lists_rollouts_in_order_with_their_ends(h: LedgerMoves) -> None:
    """The journal lists rollouts in order with their ends."""
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


@case("I12")
async def an_external_effect_that_was_lost_once_started_is_ambiguous_and_never_run_again(
    h: LedgerMoves,
) -> None:
    """An external effect that was lost once started is ambiguous and never run again."""
    await h.submit(action(1, effect=Effect.EXTERNAL), action(2, effect=Effect.EXTERNAL))
    started, unstarted = await h.lease()
    assert await h.start(started) == [HoldVerdict.OK]
    await h.crash()
    await h.enroll(OTHER, replaces=WORKER)
    again = await h.lease(OTHER)
    assert [one.action.action_id for one in again] == [unstarted.action.action_id]
    result = (await h.completed())[started.action.action_id]
    assert result.status is CompletionStatus.AMBIGUOUS
    assert result.external_effect_possible
    assert await h.complete(started) == [CompleteDisposition.STALE]


@case("I13")
async def what_was_told_stays_true_over_a_crash(h: LedgerMoves) -> None:
    """What was told stays true over a crash."""
    await h.submit(action(1), action(2))
    leases = await h.lease()
    await h.start(*leases)
    await h.complete(leases[0], said=b"told")
    await h.cancel(act(2))
    told = await h.events()
    await h.crash()
    assert await h.events() == told
    assert await h.complete(leases[0], said=b"told") == [CompleteDisposition.ALREADY]


@case("tickets", LedgerLimits(ticket_classes=("fast",)))
async def a_class_that_goes_by_ticket_is_leased_by_id_only(h: LedgerMoves) -> None:
    """A class that goes by ticket is leased by id only, and its tickets say what waits."""
    await h.submit(action(1), action(2))
    assert await h.lease() == []
    tickets = (await h.ledger.tickets(TicketsRequest())).tickets
    assert [(one.action_id, one.delivery) for one in tickets] == [(act(1), 1), (act(2), 1)]
    by_id = LeaseRequest(worker_id=WORKER, action_ids=(act(1),))
    [lease] = (await h.ledger.lease(by_id)).leases
    assert (await h.ledger.lease(by_id)).leases == (), "a doubled ticket is worth nothing"
    await h.release(lease)
    await h.crash()
    tickets = (await h.ledger.tickets(TicketsRequest())).tickets
    assert [(one.action_id, one.delivery) for one in tickets] == [(act(1), 2), (act(2), 1)]
