"""Which action goes to which worker, and when a parked one is let into the queue.

Caps (I6): over-cap submits are parked, in order; leasing pauses while unacknowledged results plus
leases fill the results' room, so that every lease has its result's slot. Nothing here is ever asked
by complete, cancel, release, expiry or acknowledge (B19).

Suspects (I5): a suspect goes alone to a worker with empty hands, and nothing else goes there while
it runs. One that has waited a lease's time makes one worker of its class drain for it, so that a
busy fleet cannot starve it.

A class that uses a remote service gets no more leases than the service's bucket has tokens
(``throttling``), suspects and tickets included.

Many runs share a ledger: free slots and places in the queue go to the run that has the fewest of
that worker class, so that a run with ten thousand queued actions does not starve another.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import NamedTuple

from stoker.broker.base import LeaseRequest
from stoker.broker.books import Books, WorkerRecord
from stoker.broker.core import leased, unparked
from stoker.broker.counts import ANY, Line
from stoker.broker.rows import ACCEPTED, Decision, ParkedOn, Queue, Row
from stoker.broker.throttling import UNBOUNDED, take_token, tokens
from stoker.model.ids import Fence, RunId
from stoker.seams.clock import Instant

_NOT_PARKED = ParkedOn.NOTHING


class Claim(NamedTuple):
    """What one run asks for of a worker class."""

    has: int
    """What it has already."""
    served: int
    """When it was last given something; the smaller, the longer ago."""
    most: int
    """More it cannot use."""


def parking(books: Books, line: Line, outstanding: int) -> ParkedOn:
    """Return what a new action must wait for, if anything."""
    if outstanding >= books.limits.outstanding_per_rollout_max:
        return ParkedOn.ROLLOUT
    if books.parked_runs.get(line.run_id) or _quota(books, line.run_id) <= 0:
        return ParkedOn.RUN
    parked = books.parked_caps
    crowded = parked and any(other.worker_class == line.worker_class for other in parked)
    if crowded or room(books, line.worker_class) <= 0:
        return ParkedOn.CAPS
    return _NOT_PARKED


def room(books: Books, worker_class: str) -> int:
    """Return how many more actions the queue of a class takes."""
    limits = books.limits
    return min(
        limits.queued_max - books.queued,
        limits.queued_per_class_max - books.class_queued(worker_class),
    )


def _quota(books: Books, run_id: RunId) -> int:
    """Return how many more actions a run may have queued or on their way there."""
    most = books.limits.queued_per_run_max
    if most is None:
        return UNBOUNDED
    coming = sum(count for line, count in books.parked_caps.items() if line.run_id == run_id)
    return most - books.run_queued[run_id] - coming


def unpark(books: Books) -> None:
    """Let parked actions in as far as there is room: a run's in order, runs in fair shares."""
    if not books.parked_rollouts:
        books.relieved.clear()
    if not books.relieved and not books.parked_runs and not books.parked_caps:
        return
    books.flush()
    outstanding = books.store.outstanding(list(books.relieved))
    for rollout in books.relieved:
        free = books.limits.outstanding_per_rollout_max - outstanding[rollout]
        for row in books.store.parked_of(rollout, max(0, free)):
            books.apply(row, Decision(unparked(row, ParkedOn.RUN)))
    books.relieved.clear()
    books.flush()
    for run in list(books.parked_runs):
        free = min(max(0, _quota(books, run)), books.parked_runs[run])
        for row in books.store.parked_run(run, free) if free else ():
            books.apply(row, Decision(unparked(row, ParkedOn.CAPS)))
    books.flush()
    claims = {
        line: Claim(books.waiting[line] + books.out[line], books.served.get(line.run_id, 0), parked)
        for line, parked in books.parked_caps.items()
    }
    rooms = {line.worker_class: max(0, room(books, line.worker_class)) for line in claims}
    for line, count in shares(books.limits.queued_max - books.queued, claims, rooms).items():
        for row in books.store.parked(line.worker_class, line.run_id, count):
            books.apply(row, Decision(unparked(row, ParkedOn.NOTHING)))


def hand_out(books: Books, worker: WorkerRecord, slots: dict[str, int], now: Instant) -> list[Row]:
    """Lease what ``worker`` may have now, at most its free slots."""
    free = books.results_room()
    if free <= 0 or books.runs_alone(worker):
        return []
    by_ticket = books.limits.ticket_classes
    wanted = {
        cls: n
        for cls, n in slots.items()
        if n > 0
        and cls not in by_ticket
        and _queued_for(books, worker, cls)
        and tokens(books, cls, now) > 0
    }
    if not wanted:
        return []
    suspect = _oldest_suspect(books, worker, wanted)
    if suspect is not None:
        if not books.in_hands(worker):
            return [_give(books, worker, suspect, alone=True, now=now)]
        if _drains(books, worker, suspect, now):
            return []
    given: list[Row] = []
    for cls, count in wanted.items():
        most = min(count, free - len(given), tokens(books, cls, now))
        heads = _heads(books, worker, cls, most)
        given += [_give(books, worker, row, alone=False, now=now) for row in heads]
    return given


