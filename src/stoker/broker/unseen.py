"""Events in memory that their coordinator has not asked past yet: most are asked for at once.

Of each partition everything after its *floor* is here; who asks from below the floor is answered
from the store. What the store drops is dropped here too, so both always tell the same.
"""

from itertools import islice

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.broker.recent import ROW_BYTES_MAX
from stoker.broker.store import Told
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, RunId

Partition = tuple[RunId, str]

KEPT_MAX = 2048
"""Events of one partition; a coordinator that hears less than it is told asks the store."""
_PARTITIONS_MAX = 64
_PASSING = frozenset({LedgerEventKind.REQUEUED, LedgerEventKind.RECLAIMED})


class Unseen:
    """The newest events of some partitions."""

    def __init__(self) -> None:
        self._floors: dict[Partition, int] = {}
        self._events: dict[Partition, dict[int, LedgerEvent]] = {}
        self._of: dict[ActionId, list[tuple[Partition, int]]] = {}
        """Whose events they are."""
        self._calm: set[Partition] = set()

    def watch(self, partition: Partition, newest: int) -> None:
        """Keep what is told to a partition after the event ``newest``; none after it exists."""
        if partition in self._floors:
            return
        if len(self._floors) >= _PARTITIONS_MAX:
            for known in (self._floors, self._events, self._of, self._calm):
                known.clear()
        self._floors[partition] = newest
        self._events[partition] = {}

    def add(self, told: Told, completion: Completion | None) -> None:
        """Take a new event, with the result it tells of."""
        partition = (told.run_id, told.partition)
        if told.kind in _PASSING:
            self._calm.discard(partition)
        events = self._events.get(partition)
        if events is None:
            return
        observation = completion.observation if completion is not None else None
        large = observation is not None and observation.size_bytes > ROW_BYTES_MAX
        if large or len(events) >= KEPT_MAX:
            self._drop(partition, list(events))
            del self._events[partition], self._floors[partition]
            return
        self._of.setdefault(told.action_id, []).append((partition, told.event_id))
        events[told.event_id] = LedgerEvent(
            event_id=told.event_id,
            kind=told.kind,
            action_id=told.action_id,
            rollout_id=told.rollout_id,
            completion=completion,
            detail=told.detail,
        )

    def after(self, partition: Partition, after: int, limit: int) -> list[LedgerEvent] | None:
        """Return the events after ``after``, which is now the floor; ``None``: ask the store."""
        if after < self._floors.get(partition, after + 1):
            return None
        events = self._events[partition]
        self._drop(partition, [event_id for event_id in events if event_id <= after])
        self._floors[partition] = after
        return list(islice(events.values(), limit))

    def calm(self, partition: Partition) -> bool:
        """Whether the store has no event of a partition that goes once it was passed."""
        return partition in self._calm

    def passed(self, partition: Partition, upto: int) -> None:
        """Note that the store has dropped what goes up to ``upto``."""
        events = self._events.get(partition, {})
        known = self._floors.get(partition, upto + 1) <= upto
        if known and all(event.kind not in _PASSING for event in events.values()):
            self._calm.add(partition)

    def bury(self, action_id: ActionId) -> None:
        """Forget the events of an action."""
        for partition, event_id in self._of.pop(action_id, ()):
            self._events[partition].pop(event_id, None)

    def _drop(self, partition: Partition, ids: list[int]) -> None:
        events = self._events[partition]
        for event_id in ids:
            action_id = events.pop(event_id).action_id
            places = self._of[action_id]
            places.remove((partition, event_id))
            if not places:
                del self._of[action_id]
