"""What anybody may read: journals, rollouts, actions, dead letters, counters. Changes nothing."""

from collections import Counter
from collections.abc import Iterable
from heapq import merge

from stoker.broker import rates
from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    ActionView,
    ClassStats,
    DeadLettersRequest,
    JournalReply,
    JournalRequest,
    RolloutsReply,
    RolloutsRequest,
    RolloutSummary,
    RunStats,
    ServiceStats,
    StatsReply,
    Ticket,
    TicketsReply,
    TicketsRequest,
    WorkerStats,
)
from stoker.broker.books import Books
from stoker.broker.rows import Queue, Row
from stoker.broker.store import Head
from stoker.model.action import ActionState
from stoker.model.ids import RunId
from stoker.model.value import canonical_digest
from stoker.seams.clock import Instant

REPLY_BYTES_MAX = 16 * 1024 * 1024
"""A reply is cut short past this; one journal entry and one page more still fit a frame."""
_PAGE = 128
_LOOKS = 16
"""Runs and holders whose queues are looked at for an age."""


def journal(books: Books, request: JournalRequest) -> JournalReply:
    """Return one rollout's entries, as many as fit a frame."""
    books.flush()
    head = books.store.head(request.run_id, request.rollout_id)
    if head is None:
        return JournalReply(events=())
    found: list[bytes] = []
    size = 0
    while len(found) < request.limit and size < REPLY_BYTES_MAX:
        count = min(_PAGE, request.limit - len(found))
        page = books.store.entries(head.key, after=request.after + len(found), limit=count)
        found += page
        size += sum(map(len, page))
        if len(page) < count:
            return JournalReply(events=tuple(found))
    return JournalReply(events=tuple(found), more=len(found) < request.limit)


def rollouts(books: Books, request: RolloutsRequest) -> RolloutsReply:
    """Return a run's rollouts in order of admission, as many as fit a frame."""
    books.flush()
    found: list[RolloutSummary] = []
    size = 0
    for head in books.store.heads(request.run_id, request.after, request.limit):
        if size >= REPLY_BYTES_MAX:
            return RolloutsReply(rollouts=tuple(found), more=True)
        found.append(_summary(books, head))
        size += len(found[-1].first) + len(found[-1].last or b"")
    return RolloutsReply(rollouts=tuple(found))


def _summary(books: Books, head: Head) -> RolloutSummary:
    entries = books.store.entries
    first = entries(head.key, after=0, limit=1)
    return RolloutSummary(
        rollout_id=head.rollout_id,
        seq=head.seq,
        first=first[0] if first else b"",
        last=entries(head.key, after=head.seq - 1, limit=1)[0] if head.finished else None,
    )


def actions(books: Books, request: ActionsRequest) -> ActionsReply:
    """Return actions as the ledger holds them; acknowledged ones have lost input and result."""
    books.flush()
    rows = list(books.rows(request.action_ids).values())
    if request.rollout_id is not None:
        rows += books.current(books.store.rollout_rows(request.rollout_id))
    return as_views(rows)


def tickets(books: Books, request: TicketsRequest) -> TicketsReply:
    """Return the head of every queue that is handed out by ticket; a worker's own things are not.

    Read anew each time, so nothing has to be remembered of what was published: neither we nor the
    publisher lose a ticket by dying.
    """
    books.flush()
    heads = [
        books.store.queued(
            Queue(line.worker_class, line.run_id, None, suspect=suspect), request.limit
        )
        for line in books.waiting
        if line.worker_class in books.limits.ticket_classes
        for suspect in (False, True)
    ]
    first = merge(*heads, key=lambda row: (-row.action.priority, row.order))
    found = tuple(map(_ticket, first))
    mark = canonical_digest([(one.action_id, one.delivery) for one in found])
    return TicketsReply(tickets=() if mark == request.mark else found, mark=mark)


