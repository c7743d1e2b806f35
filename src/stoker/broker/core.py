"""The hand-off as pure decisions: ``(row, command, now) → (row', events)``.

No I/O, no clock, no randomness: whoever holds the row applies the decision. Times come in as an
``Instant``, fences as numbers drawn by the caller. Losing a worker is decided in ``loss``.

Invariants: one terminal result per action, unchanged for ever (I2); a stale fence changes nothing
but leaves a record, save under ``late = adopt`` (I4); attempts are counted at ``start``, deliveries
at ``lease`` (I5); a cancel ends the action at once (I10). Each is asserted by the model test.
"""

from msgspec.structs import replace

from stoker.broker.base import (
    CancelDisposition,
    CompleteDisposition,
    HoldVerdict,
    LedgerEventKind,
)
from stoker.broker.rows import (
    ACCEPTED,
    ACKNOWLEDGED,
    COMPLETED,
    LEASED,
    NO_FENCE,
    PARKED,
    STARTED,
    WAITING,
    Decision,
    Note,
    ParkedOn,
    Row,
    terminal_note,
)
from stoker.errors import Infrastructure
from stoker.model.action import Action, Effect, LatePolicy
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.faults import FaultRecord
from stoker.model.ids import Fence, WorkerId
from stoker.seams.clock import Instant

_OK, _TAKEN = HoldVerdict.OK, CompleteDisposition.OK
_NOT_PARKED, _ADOPT = ParkedOn.NOTHING, LatePolicy.ADOPT
LATE_FENCES_MAX = 64
"""Stale fences remembered per action; a peer that invents fences must not grow a row."""


def accepted(
    action: Action, *, order: int, digest: str, partition: str, parked_on: ParkedOn, now: Instant
) -> Row:
    """Return the first row of a submitted action: queued, or parked over a cap (I6)."""
    return Row(
        order=order,
        action=action,
        digest=digest,
        partition=partition,
        state=PARKED if parked_on else ACCEPTED,
        parked_on=parked_on,
        accepted_boot=now.boot,
        accepted_wall=now.wall,
        deadline_boot=now.boot + action.deadline_seconds,
        deadline_wall=now.wall + action.deadline_seconds,
        due_boot=now.boot + action.deadline_seconds,
    )


def unparked(row: Row, parked_on: ParkedOn) -> Row:
    """Return a parked row that now waits for ``parked_on``, or is queued."""
    assert row.state is PARKED, f"{row.action_id} is {row.state}, not parked"
    state = PARKED if parked_on else ACCEPTED
    return replace(row, state=state, parked_on=parked_on)


def leased(row: Row, *, worker: WorkerId, fence: Fence, alone: bool, now: Instant) -> Row:
    """Return the row in ``worker``'s hands: one more delivery, a fence that is new everywhere."""
    assert row.state is ACCEPTED, f"{row.action_id} is {row.state}, not queued"
    assert fence > row.settled_fence, f"fence {fence} of {row.action_id} is not new"
    return replace(
        row,
        state=LEASED,
        worker=worker,
        fence=fence,
        alone=alone,
        deliveries=row.deliveries + 1,
        queue_seconds=max(0.0, now.boot - row.accepted_boot),
    )


def start(
    row: Row, fence: Fence, now: Instant, lease_seconds: float
) -> tuple[HoldVerdict, Decision]:
    """Count an attempt and allow the work, unless the lease is gone or the deadline passed."""
    verdict = hold_verdict(row, fence)
    if verdict is not _OK or row.state is STARTED:
        return verdict, Decision(row)
    if now.boot >= row.deadline_boot:
        return HoldVerdict.CANCEL, expire(row)
    started = replace(
        row,
        state=STARTED,
        attempts=row.attempts + 1,
        due_boot=row.deadline_boot + lease_seconds,
    )
    return _OK, Decision(started)


def hold_verdict(row: Row | None, fence: Fence) -> HoldVerdict:
    """Return whether the holder of ``fence`` may go on with the action."""
    if row is None or not fence:
        return HoldVerdict.LOST
    if row.fence == fence:
        return _OK
    return HoldVerdict.CANCEL if row.reclaim_fence == fence else HoldVerdict.LOST


def complete(row: Row, result: Completion) -> tuple[CompleteDisposition, Decision]:
    """Take a worker's result, or record that it came too late (I2, I4)."""
    if row.fence and row.fence == result.fence:
        return _TAKEN, _taken(row, result)
    if row.terminal and result.fence and row.settled_fence == result.fence:
        return CompleteDisposition.ALREADY, Decision(row)
    adopts = row.action.late is _ADOPT and result.fence in row.lost_fences
    if adopts and not row.terminal:
        return CompleteDisposition.ADOPTED, _taken(_revoked(row), result)
    return CompleteDisposition.STALE, _late(row, result)


def _taken(row: Row, result: Completion) -> Decision:
    queue_seconds = row.queue_seconds
    kept = replace(
        result,
        attempt=result.attempt or row.attempts,
        timings=replace(result.timings, queue_seconds=queue_seconds),
    )
    settled = settle(replace(row, suspect=False) if row.suspect else row, kept)
    return Decision(settled, (terminal_note(settled),))


