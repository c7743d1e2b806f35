"""The pure decisions, where a whole ledger would hide the reason."""

from typing import Any

import pytest
from msgspec.structs import replace

from stoker.broker import core
from stoker.broker.base import CompleteDisposition, HoldVerdict, LedgerEventKind
from stoker.broker.loss import lose
from stoker.broker.rows import NO_FENCE, ParkedOn, Row
from stoker.model.action import ActionState, Effect
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
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
