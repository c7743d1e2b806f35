"""The pure decisions, where a whole ledger would hide the reason."""

from typing import Any

import pytest
from msgspec.structs import replace

from stoker.broker import core
from stoker.broker.base import CompleteDisposition, HoldVerdict, LedgerEventKind
from stoker.broker.loss import lose, restored
from stoker.broker.rows import NO_FENCE, ParkedOn, Row
from stoker.model.action import ActionState, Effect, LatePolicy
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState, Timings
from stoker.model.ids import EnvironmentId, Fence, WorkerId
from stoker.seams.clock import Instant
from support.ledger import action

NOW = Instant(100.0, 1_700_000_000.0)
LEASE_SECONDS = 10.0


def queued(**more: Any) -> Row:
    one = action(1, **more)
    return core.accepted(
        one, order=1, digest=one.digest(), partition="0", parked_on=ParkedOn.NOTHING, now=NOW
    )


def leased(row: Row | None = None, *, fence: int = 7, alone: bool = False, **more: Any) -> Row:
    row = row or queued(**more)
    return core.leased(row, worker=WorkerId("w"), fence=Fence(fence), alone=alone, now=NOW)


def started(**more: Any) -> Row:
    verdict, decision = core.start(leased(**more), Fence(7), NOW, LEASE_SECONDS)
    assert verdict is HoldVerdict.OK
    return decision.row


def test_the_deadline_is_kept_on_the_boot_clock_and_gets_a_lease_of_grace_once_started() -> None:
    row = queued(deadline_seconds=60.0)
    assert (row.deadline_boot, row.due_boot) == (160.0, 160.0)
    assert started(deadline_seconds=60.0).due_boot == 170.0
    assert core.requeued(started(deadline_seconds=60.0)).due_boot == 160.0


def test_work_does_not_begin_past_its_deadline() -> None:
    late = Instant(NOW.boot + 60.0, NOW.wall)
    verdict, decision = core.start(leased(deadline_seconds=60.0), Fence(7), late, LEASE_SECONDS)
    assert verdict is HoldVerdict.CANCEL
    assert decision.row.settled_status is CompletionStatus.TIMED_OUT
    assert decision.row.attempts == 0


def test_a_crowd_makes_suspects_and_spends_no_attempt() -> None:
    row = lose(started(), "gone", crowd=True).row
    assert (row.state, row.suspect, row.attempts, row.deliveries) == ("accepted", True, 0, 1)


def test_a_suspect_lost_alone_spends_its_attempt_and_stays_a_suspect() -> None:
    suspect = replace(queued(), suspect=True)
    _, decision = core.start(leased(suspect, alone=True), Fence(7), NOW, LEASE_SECONDS)
    row = lose(decision.row, "gone").row
    assert (row.suspect, row.attempts, row.alone) == (True, 1, False)


def test_completing_clears_suspicion() -> None:
    row = replace(started(), suspect=True)
    result = Completion(action_id=row.action_id, fence=Fence(7), status=CompletionStatus.OK)
    disposition, decision = core.complete(row, result)
    assert disposition is CompleteDisposition.OK
    assert not decision.row.suspect


def test_nothing_of_a_lease_is_left_on_a_result() -> None:
    suspect = replace(queued(), suspect=True)
    decision = core.start(leased(suspect, alone=True), Fence(7), NOW, LEASE_SECONDS)[1]
    result = Completion(action_id=suspect.action_id, fence=Fence(7), status=CompletionStatus.OK)
    row = core.complete(decision.row, result)[1].row
    assert (row.alone, row.worker, row.fence, row.settled_fence) == (False, None, NO_FENCE, 7)


def test_an_external_action_in_a_crowd_is_ambiguous_all_the_same() -> None:
    decision = lose(started(effect=Effect.EXTERNAL), "gone", crowd=True)
    assert decision.row.settled_status is CompletionStatus.AMBIGUOUS


def test_what_the_ledger_ends_says_what_became_of_the_environment() -> None:
    box = EnvironmentId("env_1")
    states = {
        core.cancel(row, "")[1].row.completion.environment  # type: ignore[union-attr]
        for row in (queued(environment_id=box), leased(environment_id=box))
    }
    assert states == {EnvironmentState.CLEAN}
    running = core.cancel(started(environment_id=box), "")[1].row
    assert running.completion is not None
    assert running.completion.environment is EnvironmentState.INTERRUPTED
    assert core.cancel(queued(), "")[1].row.completion == Completion(
        action_id=running.action_id, fence=NO_FENCE, status=CompletionStatus.CANCELLED
    )


def test_late_results_are_recorded_once_per_fence_and_bounded() -> None:
    row = core.cancel(started(), "")[1].row
    notes = 0
    for fence in [7, 7, *range(1_000, 1_200)]:
        result = Completion(action_id=row.action_id, fence=Fence(fence), status=CompletionStatus.OK)
        disposition, decision = core.complete(row, result)
        assert disposition is CompleteDisposition.STALE
        notes += sum(note.kind is LedgerEventKind.LATE for note in decision.notes)
        row = decision.row
    assert notes == 201
    assert len(row.late_fences) == core.LATE_FENCES_MAX


