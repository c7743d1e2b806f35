"""What time does to the ledger: silent workers are lost, overdue actions end.

A worker is *lost* when nothing was heard of it for one lease; everything in its hands is decided at
once, so that a poison among many can be told apart (I5). A single lease is lost when its worker
goes on living and has not named it for a lease's time (its delivery never arrived).

Only the boot clock counts here (B11), and for a while after a reopening no lease expires.
Callers drain their sockets first, so that a sign of life is never overtaken by its absence.
"""

from heapq import heappop, heappush

from stoker.broker.base import Held, HoldVerdict
from stoker.broker.books import Books, WorkerRecord
from stoker.broker.core import expire, hold_verdict, reclaimed
from stoker.broker.loss import environment_lost, lose
from stoker.broker.rows import Row
from stoker.model.action import ActionState
from stoker.model.ids import WorkerId
from stoker.seams.clock import Instant

_DUE_BATCH = 1000


class Expiry:
    """Watches deadlines and silence."""

    def __init__(self, books: Books, calm_until: float) -> None:
        self._books = books
        self._calm_until = calm_until
        """Boot clock: no lease expires before."""
        self._watch: list[tuple[float, WorkerId]] = []

    def tick(self, now: Instant) -> None:
        """End and lose whatever is due at ``now``."""
        self._watch_new()
        while self._watch and self._watch[0][0] <= now.boot:
            _, worker_id = heappop(self._watch)
            record = self._books.workers[worker_id]
            if record.dead:
                continue
            silent_at = self._silent_at(record)
            if silent_at > now.boot:
                heappush(self._watch, (silent_at, worker_id))
            else:
                self.lose_worker(
                    record, f"its worker was silent for {now.boot - record.seen:.1f} s"
                )
        while (due := self._books.next_due) is not None and due <= now.boot:
            self._end_due(now)

    def next_wake(self) -> float | None:
        """Return the boot time at which ``tick`` has something to do."""
        self._watch_new()  # a poll may have been a lost worker's first sign of life
        due = self._books.next_due
        watch = self._watch[0][0] if self._watch else None
        return min((t for t in (due, watch) if t is not None), default=None)

    def _silent_at(self, record: WorkerRecord) -> float:
        return max(record.seen + self._books.limits.lease_seconds, self._calm_until)

    def _watch_new(self) -> None:
        for worker_id in self._books.unwatched:
            heappush(self._watch, (self._silent_at(self._books.workers[worker_id]), worker_id))
        self._books.unwatched.clear()

    def _end_due(self, now: Instant) -> None:
        books = self._books
        books.flush()
        for row in books.current(books.store.due(now.boot, _DUE_BATCH)):
            books.apply(row, expire(row))
        books.flush()
        books.next_due = books.store.next_due()

    def hear(self, worker_id: WorkerId, now: Instant) -> WorkerRecord:
        """Take a sign of life."""
        record = self._books.worker(worker_id, now.boot)
        record.seen = now.boot
        if record.lost and not record.enlisted.ended:
            record.lost = False
            self._books.unwatched.append(worker_id)
        return record

    def lose_unnamed(self, record: WorkerRecord, held: tuple[Held, ...], now: Instant) -> None:
        """Lose the leases that a living worker has not named for a lease's time."""
        named = {one.action_id: one.fence for one in held}
        patience = self._books.limits.lease_seconds
        for row in self._books.in_hands(record):
            fence = row.fence or row.reclaim_fence
            if named.get(row.action_id) == fence:
                record.named[row.action_id] = now.boot
            elif (
                now.boot - record.named[row.action_id] >= patience and now.boot >= self._calm_until
            ):
                self._let_go(row, "its worker no longer names it", crowd=False, worker_gone=False)

    def lose_worker(self, record: WorkerRecord, why: str, *, ended: bool = False) -> None:
        """Decide everything that was in a lost incarnation's hands, and what waited for it."""
        books = self._books
        record.lost = True
        if ended:
            record.enlisted = record.enlisted._replace(ended=True)
            books.store.put_workers([record.enlisted])
        rows = books.in_hands(record)
        crowd = sum(row.state is ActionState.STARTED for row in rows) > 1
        for row in rows:
            self._let_go(row, why, crowd=crowd, worker_gone=True)
        books.flush()
        for row in books.current(books.store.held_by(record.enlisted.worker_id)):
            books.apply(row, environment_lost(row))

    def _let_go(self, row: Row, why: str, *, crowd: bool, worker_gone: bool) -> None:
        if row.live:
            decision = lose(row, why, crowd=crowd, worker_gone=worker_gone)
            self._books.apply(row, decision)
        else:
            self._books.apply(row, reclaimed(row, why))


def verdicts(books: Books, held: tuple[Held, ...]) -> tuple[HoldVerdict, ...]:
    """Return whether each lease still stands."""
    rows = books.rows([one.action_id for one in held])
    return tuple(hold_verdict(rows.get(one.action_id), one.fence) for one in held)