def hand_out_tickets(
    books: Books, worker: WorkerRecord, request: LeaseRequest, now: Instant
) -> list[Row]:
    """Lease exactly these actions, as far as they are queued and this worker may run them."""
    classes = request.slots
    given: list[Row] = []
    for row in books.rows(request.action_ids).values():
        if classes and row.action.worker_class not in classes:
            continue
        alone = row.suspect
        mine = row.action.holder in (None, worker.enlisted.worker_id)
        if row.state is not ACCEPTED or not mine or books.results_room() <= 0:
            continue
        if _lease_quota(books, row.action.run_id) <= 0:
            continue
        if (alone and books.in_hands(worker)) or books.runs_alone(worker):
            continue
        if tokens(books, row.action.worker_class, now) <= 0:
            continue
        given.append(_give(books, worker, row, alone=alone, now=now))
    return given


def _lease_quota(books: Books, run_id: RunId) -> int:
    """Return how many more actions of a run may be in workers' hands."""
    most = books.limits.leased_per_run_max
    return UNBOUNDED if most is None else most - books.run_out[run_id]


def _queued_for(books: Books, worker: WorkerRecord, worker_class: str) -> bool:
    queued = books.states[worker_class][ACCEPTED]
    if not queued:
        return False
    mine = books.held[worker_class, worker.enlisted.worker_id]
    return mine > 0 or queued > books.held[worker_class, ANY]


def _oldest_suspect(books: Books, worker: WorkerRecord, slots: dict[str, int]) -> Row | None:
    holders = (None, worker.enlisted.worker_id)
    found = [
        row
        for cls, run in books.waiting
        if books.suspects[cls] > 0 and cls in slots and _lease_quota(books, run) > 0
        for holder in holders
        for row in books.head_of(Queue(cls, run, holder, suspect=True), 1)
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
    """Return what goes next to ``worker``: runs in fair shares, each by priority and order."""
    claims = {
        line: Claim(
            books.out[line],
            books.served.get(line.run_id, 0),
            min(waiting, max(0, _lease_quota(books, line.run_id))),
        )
        for line, waiting in books.waiting.items()
        if line.worker_class == worker_class
    }
    while True:
        given = shares(count, claims, {worker_class: count})
        found = {line: _heads_of(books, worker, line, most) for line, most in given.items()}
        short = {line: len(rows) for line, rows in found.items() if len(rows) < given[line]}
        if not short:
            return [row for rows in found.values() for row in rows]
        for line, most in short.items():  # what else it has queued is for other workers
            claims[line] = claims[line]._replace(most=most)


def _heads_of(books: Books, worker: WorkerRecord, line: Line, count: int) -> list[Row]:
    own = worker.enlisted.worker_id
    queue = Queue(line.worker_class, line.run_id, None, suspect=False)
    anybody = books.head_of(queue, count)
    if not books.held[line.worker_class, own]:
        return anybody
    mine = books.head_of(queue._replace(holder=own), count)
    both = merge(mine, anybody, key=lambda row: (-row.action.priority, row.order))
    return list(islice(both, count))


def shares(total: int, claims: Mapping[Line, Claim], rooms: Mapping[str, int]) -> dict[Line, int]:
    """Divide ``total`` places among ``claims``: one after the other to whom has the least.

    Max-min fairness: nobody gets more while somebody with less still asks. Who was served longest
    ago wins a tie. ``rooms``: places of each worker class, at most.
    """
    given: dict[Line, int] = {}
    left = dict(rooms)
    order = [(claim.has, claim.served, line) for line, claim in claims.items() if claim.most > 0]
    heapify(order)
    while order and total > 0:
        has, served, line = heappop(order)
        if left[line.worker_class] <= 0:
            continue
        wanted = min(total, left[line.worker_class], claims[line].most - given.get(line, 0))
        take = 1 if order else wanted
        given[line] = given.get(line, 0) + take
        left[line.worker_class] -= take
        total -= take
        if take < wanted:
            heappush(order, (has + 1, served, line))
    return given


def _give(books: Books, worker: WorkerRecord, row: Row, *, alone: bool, now: Instant) -> Row:
    fence = Fence(books.draw())
    books.serve(row.action.run_id, fence)
    given = leased(row, worker=worker.enlisted.worker_id, fence=fence, alone=alone, now=now)
    books.apply(row, Decision(given))
    books.hand(given, now.boot)
    take_token(books, row.action.worker_class, now)
    books.meta.deliveries += 1
    return given
