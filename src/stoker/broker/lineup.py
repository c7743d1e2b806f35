"""Queued actions in memory, so that the head of a short queue need not be read from the store.

A line is held here *whole* or not at all: the books compare what is known of it with what they
count as queued, and ask the store where the two differ. What does not fit is simply not known, so a
backlog costs no memory (B13); a line is whole again once everything else of it has been handed out.
"""

from bisect import bisect_left, insort
from collections import Counter
from itertools import islice

from stoker.broker.recent import KEPT_MAX, ROW_BYTES_MAX
from stoker.broker.rows import Queue, Row
from stoker.model.ids import RunId

Place = tuple[int, int, Row]
"""Rank (minus priority), order of acceptance, row: unique by the first two."""


class Lineup:
    """Queued rows of whole lines, each queue in the order in which it is handed out."""

    def __init__(self) -> None:
        self._queues: dict[Queue, list[Place]] = {}
        self._known: Counter[tuple[str, RunId]] = Counter()
        self._total = 0

    def add(self, row: Row, waiting: int) -> bool:
        """Take a row that joins ``waiting`` others of its line, if all of them are known."""
        action = row.action
        line = (action.worker_class, action.run_id)
        if self._known[line] != waiting or self._total >= KEPT_MAX:
            return False
        if action.input.size_bytes > ROW_BYTES_MAX:
            return False
        places = self._queues.setdefault(row.queue, [])
        insort(places, (-action.priority, row.order, row))
        self._known[line] += 1
        self._total += 1
        return True

    def discard(self, row: Row) -> None:
        """Forget a row that is queued no more, or has changed; one that is not known stays so."""
        queue = row.queue
        places = self._queues.get(queue, [])
        at = bisect_left(places, (-row.action.priority, row.order))
        if at == len(places) or places[at][1] != row.order:
            return
        del places[at]
        if not places:
            del self._queues[queue]  # runs come and go
        self._total -= 1
        line = (queue.worker_class, queue.run_id)
        self._known[line] -= 1
        if not self._known[line]:
            del self._known[line]

    def head(self, queue: Queue, limit: int, waiting: int) -> list[Row] | None:
        """Return the head of a queue, or ``None``: not all ``waiting`` of its line are known."""
        if self._known[queue.worker_class, queue.run_id] != waiting:
            return None
        return [row for _, _, row in islice(self._queues.get(queue, ()), limit)]
