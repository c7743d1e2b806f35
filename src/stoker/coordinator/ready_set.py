"""The ready set: model calls that could be issued now, in order, each waiting for room.

Smaller ``order`` first, first come first served among equals. A call that is withdrawn leaves at
once from every count; its place in the heap is swept later.
"""

import asyncio
import heapq

from stoker.model.ids import RolloutId


class ReadyCall:
    """One call that waits for room."""

    __slots__ = (
        "avoid",
        "granted",
        "history",
        "number",
        "order",
        "rollout",
        "shelf",
        "since",
        "tokens",
        "waits",
    )

    def __init__(
        self,
        *,
        order: tuple[float, ...],
        rollout: RolloutId,
        since: float,
        avoid: int | None = None,
        history: str = "",
        tokens: int = 0,
    ) -> None:
        self.order = order
        self.rollout = rollout
        self.avoid = avoid
        """Replica that just failed it."""
        self.since = since
        self.history = history
        """Whose context it goes on with."""
        self.tokens = tokens
        """Of its prompt, as far as known."""
        self.number = 0
        self.waits = True
        self.shelf: ReadySet | None = None
        """The set it waits in."""
        self.granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Index of the replica whose room it was given."""


class ReadySet:
    """Ready calls, smallest order first."""

    _SWEEP = 64
    """Withdrawn calls are swept when they are this many and more than those that wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, ReadyCall]] = []
        self._count = 0
        self._number = 0

    def __len__(self) -> int:
        return self._count

    def add(self, call: ReadyCall) -> None:
        """Put ``call`` behind its equals."""
        call.waits = True
        call.shelf = self
        self._number += 1
        call.number = self._number
        self._count += 1
        heapq.heappush(self._heap, (call.order, call.number, call))

    def pop(self) -> ReadyCall | None:
        """Remove and return the first call that still waits."""
        while self._heap:
            call = heapq.heappop(self._heap)[2]
            if self.remove(call):
                return call
        return None

    def first(self) -> ReadyCall | None:
        """Return the first call that still waits, without removing it."""
        while self._heap and not self._alive(self._heap[0][2]):
            self.remove(heapq.heappop(self._heap)[2])
        return self._heap[0][2] if self._heap else None

    def remove(self, call: ReadyCall) -> bool:
        """Stop counting ``call``; return whether it was still to be given room."""
        alive = self._alive(call)
        if call.waits:
            call.waits = False
            self._count -= 1
            if len(self._heap) > self._SWEEP + 2 * self._count:
                self._heap = [entry for entry in self._heap if entry[2].waits]
                heapq.heapify(self._heap)
        return alive

    def waiting_since(self, before: float) -> list[ReadyCall]:
        """Return calls that wait since ``before`` or longer; looks at each of them."""
        return [
            entry[2] for entry in self._heap if self._alive(entry[2]) and entry[2].since <= before
        ]

    @staticmethod
    def _alive(call: ReadyCall) -> bool:
        return call.waits and not call.granted.done()