@pytest.mark.parametrize("state", [ActionState.COMPLETED, ActionState.ACKNOWLEDGED])
def test_a_result_is_written_once(state: ActionState) -> None:
    row = replace(core.cancel(queued(), "")[1].row, state=state)
    with pytest.raises(AssertionError, match="already has a result"):
        core.settle(row, core.ended_by_ledger(row, CompletionStatus.DEAD))


def test_a_result_says_how_long_its_action_was_queued_and_what_its_worker_measured() -> None:
    later = Instant(NOW.boot + 5.0, NOW.wall)
    row = core.leased(queued(), worker=WorkerId("w"), fence=Fence(7), alone=False, now=later)
    assert row.queue_seconds == 5.0
    result = Completion(
        action_id=row.action_id,
        fence=Fence(7),
        status=CompletionStatus.OK,
        timings=Timings(run_seconds=2.0),
    )
    kept = core.complete(row, result)[1].row.completion
    assert kept is not None
    assert kept.timings == Timings(queue_seconds=5.0, run_seconds=2.0)
    earlier = Instant(NOW.boot - 5.0, NOW.wall)  # a requeued action of another boot
    row = core.leased(queued(), worker=WorkerId("w"), fence=Fence(7), alone=False, now=earlier)
    assert row.queue_seconds == 0.0


def test_only_the_fence_of_a_live_lease_may_go_on() -> None:
    assert core.hold_verdict(None, Fence(7)) is HoldVerdict.LOST
    assert core.hold_verdict(queued(), NO_FENCE) is HoldVerdict.LOST
    assert core.hold_verdict(leased(), Fence(7)) is HoldVerdict.OK
    assert core.hold_verdict(leased(), Fence(6)) is HoldVerdict.LOST


def test_a_parked_row_that_waits_for_something_else_stays_parked() -> None:
    parked = replace(queued(), state=ActionState.PARKED, parked_on=ParkedOn.ROLLOUT)
    row = core.unparked(parked, ParkedOn.CAPS)
    assert (row.state, row.parked_on) == (ActionState.PARKED, ParkedOn.CAPS)


def test_causes_are_kept_in_order_with_why_it_was_cancelled() -> None:
    _, released = core.release(leased(), Fence(7))
    assert [note.kind for note in released.notes] == [LedgerEventKind.REQUEUED]
    ended = core.cancel(released.row, "told so")[1].row
    assert [one.partition(": ")[2] for one in ended.causes] == ["released unstarted", "told so"]


def test_what_one_worker_alone_may_run_ends_with_that_worker() -> None:
    mine = leased(holder=WorkerId("w"))
    gone = lose(mine, "gone").row
    assert gone.completion is not None
    assert (gone.settled_status, gone.completion.environment) == ("error", EnvironmentState.LOST)
    assert lose(mine, "not named", worker_gone=False).row.state is ActionState.ACCEPTED


@pytest.mark.parametrize("box", [EnvironmentId("env_1"), None])
def test_a_dead_letter_says_what_became_of_its_environment_and_knows_its_last_fence(
    box: EnvironmentId | None,
) -> None:
    row = lose(leased(environment_id=box, deliveries_max=1), "gone").row
    assert row.completion is not None
    assert row.completion.status is CompletionStatus.DEAD
    lost = EnvironmentState.LOST if box else EnvironmentState.NONE
    assert row.completion.environment is lost
    assert row.lost_fences == (7,), "queued again, it may still adopt its late result"


def test_a_late_result_is_for_its_rollout_only_once_the_action_has_ended() -> None:
    requeued = core.release(leased(late=LatePolicy.RECONCILE), Fence(7))[1].row
    result = Completion(action_id=requeued.action_id, fence=Fence(7), status=CompletionStatus.OK)
    [discarded] = core.complete(requeued, result)[1].notes
    assert (discarded.kind, discarded.completion) == (LedgerEventKind.LATE, None)
    ended = core.cancel(requeued, "")[1].row
    [reconciled] = core.complete(ended, result)[1].notes
    assert reconciled.completion == result
    assert reconciled.detail.startswith("reconciled")


def test_i5_the_last_delivery_that_a_copy_shows_is_not_followed_by_another() -> None:
    assert restored(leased(deliveries_max=2)).row.state is ActionState.ACCEPTED
    row = restored(leased(deliveries_max=1)).row
    assert row.settled_status is CompletionStatus.DEAD


def test_a_restored_row_is_told_as_what_becomes_of_it() -> None:
    assert [note.kind for note in restored(leased()).notes] == [LedgerEventKind.REQUEUED]
    assert restored(queued()).notes == ()
    revoked = core.cancel(started(), "")[1].row
    decision = restored(revoked)
    assert [note.kind for note in decision.notes] == [LedgerEventKind.RECLAIMED]
    assert decision.row.reclaim_fence == NO_FENCE
    let_go = decision.row
    assert restored(let_go).row is let_go
    for row in (queued(effect=Effect.EXTERNAL), started(effect=Effect.EXTERNAL)):
        [note] = restored(row).notes
        assert note.completion is not None
        assert note.completion.external_effect_possible
