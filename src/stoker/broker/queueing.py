"""Which action goes to which worker, and when a parked one is let into the queue.

Caps (I6): over-cap submits are parked, in order; leasing pauses while unacknowledged results plus
leases fill the results' room, so that every lease has its result's slot. Nothing here is ever asked
by complete, cancel, release, expiry or acknowledge (B19).

Suspects (I5): a suspect goes alone to a worker with empty hands, and nothing else goes there while
it runs. One that has waited a lease's time makes one worker of its class drain for it, so that a
busy fleet cannot starve it.
"""

from heapq import merge
from itertools import islice

from stoker.broker.books import Books, WorkerRecord
from stoker.broker.core import leased, unparked
from stoker.broker.rows import Decision, ParkedOn, Row
from stoker.model.action import ActionState
from stoker.model.ids import ActionId, Fence
from stoker.seams.clock import Instant


def parking(books: Books, worker_class: str, outstanding: int) -> ParkedOn:
    """Return what a new action of a class must wait for, if anything."""
    if outstanding >= books.limits.outstanding_per_rollout_max:
        return ParkedOn.ROLLOUT
    if books.parked_caps[worker_class] or room(books, worker_class) <= 0:
        return ParkedOn.CAPS
    return ParkedOn.NOTHING


def room(books: Books, worker_class: str) -> int:
    """Return how many more actions the queue of a class takes."""
    limits = books.limits
    return min(
        limits.queued_max - books.queued,
        limits.queued_per_class_max - books.class_queued(worker_class),
    )


def unpark(books: Books) -> None:
    """Let parked actions in, in order, as far as there is room."""
    if not books.parked_rollouts:
        books.relieved.clear()
    if not books.relieved and not books.parked_caps.total():
        return
    books.flush()
    for rollout in books.relieved:
        free = books.limits.outstanding_per_rollout_max - books.store.outstanding(rollout)
        for row in books.store.parked_of(rollout, max(0, free)):
            books.apply(row, Decision(unparked(row, ParkedOn.CAPS)))
    books.relieved.clear()
    books.flush()
    heads = [
        books.store.parked(worker_class, free)
        for worker_class, count in list(books.parked_caps.items())
        if count and (free := room(books, worker_class)) > 0
    ]
    total = max(0, books.limits.queued_max - books.queued)
    for row in islice(merge(*heads, key=lambda row: row.order), total):
        books.apply(row, Decision(unparked(row, ParkedOn.NOTHING)))


def hand_out(books: Books, worker: WorkerRecord, slots: dict[str, int], now: Instant) -> list[Row]:
    """Lease what ``worker`` may have now, at most its free slots."""
    free = _results_room(books)
    if free <= 0 or any(row.alone for row in books.in_hands(worker)):
        return []
    wanted = {cls: n for cls, n in slots.items() if n > 0 and _queued_for(books, worker, cls)}
    if not wanted:
        return []
    books.flush()
    suspect = _oldest_suspect(books, worker, wanted)
    if suspect is not None:
        if not worker.named:
            return [_give(books, worker, suspect, alone=True, now=now)]
        if _drains(books, worker, suspect, now):
            return []
    chosen: list[Row] = []
    for cls, count in wanted.items():
        chosen += _heads(books, worker, cls, min(count, free - len(chosen)))
    return [_give(books, worker, row, alone=False, now=now) for row in chosen]


def hand_out_tickets(
    books: Books, worker: WorkerRecord, ids: tuple[ActionId, ...], now: Instant
) -> list[Row]:
    """Lease exactly these actions, as far as they are queued and this worker may run them."""
    given: list[Row] = []
    for row in books.rows(ids).values():
        alone = row.suspect
        mine = row.action.holder in (None, worker.enlisted.worker_id)
        if row.state is not ActionState.ACCEPTED or not mine or _results_room(books) <= 0:
            continue
        if (alone and worker.named) or any(held.alone for held in books.in_hands(worker)):
            continue
        given.append(_give(books, worker, row, alone=alone, now=now))
    return given


def _results_room(books: Books) -> int:
    return books.limits.results_max - books.results - books.busy


def _queued_for(books: Books, worker: WorkerRecord, worker_class: str) -> bool:
    queued = books.states[worker_class][ActionState.ACCEPTED]
    if not queued:
        return False
    mine = books.held[worker_class, worker.enlisted.worker_id]
    others = sum(
        count
        for (cls, holder), count in books.held.items()
        if cls == worker_class and holder != worker.enlisted.worker_id
    )
    return mine > 0 or queued > others


def _oldest_suspect(books: Books, worker: WorkerRecord, slots: dict[str, int]) -> Row | None:
    holders = (None, worker.enlisted.worker_id)
    found = [
        row
        for cls in slots
        if books.suspects[cls] > 0
        for holder in holders
        for row in books.store.queued(cls, holder, suspect=True, limit=1)
    ]
    return min(found, key=lambda row: row.order, default=None)


def _drains(books: Books, worker: WorkerRecord, suspect: Row, now: Instant) -> bool:
    """Return whether ``worker`` is to empty its hands for ``suspect``: the first in name does."""
    if now.boot - suspect.accepted_boot - suspect.queue_seconds < books.limits.lease_seconds:
        return False
    cls = suspect.action.worker_class
    able = [
        i
        for i, record in books.workers.items()
        if not record.dead and record.enlisted.slots.get(cls, 0) > 0
    ]
    return not able or min(able) == worker.enlisted.worker_id


def _heads(books: Books, worker: WorkerRecord, worker_class: str, count: int) -> list[Row]:
    if count <= 0:
        return []
    own = worker.enlisted.worker_id
    anybody = books.store.queued(worker_class, None, suspect=False, limit=count)
    if not books.held[worker_class, own]:
        return anybody
    mine = books.store.queued(worker_class, own, suspect=False, limit=count)
    both = merge(mine, anybody, key=lambda row: (-row.action.priority, row.order))
    return list(islice(both, count))


def _give(books: Books, worker: WorkerRecord, row: Row, *, alone: bool, now: Instant) -> Row:
    fence = Fence(books.draw())
    given = leased(row, worker=worker.enlisted.worker_id, fence=fence, alone=alone, now=now)
    books.apply(row, Decision(given))
    books.hand(given, now.boot)
    books.meta.deliveries += 1
    return given
