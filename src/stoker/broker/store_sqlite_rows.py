"""Rows to columns and back. The order of columns is that of ``sql/schema.sql``.

An acknowledged row has lost its input; it is read back with a stub of its action that keeps what
later decisions need: ids, class and the policy for late results.
"""

from typing import Any

import msgspec

from stoker.broker.rows import ParkedOn, Row
from stoker.model.action import Action, ActionState, LatePolicy
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId, WorkerId
from stoker.model.value import Value

STATES = tuple(ActionState)
STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}
assert STATES[0] is ActionState.PARKED
assert STATES[-1] is ActionState.ACKNOWLEDGED

encode = msgspec.msgpack.Encoder().encode
decode_completion = msgspec.msgpack.Decoder(Completion).decode
_decode_action = msgspec.msgpack.Decoder(Action).decode

_History = tuple[tuple[str, ...], tuple[Fence, ...], tuple[Fence, ...]]
_decode_history = msgspec.msgpack.Decoder(_History).decode
_NO_HISTORY: _History = ((), (), ())
_STATUSES = {status.value: status for status in CompletionStatus}
_PARKED_ON = {parked.value: parked for parked in ParkedOn}


def hot_columns(row: Row) -> tuple[object, ...]:
    """Return every column of ``action``."""
    action = row.action
    return (
        row.order,
        row.action_id,
        action.run_id,
        row.partition,
        action.rollout_id,
        action.worker_class,
        action.holder or "",
        -action.priority,
        action.late,
        row.digest,
        row.accepted_wall,
        row.deadline_wall,
        row.accepted_boot,
        row.deadline_boot,
        *mutable_columns(row)[:-1],
    )


def mutable_columns(row: Row) -> tuple[object, ...]:
    """Return the columns that change over a row's life, and its place."""
    return (
        row.due_boot,
        STATE_NUMBERS[row.state],
        row.parked_on,
        row.deliveries,
        row.attempts,
        row.fence,
        row.worker,
        row.alone,
        row.suspect,
        row.queue_seconds,
        row.settled_status,
        row.settled_fence,
        row.reclaim_fence,
        row.reclaim_worker,
        _history(row),
        row.order,
    )


def has_history(row: Row) -> bool:
    """Whether anything befell a row that a good delivery does not do."""
    return bool(row.causes or row.lost_fences or row.late_fences)


def _history(row: Row) -> bytes | None:
    if not has_history(row):
        return None
    return encode((row.causes, row.lost_fences, row.late_fences))


def decode_row(columns: tuple[Any, ...], known: Action | None = None) -> Row:
    """Return the row that ``a.*, input.action, result.completion`` hold.

    ``known``: its input, where the caller has it decoded.
    """
    (order, action_id, run_id, part, rollout_id, cls, holder, rank, late, digest) = columns[:10]
    (accepted_wall, deadline_wall, accepted_boot, deadline_boot, due_boot) = columns[10:15]
    (state, parked_on, deliveries, attempts, fence, worker, alone, suspect) = columns[15:23]
    (queue_seconds, status, settled_fence, reclaim_fence, reclaim_worker) = columns[23:28]
    (history, action, completion) = columns[28:]
    causes, lost_fences, late_fences = _decode_history(history) if history else _NO_HISTORY
    if known is not None:
        decoded = known
    elif action is not None:
        decoded = _decode_action(action)
    else:
        decoded = _stub((action_id, run_id, rollout_id, cls, holder, rank, late))
    return Row(
        order=order,
        action=decoded,
        digest=digest,
        partition=part,
        state=STATES[state],
        parked_on=_PARKED_ON[parked_on],
        deliveries=deliveries,
        attempts=attempts,
        fence=Fence(fence),
        worker=worker,
        alone=bool(alone),
        suspect=bool(suspect),
        accepted_boot=accepted_boot,
        accepted_wall=accepted_wall,
        queue_seconds=queue_seconds,
        deadline_boot=deadline_boot,
        deadline_wall=deadline_wall,
        due_boot=due_boot,
        completion=decode_completion(completion) if completion is not None else None,
        settled_status=_STATUSES[status] if status is not None else None,
        settled_fence=Fence(settled_fence),
        reclaim_fence=Fence(reclaim_fence),
        reclaim_worker=reclaim_worker,
        causes=causes,
        lost_fences=lost_fences,
        late_fences=late_fences,
    )


def _stub(columns: tuple[Any, ...]) -> Action:
    action_id, run_id, rollout_id, worker_class, holder, rank, late = columns
    return Action(
        action_id=ActionId(action_id),
        run_id=RunId(run_id),
        rollout_id=RolloutId(rollout_id),
        path=CallPath(""),
        step=0,
        worker_class=worker_class,
        tool="",
        input=Value(digest="", size_bytes=0),
        priority=-rank,
        timeout_seconds=0.0,
        deadline_seconds=0.0,
        holder=WorkerId(holder) if holder else None,
        late=LatePolicy(late),
    )