def _ticket(row: Row) -> Ticket:
    return Ticket(
        action_id=row.action_id,
        worker_class=row.action.worker_class,
        priority=row.action.priority,
        delivery=row.deliveries + 1,
    )


def dead_letters(books: Books, request: DeadLettersRequest) -> ActionsReply:
    """Return a run's dead letters with every cause."""
    books.flush()
    return as_views(books.store.dead(request.run_id))


def as_views(rows: Iterable[Row]) -> ActionsReply:
    """Return rows as anybody may see them."""
    return ActionsReply(
        actions=tuple(
            ActionView(
                action=row.action,
                state=row.state,
                deliveries=row.deliveries,
                attempts=row.attempts,
                worker_id=row.worker,
                completion=row.completion,
                causes=row.causes,
            )
            for row in rows
        )
    )


def stats(books: Books, now: Instant) -> StatsReply:
    """Return counters and queue ages; costs a few index look-ups, no scan."""
    books.flush()
    meta, store = books.meta, books.store
    alive = [record for record in books.workers.values() if not record.dead]
    classes = set(books.states) | {cls for r in alive for cls in r.enlisted.slots}
    workers: tuple[WorkerStats, ...] = tuple(
        r.enlisted.stats(len(r.named), max(0.0, now.boot - r.seen)) for r in alive
    )
    return StatsReply(
        classes={
            cls: ClassStats(
                queued=books.states[cls][ActionState.ACCEPTED],
                leased=books.states[cls][ActionState.LEASED],
                started=books.states[cls][ActionState.STARTED],
                parked=books.states[cls][ActionState.PARKED],
                oldest_queued_seconds=_age(books, cls, now),
                slots=sum(r.enlisted.slots.get(cls, 0) for r in alive),
            )
            for cls in sorted(classes)
        },
        workers=workers,
        unacknowledged=books.results,
        deliveries_total=meta.deliveries,
        attempts_total=meta.attempts,
        retries_total=meta.retries,
        completions_total=dict(meta.completions),
        late_total=meta.late,
        dead_total=meta.dead,
        commits_total=store.commits,
        transitions_total=books.transitions,
        syncs_total=store.syncs,
        runs=_runs(books),
        services=_services(books, now.boot),
    )


def _services(books: Books, now: float) -> dict[str, ServiceStats]:
    known = books.buckets()
    found = {}
    for name, limit in sorted(books.limits.services.items()):
        bucket = rates.moved(known.get(name) or rates.full(limit, now), limit, now)
        found[name] = ServiceStats(
            rate=bucket.rate,
            rate_max=limit.rate,
            waits_seconds=max(0.0, rates.due(bucket, limit, now) - now),
            lowered=bucket.lowered,
        )
    return found


def _runs(books: Books) -> dict[RunId, RunStats]:
    over_caps = Counter(books.parked_runs)
    for line, count in books.parked_caps.items():
        over_caps[line.run_id] += count
    parked = over_caps + books.parked_rollouts
    return {
        run: RunStats(
            queued=books.run_queued[run] - books.run_out[run],
            leased=books.run_out[run],
            parked=parked[run],
            over_caps=over_caps[run],
        )
        for run in sorted({*books.run_queued, *parked})
    }


def _age(books: Books, worker_class: str, now: Instant) -> float:
    """Return the age of the action that goes next: the oldest, where priorities are equal."""
    if not books.states[worker_class][ActionState.ACCEPTED]:
        return 0.0
    holders = [None, *(h for (cls, h), n in books.held.items() if cls == worker_class and n)]
    runs = [line.run_id for line in books.waiting if line.worker_class == worker_class]
    heads = [
        row
        for run in runs[:_LOOKS]
        for holder in holders[:_LOOKS]
        for suspect in (False, True)
        for row in books.store.queued(Queue(worker_class, run, holder, suspect), 1)
    ]
    return max((now.boot - row.accepted_boot for row in heads), default=0.0)
