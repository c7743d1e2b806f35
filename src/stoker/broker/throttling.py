"""What the ledger does about remote services: leases by their buckets, refusals, waking in time.

The buckets are the ledger's own, so that every worker on every machine shares them. A lease that
waits for a token is asked again when the token is due: ``Books.token_due`` is one of the times at
which the ledger wakes by itself.
"""

from stoker.broker.books import Books
from stoker.broker.rates import due, full, lowered, moved, room, taken
from stoker.broker.rows import Row
from stoker.model.completion import Completion
from stoker.seams.clock import Instant

UNBOUNDED = 1 << 40
"""More than anybody asks for."""
WAKE_SECONDS_MIN = 0.01
"""Tokens that are due sooner after one another are handed out together."""


def tokens(books: Books, worker_class: str, now: Instant) -> int:
    """Return how many actions of a class its service allows now; where none, note when."""
    service = books.limits.class_services.get(worker_class)
    if service is None:
        return UNBOUNDED
    limit = books.limits.services[service]
    known = books.bucket(service) or full(limit, now.boot)
    bucket = moved(known, limit, now.boot)
    if bucket.at < known.at:  # the clock was set back: without a note its wait would never end
        books.put_bucket(service, bucket)
    count = room(bucket, limit, now.boot)
    if count <= 0:
        at = max(due(bucket, limit, now.boot), now.boot + WAKE_SECONDS_MIN)
        books.token_due = min(at, books.token_due) if books.token_due is not None else at
    return count


def take_token(books: Books, worker_class: str, now: Instant) -> None:
    """Count an action that was handed out."""
    service = books.limits.class_services.get(worker_class)
    if service is not None:
        limit = books.limits.services[service]
        bucket = books.bucket(service) or full(limit, now.boot)
        books.put_bucket(service, taken(bucket, limit, now.boot))


def refusing(books: Books, row: Row, result: Completion) -> str | None:
    """Return the service that refused the action, if one did; remember it for ``pass_time``."""
    wait = result.throttled_seconds
    service = books.limits.class_services.get(row.action.worker_class)
    if wait is None or service is None:
        return None
    if row.live and row.fence == result.fence:
        books.refusals.append((service, row.accepted_boot + row.queue_seconds, wait))
    return service


def pass_time(books: Books, now: Instant) -> None:
    """Lower what refused, after the group's requests; have polls asked whose token is due.

    Not sooner: locks on buckets are taken after those on everything that requests name.
    """
    for service, handed_at, wait in books.refusals:
        limit = books.limits.services[service]
        bucket = books.bucket(service) or full(limit, now.boot)
        books.put_bucket(
            service, lowered(bucket, limit, handed_at=handed_at, wait=wait, now=now.boot)
        )
    books.refusals.clear()
    if books.token_due is not None and books.token_due <= now.boot:
        books.token_due = None
        books.work_seq += 1
