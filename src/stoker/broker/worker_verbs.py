"""The worker's verbs: enroll, lease, start, heartbeat, complete, release.

Invariants: work begins only after ``start`` said ok, and for external actions only after that is on
disk (I12); results are never refused for a cap (I6); a worker is told of every lease that was taken
from it, in its next lease reply and in every heartbeat until it lets go.
"""

from stoker.broker.base import (
    CompleteDisposition,
    CompleteReply,
    CompleteRequest,
    Enroll,
    HeartbeatRequest,
    HoldReply,
    HoldVerdict,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    StartRequest,
)
from stoker.broker.books import Books, WorkerRecord
from stoker.broker.coordinator_verbs import check_value, is_external
from stoker.broker.core import complete, release, start
from stoker.broker.expiry import Expiry, verdicts
from stoker.broker.loss import deliverable, lose, turned_away
from stoker.broker.queueing import hand_out, hand_out_tickets
from stoker.broker.rows import LEASED, STARTED, Row
from stoker.broker.store import Enlisted
from stoker.broker.throttling import refusing
from stoker.errors import LedgerRefused
from stoker.seams.clock import Instant

_OK = HoldVerdict.OK


def enroll(books: Books, expiry: Expiry, request: Enroll, now: Instant) -> None:
    """Take note of an incarnation; what it replaces is lost at once."""
    record = expiry.hear(request.worker_id, now)
    refuse_ended(record)
    enlisted = Enlisted(request.worker_id, request.name, dict(request.slots), ended=False)
    if record.enlisted != enlisted:
        record.enlisted = enlisted
        books.store.put_workers([enlisted])
    replaced = request.replaces
    if replaced is not None and replaced != request.worker_id:
        old = books.worker(replaced, now.boot)
        if not old.enlisted.ended:
            why = f"its worker is dead, replaced by {request.worker_id}"
            expiry.lose_worker(old, why, ended=True)


def refuse_ended(record: WorkerRecord) -> None:
    """Refuse an incarnation that was replaced by another."""
    if record.enlisted.ended:
        raise LedgerRefused(
            f"worker incarnation {record.enlisted.worker_id} was reported dead and replaced; "
            "it gets no more work; end it, or enroll under a fresh id"
        )


def lease(books: Books, expiry: Expiry, request: LeaseRequest, now: Instant) -> LeaseReply:
    """Hand out what there is now; an empty reply means the caller may wait."""
    refuse_ended(expiry.hear(request.worker_id, now))
    return poll(books, request, now)


def poll(books: Books, request: LeaseRequest, now: Instant) -> LeaseReply:
    """Hand out work to a request that may have waited; waiting is no sign of life.

    A stopped worker keeps its connection and its poll: once it is lost it is given nothing.
    """
    record = books.workers.get(request.worker_id)
    if record is None or record.dead:  # a gateway forgets whom another one has found lost
        return LeaseReply()
    if request.action_ids:
        rows = hand_out_tickets(books, record, request, now)
    else:
        rows = hand_out(books, record, request.slots, now)
    revoked = tuple(record.untold)
    record.untold.clear()
    return LeaseReply(leases=tuple(lease_of(row, now) for row in rows), revoked=revoked)


def lease_of(row: Row, now: Instant) -> Lease:
    """Return the lease under which ``row`` is out."""
    return Lease(
        action=row.action,
        fence=row.fence,
        delivery=row.deliveries,
        attempt=row.attempts + 1,
        deadline_seconds=max(0.0, row.deadline_boot - now.boot),
        alone=row.alone,
        queue_seconds=row.queue_seconds,
    )


def undelivered(books: Books, request: LeaseRequest, now: Instant) -> LeaseReply:
    """Repeat unstarted leases to a worker whose connection broke before the reply came."""
    record = books.workers.get(request.worker_id)
    rows = books.in_hands(record) if record else []
    unstarted = [
        row
        for row in rows
        if row.state is LEASED
        and (row.action.worker_class in request.slots or row.action_id in request.action_ids)
    ]
    return LeaseReply(leases=tuple(lease_of(row, now) for row in unstarted))


def start_work(books: Books, expiry: Expiry, request: StartRequest, now: Instant) -> HoldReply:
    """Allow work to begin, attempt counted."""
    record = expiry.hear(request.worker_id, now)
    rows = books.rows([held.action_id for held in request.held])
    found: list[HoldVerdict] = []
    for held in request.held:
        row = rows.get(held.action_id)
        if row is None:
            found.append(HoldVerdict.LOST)
            continue
        verdict, decision = start(row, held.fence, now, books.limits.lease_seconds)
        begun = decision.row.state is STARTED and row.state is LEASED
        books.meta.attempts += begun
        books.sync |= begun and is_external(row)
        rows[held.action_id] = books.apply(row, decision)
        if verdict is _OK:
            record.named[held.action_id] = now.boot
        found.append(verdict)
    return HoldReply(verdicts=tuple(found))


def heartbeat(books: Books, expiry: Expiry, request: HeartbeatRequest, now: Instant) -> HoldReply:
    """Extend a worker's life and the leases it names; one that was replaced is told so."""
    record = expiry.hear(request.worker_id, now)
    refuse_ended(record)
    expiry.lose_unnamed(record, request.held, now)
    return HoldReply(verdicts=verdicts(books, request.held))


def complete_work(
    books: Books, expiry: Expiry, request: CompleteRequest, now: Instant
) -> CompleteReply:
    """Take results; each is applied once, whoever repeats it (B9)."""
    for result in request.completions:
        check_value(result.observation, "observation", result.action_id)
    expiry.hear(request.worker_id, now)
    rows = books.rows([result.action_id for result in request.completions])
    found: list[CompleteDisposition] = []
    for result in request.completions:
        row = rows.get(result.action_id)
        if row is None:
            found.append(CompleteDisposition.STALE)
            continue
        service = refusing(books, row, result)
        if service is None:
            disposition, decision = complete(row, result)
        else:
            disposition, decision = turned_away(row, result, service)
        rows[result.action_id] = books.apply(row, decision)
        found.append(disposition)
    books.sync = True
    return CompleteReply(dispositions=tuple(found))


def release_work(books: Books, expiry: Expiry, request: ReleaseRequest, now: Instant) -> HoldReply:
    """Take leases back: unstarted ones at no cost, started ones by their effect."""
    expiry.hear(request.worker_id, now)
    rows = books.rows([held.action_id for held in request.held])
    found: list[HoldVerdict] = []
    for held in request.held:
        row = rows.get(held.action_id)
        if row is None:
            found.append(HoldVerdict.LOST)
            continue
        verdict, decision = release(row, held.fence)
        if verdict is _OK and row.state is STARTED:
            decision = lose(row, "released after it had started", worker_gone=False)
        elif verdict is _OK and row.live and not deliverable(row):
            decision = lose(row, "released unstarted", worker_gone=False)  # the last one (I5)
        rows[held.action_id] = books.apply(row, decision)
        found.append(verdict)
    return HoldReply(verdicts=tuple(found))