def _late(row: Row, result: Completion) -> Decision:
    letting_go = row.reclaim_fence == result.fence and bool(result.fence)
    decision = reclaimed(row, "its worker reported a result") if letting_go else Decision(row)
    if result.fence in row.late_fences:
        return decision
    reconcile = row.terminal and row.action.late is LatePolicy.RECONCILE
    note = Note(
        LedgerEventKind.LATE,
        f"{'reconciled' if reconcile else 'discarded'}: {result.status} under stale fence "
        f"{result.fence}",
        result if reconcile else None,
    )
    recorded = replace(
        decision.row, late_fences=(*row.late_fences, result.fence)[-LATE_FENCES_MAX:]
    )
    return Decision(recorded, (note, *decision.notes))


def release(row: Row, fence: Fence) -> tuple[HoldVerdict, Decision]:
    """Take unstarted work back without spending an attempt; hear that a revoked lease was let go.

    Work that *was* started is not decided here: see ``loss.lose``.
    """
    verdict = hold_verdict(row, fence)
    if verdict is HoldVerdict.CANCEL:
        return _OK, reclaimed(row, "its worker released it")
    if verdict is _OK and row.state is LEASED:
        back = replace(requeued(row), causes=(*row.causes, cause(row, "released unstarted")))
        return _OK, Decision(back, (Note(LedgerEventKind.REQUEUED, back.causes[-1]),))
    return verdict, Decision(row)


def requeued(row: Row) -> Row:
    """Return a live row back in the queue, its fence dead."""
    assert row.live, f"{row.action_id} is {row.state}, not in a worker's hands"
    return replace(
        row,
        state=ACCEPTED,
        fence=NO_FENCE,
        worker=None,
        alone=False,
        due_boot=row.deadline_boot,
        lost_fences=(*row.lost_fences, row.fence),
    )


def cancel(row: Row, reason: str) -> tuple[CancelDisposition, Decision]:
    """End the action at once; its worker, if any, is told and later reclaimed (I10)."""
    if row.terminal:
        mine = row.settled_status is CompletionStatus.CANCELLED
        return CancelDisposition.CANCELLED if mine else CancelDisposition.TOO_LATE, Decision(row)
    ended = settle(_revoked(row), ended_by_ledger(row, CompletionStatus.CANCELLED))
    ended = replace(ended, causes=(*row.causes, f"cancelled: {reason or 'no reason given'}"))
    return CancelDisposition.CANCELLED, Decision(ended, (terminal_note(ended),))


def expire(row: Row) -> Decision:
    """End an action whose time is up; a started external one is ambiguous (I9, I12)."""
    started = row.state is STARTED
    external = started and row.action.effect is Effect.EXTERNAL
    where = f"a worker held it ({row.worker})" if row.live else f"it was {row.state}"
    fault = Infrastructure(
        f"action {row.action_id} reached its deadline of {row.action.deadline_seconds:g} s while "
        f"{where}; the ledger ended it; look for workers of class {row.action.worker_class!r}",
        action_id=row.action_id,
    ).record()
    status = CompletionStatus.AMBIGUOUS if external else CompletionStatus.TIMED_OUT
    ended = settle(_revoked(row), ended_by_ledger(row, status, fault))
    return Decision(ended, (terminal_note(ended),))


def ended_by_ledger(
    row: Row,
    status: CompletionStatus,
    fault: FaultRecord | None = None,
    environment: EnvironmentState | None = None,
) -> Completion:
    """Return the result of an action that the ledger itself ends, for the state it is in."""
    started = row.state is STARTED
    if environment is None:
        environment = EnvironmentState.INTERRUPTED if started else EnvironmentState.CLEAN
        if row.action.environment_id is None:
            environment = EnvironmentState.NONE
    return Completion(
        action_id=row.action_id,
        fence=NO_FENCE,
        status=status,
        attempt=row.attempts,
        worker_id=row.worker,
        fault=fault,
        external_effect_possible=started and row.action.effect is Effect.EXTERNAL,
        environment=environment,
    )


def settle(row: Row, result: Completion) -> Row:
    """Return the row with its one terminal result (I2)."""
    assert not row.terminal, f"{row.action_id} already has a result"
    return replace(
        row,
        state=COMPLETED,
        parked_on=_NOT_PARKED,
        fence=NO_FENCE,
        worker=None,
        alone=False,
        completion=result,
        settled_status=result.status,
        settled_fence=result.fence,
    )


def _revoked(row: Row) -> Row:
    if not row.live:
        assert row.state in WAITING, f"{row.action_id} is {row.state}"
        return row
    return replace(row, reclaim_fence=row.fence, reclaim_worker=row.worker)


def reclaimed(row: Row, detail: str) -> Decision:
    """Note that the worker of a revoked lease has let go of it."""
    assert row.reclaim_fence, f"nothing of {row.action_id} is to be reclaimed"
    row = replace(row, reclaim_fence=NO_FENCE, reclaim_worker=None)
    return Decision(row, (Note(LedgerEventKind.RECLAIMED, detail),))


def acknowledge(row: Row) -> Row:
    """Return the tombstone of an applied result; anything else stays as it is."""
    if row.state is not COMPLETED:
        return row
    return replace(row, state=ACKNOWLEDGED, completion=None)


def cause(row: Row, what: str) -> str:
    """Return one line for the list of causes."""
    return f"delivery {row.deliveries}, attempt {row.attempts}, worker {row.worker}: {what}"
