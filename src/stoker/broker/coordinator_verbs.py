"""The coordinator's verbs: own a partition, append, cancel, hear events.

Invariants: a stale coordinator's request changes nothing (B7, I11); journal entries, submits and
acknowledgements of one append are applied together or not at all; same id and digest is a
duplicate, another digest a conflict of that submit only (I7).
"""

import math
from collections.abc import Iterator

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
    Attach,
    Cancel,
    CancelDisposition,
    CancelReply,
    EventsReply,
    EventsRequest,
    SubmitDisposition,
)
from stoker.broker.books import Books
from stoker.broker.core import accepted, acknowledge, cancel
from stoker.broker.counts import line_of
from stoker.broker.loss import environment_lost
from stoker.broker.queueing import parking
from stoker.broker.rows import ACKNOWLEDGED, COMPLETED, Decision, Row
from stoker.broker.store import Head, Owner
from stoker.errors import LedgerFenced, LedgerRefused
from stoker.model.action import Action, Effect
from stoker.model.ids import ActionId, Fence, RolloutId, RunId
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest
from stoker.seams.clock import Instant

_APPLIED = AppendDisposition.APPLIED
_EXTERNAL = Effect.EXTERNAL
_ACCEPTED, _PARKED = SubmitDisposition.ACCEPTED, SubmitDisposition.PARKED


def attach(books: Books, request: Attach) -> Fence:
    """Make ``incarnation`` the owner of a partition; whoever was before is fenced."""
    owner = books.owner(request.run_id, request.partition)
    if owner is not None and owner.incarnation == request.incarnation:
        return owner.fence
    fence = Fence(books.draw())
    books.put_owner(Owner(request.run_id, request.partition, fence, request.incarnation))
    books.sync = True
    books.events_seq += 1  # whoever waits for events under the old fence is told
    return fence


def check_fence(books: Books, run_id: RunId, partition: str, fence: Fence) -> None:
    """Refuse anybody but the newest coordinator of the partition."""
    owner = books.owner(run_id, partition)
    if owner is None or owner.fence != fence:
        newest = f"{owner.incarnation} owns it now" if owner else "nobody has attached to it"
        raise LedgerFenced(
            f"partition {partition!r} of run {run_id}: the fence {fence} is not the newest; "
            f"{newest}; nothing was changed; attach again or end this coordinator",
            run_id=run_id,
            partition=partition,
        )


def append(books: Books, batch: AppendBatch, now: Instant) -> AppendBatchReply:
    """Apply appends in order; one that conflicts does not stop the others."""
    check_fence(books, batch.run_id, batch.partition, batch.fence)
    # One look for everything the batch names, instead of one for each of its appends.
    appends = batch.appends
    books.rows([action.action_id for one in appends for action in one.submits])
    books.rows([action_id for one in appends for action_id in one.acknowledges])
    books.learn_heads(batch.run_id, [one.rollout_id for one in appends])
    going = [one.rollout_id for one in appends if _check_home(books, batch, one) and one.submits]
    for one in appends:
        for action in one.submits:
            _check_action(action, batch.run_id, one.rollout_id)
    books.learn_outstanding(going)
    books.sync |= batch.sync
    return AppendBatchReply(replies=tuple(_append(books, batch, one, now) for one in appends))


def _check_home(books: Books, batch: AppendBatch, one: Append) -> bool:
    """Return whether its rollout has begun.

    Refuses to write what another partition began: its own coordinator's fence guards it.
    """
    rollout_id = one.rollout_id
    head = books.head(batch.run_id, rollout_id)
    if head is not None and head.partition != batch.partition:
        raise LedgerRefused(
            f"rollout {rollout_id} belongs to partition {head.partition!r} of run {batch.run_id}, "
            f"not to {batch.partition!r}; nothing was changed; each coordinator writes its own"
        )
    return head is not None


def _append(books: Books, batch: AppendBatch, one: Append, now: Instant) -> AppendReply:
    head = books.head(batch.run_id, one.rollout_id)
    begins = head is None
    if head is None:
        head = Head(books.draw(), batch.run_id, one.rollout_id, batch.partition, 0, finished=False)
    if one.expected_seq != head.seq:
        return _repeated(books, head, one)
    if begins:
        books.begin(one.rollout_id)
    if one.events or (begins and one.submits):  # it begins once: its actions count from then on
        books.write(head, one.events)
        finished = head.finished or one.finished
        head = Head(*head[:4], head.seq + len(one.events), finished)
        books.put_head(head)
        books.transitions += len(one.events)
    books.sync |= bool(one.submits) or one.finished
    dispositions = tuple(_submits(books, batch.partition, one, now))
    _acknowledge(books, one.acknowledges)
    return AppendReply(disposition=_APPLIED, seq=head.seq, submits=dispositions)


def _repeated(books: Books, head: Head, one: Append) -> AppendReply:
    """Tell a repetition of an applied append from a conflict (I11)."""
    books.flush()
    stored = books.store.entries(head.key, after=one.expected_seq, limit=len(one.events))
    known = books.rows(action.action_id for action in one.submits)
    same = all(
        (row := known.get(action.action_id)) is not None and row.digest == action.digest()
        for action in one.submits
    )
    if one.expected_seq > head.seq or tuple(stored) != one.events or not same:
        return AppendReply(disposition=AppendDisposition.CONFLICT, seq=head.seq)
    _acknowledge(books, one.acknowledges)
    return AppendReply(
        disposition=AppendDisposition.ALREADY,
        seq=head.seq,
        submits=(SubmitDisposition.DUPLICATE,) * len(one.submits),
    )


def _submits(
    books: Books, partition: str, one: Append, now: Instant
) -> Iterator[SubmitDisposition]:
    if not one.submits:
        return
    outstanding = books.outstanding(one.rollout_id)
    for action in one.submits:
        digest = action.digest()
        row = books.row(action.action_id)
        if row is not None:
            yield (
                SubmitDisposition.DUPLICATE if row.digest == digest else SubmitDisposition.CONFLICT
            )
            continue
        parked_on = parking(books, line_of(action.worker_class, action.run_id), outstanding)
        row = accepted(
            action,
            order=books.draw(),
            digest=digest,
            partition=partition,
            parked_on=parked_on,
            now=now,
        )
        books.add(row)
        outstanding += 1
        if action.holder is not None and books.worker(action.holder, now.boot).dead:
            books.apply(row, environment_lost(row))
        yield _PARKED if parked_on else _ACCEPTED


def _acknowledge(books: Books, ids: tuple[ActionId, ...]) -> None:
    for action_id in dict.fromkeys(ids):
        row = books.row(action_id)
        if row is None:
            continue
        if row.state is ACKNOWLEDGED:
            books.bury_told(row)
        elif row.state is COMPLETED:
            books.apply(row, Decision(acknowledge(row)))


def cancel_actions(books: Books, request: Cancel) -> CancelReply:
    """End actions at once (I10)."""
    check_fence(books, request.run_id, request.partition, request.fence)
    books.flush()
    found: dict[ActionId, Row] = books.rows(request.action_ids)
    for rollout in request.rollout_ids:
        for row in books.current(books.store.unfinished(rollout)):
            found[row.action_id] = row
    dispositions = dict.fromkeys(request.action_ids, CancelDisposition.UNKNOWN)
    for action_id, row in found.items():
        if (row.action.run_id, row.partition) != (request.run_id, request.partition):
            continue
        dispositions[action_id], decision = cancel(row, request.reason)
        books.apply(row, decision)
    books.sync = True
    return CancelReply(dispositions=dispositions)


def events(books: Books, request: EventsRequest) -> EventsReply:
    """Return what happened after ``request.after``."""
    check_fence(books, request.run_id, request.partition, request.fence)
    found = books.told(request.run_id, request.partition, request.after, request.limit)
    return EventsReply(events=tuple(found))


def check_value(value: Value | None, what: str, action_id: ActionId) -> None:
    """Refuse inline content that is not what its digest says, or too large to lie in a row."""
    if value is None or value.inline is None:
        return
    if len(value.inline) > INLINE_BYTES_MAX:
        raise LedgerRefused(
            f"the {what} of action {action_id} carries {len(value.inline)} bytes inline, over the "
            f"limit of {INLINE_BYTES_MAX}; nothing was changed; put it in the artifact store first"
        )
    if len(value.inline) != value.size_bytes or content_digest(value.inline) != value.digest:
        raise LedgerRefused(
            f"the {what} of action {action_id} does not match its digest {value.digest}; nothing "
            "was changed; send it again"
        )


def _check_action(action: Action, run_id: RunId, rollout_id: RolloutId) -> None:
    check_value(action.input, "input", action.action_id)
    if action.run_id != run_id or action.rollout_id != rollout_id:
        raise LedgerRefused(
            f"action {action.action_id} names another run or rollout than its append; not accepted"
        )
    if not 0 < action.deadline_seconds < math.inf:
        raise LedgerRefused(
            f"action {action.action_id} needs a deadline above 0 s, it has "
            f"{action.deadline_seconds}"
        )
    if action.attempts_max < 1 or action.deliveries_max < 1:
        raise LedgerRefused(
            f"action {action.action_id} allows no attempt or no delivery; not accepted"
        )


def is_external(row: Row) -> bool:
    """Return whether starting ``row`` must be on disk before the work begins (I12, B16)."""
    return row.action.effect is _EXTERNAL
