"""The shipped fake: all tables in dictionaries, transactions by an undo list.

Nothing survives the process. The same contract suite runs on it and on SQLite; the simulator runs
on it, since it touches no disk.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.broker.operating import AuditEntry
from stoker.broker.rows import WAITING, ParkedOn, Queue, Row
from stoker.broker.store import Counted, Enlisted, Entry, Head, Meta, Owner, Told
from stoker.errors import LedgerRefused
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId
from stoker.seams.clock import Instant

K = TypeVar("K")
V = TypeVar("V")
_PASSING = frozenset({LedgerEventKind.REQUEUED, LedgerEventKind.RECLAIMED})


class MemoryStore:
    """A store in this process."""

    engine = "memory"

    def __init__(self) -> None:
        self.commits = 0
        self.syncs = 0
        self._meta: Meta | None = None
        self._rows: dict[ActionId, Row] = {}
        self._by_rollout: defaultdict[RolloutId, list[ActionId]] = defaultdict(list)
        self._queues: defaultdict[tuple[object, ...], list[tuple[float, int, ActionId]]] = (
            defaultdict(list)
        )
        self._events: dict[int, Told] = {}
        self._heads: dict[tuple[RunId, RolloutId], Head] = {}
        self._entries: defaultdict[int, list[bytes]] = defaultdict(list)
        self._owners: dict[tuple[RunId, str], Owner] = {}
        self._workers: dict[WorkerId, Enlisted] = {}
        self._audit: list[AuditEntry] = []
        self._undo: list[Callable[[], object]] = []

    def meta(self) -> Meta | None:
        """Return a copy of the ledger's own record."""
        return None if self._meta is None else replace(self._meta)

    def put_meta(self, meta: Meta) -> None:
        """Write the ledger's own record."""
        self._undo.append(partial(setattr, self, "_meta", self._meta))
        self._meta = msgspec.convert(msgspec.to_builtins(meta), Meta)

    def begin(self) -> None:
        """Open a transaction."""
        assert not self._undo, "a transaction is open"

    def commit(self, *, sync: bool) -> None:
        """Keep what was written."""
        self._undo.clear()
        self.commits += 1
        self.syncs += sync

    def rollback(self) -> None:
        """Undo what was written since ``begin``."""
        while self._undo:
            self._undo.pop()()
        self._undo.clear()

    def close(self) -> None:
        """Nothing to let go of."""

    # --- actions

    def insert(self, rows: Sequence[Row]) -> None:
        """Add new rows."""
        for row in rows:
            assert row.action_id not in self._rows, f"{row.action_id} inserted twice"
            of_rollout = self._by_rollout[row.action.rollout_id]
            of_rollout.append(row.action_id)
            self._undo.append(of_rollout.pop)
            self._put(row)

    def update(self, rows: Sequence[Row]) -> None:
        """Write changed rows."""
        for row in rows:
            self._put(row)

    lease = start = complete = acknowledge = update

    def settle(self, rows: Sequence[Row]) -> None:
        """Results are part of the rows here."""

    def bury(self, rows: Sequence[Row]) -> None:
        """Drop the told events of acknowledged rows; dead letters keep their result."""
        self.forget_late([row.order for row in rows])

    def _put(self, row: Row) -> None:
        old = self._rows.get(row.action_id)
        if old is not None and row.settled_status is CompletionStatus.DEAD and not row.completion:
            row = replace(row, completion=old.completion)
        self._swap(row.action_id, old, row)
        self._undo.append(lambda: self._swap(row.action_id, row, old))

    def _swap(self, action_id: ActionId, old: Row | None, new: Row | None) -> None:
        for key, place in _places(old):
            del self._queues[key][bisect_left(self._queues[key], place)]
        for key, place in _places(new):
            insort(self._queues[key], place)
        if new is None:
            del self._rows[action_id]
        else:
            self._rows[action_id] = new

    def rows(self, ids: Iterable[ActionId]) -> list[Row]:
        """Return the rows of known ids."""
        return [row for i in ids if (row := self._rows.get(i)) is not None]

    def rollout_rows(self, rollout: RolloutId) -> list[Row]:
        """Return every row of a rollout."""
        return self.rows(self._by_rollout.get(rollout, ()))

    def unfinished(self, rollout: RolloutId) -> list[Row]:
        """Return the rows of a rollout that have no result yet."""
        return [row for row in self.rollout_rows(rollout) if not row.terminal]

    def outstanding(self, rollouts: Sequence[RolloutId]) -> dict[RolloutId, int]:
        """Count unfinished rows of each rollout, less those parked for its own cap."""
        own = ParkedOn.ROLLOUT
        return {r: sum(row.parked_on is not own for row in self.unfinished(r)) for r in rollouts}

    def _slice(self, key: tuple[object, ...], limit: int) -> list[Row]:
        return [self._rows[place[2]] for place in islice(self._queues.get(key, ()), limit)]

    def queued(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue."""
        return self._slice(("queue", *queue), limit)

    def parked(self, worker_class: str, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows of a class that are parked for the caps."""
        return self._slice(("parked", worker_class, run_id), limit)

    def parked_run(self, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows that are parked for its quota."""
        return self._slice(("parked_run", run_id), limit)

    def parked_of(self, rollout: RolloutId, limit: int) -> list[Row]:
        """Return the earliest rows that are parked for their rollout's cap."""
        return self._slice(("parked_of", rollout), limit)

    def held_by(self, worker: WorkerId) -> list[Row]:
        """Return waiting rows that only ``worker`` may run."""
        places = self._queues.get(("held", worker), ())
        return [self._rows[place[2]] for place in places]

    def due(self, before: float, limit: int) -> list[Row]:
        """Return unfinished rows whose time is up."""
        places = self._queues.get(("due",), [])
        end = bisect_right(places, before, key=lambda place: place[0])
        return [self._rows[place[2]] for place in places[: min(end, limit)]]

    def next_due(self) -> float | None:
        """Return the earliest time at which a row is due."""
        places = self._queues.get(("due",))
        return places[0][0] if places else None

    def in_hands(self) -> list[Row]:
        """Return rows that are leased, started, or not yet reclaimed."""
        return [row for row in self._rows.values() if row.bearer is not None]

    def counts(self) -> list[Counted]:
        """Count unfinished rows."""
        return [
            Counted(row.queue, row.state, row.parked_on, 1)
            for row in self._rows.values()
            if not row.terminal
        ]

    def results(self) -> int:
        """Count results that are not acknowledged."""
        return sum(row.state is ActionState.COMPLETED for row in self._rows.values())

    def dead(self, run_id: RunId) -> list[Row]:
        """Return a run's dead letters."""
        return [
            row
            for row in self._rows.values()
            if row.settled_status is CompletionStatus.DEAD
            and row.action.run_id == run_id
            and row.completion is not None
        ]

    def revive(self, rows: Sequence[Row]) -> None:
        """Give rows new times; told events go."""
        for row in rows:
            self._put(row)
        self.forget_late([row.order for row in rows])

    def drop_dead(self, rows: Sequence[Row]) -> None:
        """Drop the results that dead letters keep."""
        for row in rows:
            kept = self._rows[row.action_id]
            bare = replace(kept, completion=None)
            self._swap(row.action_id, kept, bare)
            self._undo.append(partial(self._swap, row.action_id, bare, kept))

    def unsettled(self, after: int, limit: int) -> list[Row]:
        """Return rows that have no result or are not reclaimed."""
        found = (r for r in self._rows.values() if not r.terminal or r.reclaim_fence)
        return sorted((r for r in found if r.order > after), key=lambda r: r.order)[:limit]

    def rebase(self, now: Instant) -> None:
        """Move stored instants to this boot's clock."""
        for row in list(self._rows.values()):
            left = min(max(row.deadline_wall - now.wall, 0.0), row.action.deadline_seconds)
            waited = max(0.0, now.wall - row.accepted_wall)
            deadline = now.boot + left
            self._put(
                replace(
                    row,
                    deadline_boot=deadline,
                    due_boot=deadline,
                    accepted_boot=now.boot - waited,
                )
            )

    def defer(self, until: float) -> None:
        """Let no started row be due before ``until``."""
        for row in list(self._rows.values()):
            if row.state is ActionState.STARTED and row.due_boot < until:
                self._put(replace(row, due_boot=until))

    # --- events

    def tell(self, events: Sequence[Told]) -> None:
        """Add events."""
        for told in events:
            self._events[told.event_id] = told
            self._undo.append(partial(self._untell, told.event_id))

    def _untell(self, event_id: int) -> None:
        del self._events[event_id]

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return events in order."""
        found = (
            told
            for told in self._events.values()
            if told.event_id > after and (told.run_id, told.partition) == (run_id, partition)
        )
        return [self._event(told) for told in islice(found, limit)]

    def _event(self, told: Told) -> LedgerEvent:
        completion = told.completion
        if told.kind is LedgerEventKind.COMPLETED:
            completion = self._rows[told.action_id].completion
        return LedgerEvent(
            event_id=told.event_id,
            kind=told.kind,
            action_id=told.action_id,
            rollout_id=told.rollout_id,
            completion=completion,
            detail=told.detail,
        )

    def forget_passed(self, run_id: RunId, partition: str, upto: int) -> None:
        """Drop requeued and reclaimed events that the coordinator has seen."""
        self._drop(
            lambda told: (
                told.kind in _PASSING
                and told.event_id <= upto
                and (told.run_id, told.partition) == (run_id, partition)
            )
        )

    def forget_late(self, ids: Sequence[int]) -> None:
        """Drop the events of these actions."""
        orders = set(ids)
        self._drop(lambda told: told.order in orders)

    def _drop(self, wanted: Callable[[Told], bool]) -> None:
        before = self._events
        self._undo.append(lambda: setattr(self, "_events", before))
        self._events = {i: told for i, told in before.items() if not wanted(told)}

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal."""
        return self._heads.get((run_id, rollout))

    def ends(self, run_id: RunId, rollouts: Sequence[RolloutId]) -> list[Head]:
        """Return the ends of these rollouts' journals, of those that have begun."""
        return [head for r in rollouts if (head := self.head(run_id, r)) is not None]

    def put_heads(self, heads: Sequence[Head]) -> None:
        """Write journal ends."""
        for head in heads:
            _set(self._heads, (head.run_id, head.rollout_id), head, self._undo)

    def heads(self, run_id: RunId, after: RolloutId | None, limit: int) -> list[Head]:
        """Return a run's rollouts in order of admission."""
        start = self._heads[run_id, after].key if after and (run_id, after) in self._heads else 0
        found = (h for h in self._heads.values() if h.run_id == run_id and h.key > start)
        return sorted(found)[:limit]

    def write(self, entries: Sequence[Entry]) -> None:
        """Add journal entries."""
        for entry in entries:
            journal = self._entries[entry.head]
            assert len(journal) == entry.seq, "a journal has no holes"
            journal.append(entry.event)
            self._undo.append(journal.pop)

    def entries(self, head: int, *, after: int, limit: int) -> list[bytes]:
        """Return journal entries from position ``after`` on."""
        return self._entries[head][after : after + limit]

    # --- owners and workers

    def owner(self, run_id: RunId, partition: str) -> Owner | None:
        """Return who owns a partition."""
        return self._owners.get((run_id, partition))

    def put_owner(self, owner: Owner) -> None:
        """Write who owns a partition."""
        _set(self._owners, (owner.run_id, owner.partition), owner, self._undo)

    def owners(self) -> list[Owner]:
        """Return who owns every partition."""
        return list(self._owners.values())

    def workers(self) -> list[Enlisted]:
        """Return every known worker incarnation."""
        return list(self._workers.values())

    def put_workers(self, workers: Sequence[Enlisted]) -> None:
        """Write worker incarnations."""
        for worker in workers:
            _set(self._workers, worker.worker_id, worker, self._undo)

    # --- operators

    def note(self, entry: AuditEntry) -> None:
        """Write down what an operator did."""
        self._audit.append(entry)
        self._undo.append(self._audit.pop)

    def audit(self, run_id: RunId) -> list[AuditEntry]:
        """Return what operators did."""
        return [entry for entry in self._audit if entry.run_id in (None, run_id)]

    def copy_to(self, path: str, pages: int) -> tuple[int, int]:
        """Refuse: there is no file."""
        del path, pages
        raise LedgerRefused("a ledger in memory has no file to copy")

    def compact(self) -> tuple[int, int]:
        """Refuse: there is no file."""
        raise LedgerRefused("a ledger in memory has no file to compact")


def _places(row: Row | None) -> list[tuple[tuple[object, ...], tuple[float, int, ActionId]]]:
    """Return every index a row stands in, and where."""
    if row is None or row.terminal:
        return []
    action, plain = row.action, (0.0, row.order, row.action_id)
    found: list[tuple[tuple[object, ...], tuple[float, int, ActionId]]] = [
        (("due",), (row.due_boot, row.order, row.action_id))
    ]
    if row.state is ActionState.ACCEPTED:
        found.append((("queue", *row.queue), (-action.priority, row.order, row.action_id)))
    elif row.parked_on is ParkedOn.CAPS:
        found.append((("parked", action.worker_class, action.run_id), plain))
    elif row.parked_on is ParkedOn.RUN:
        found.append((("parked_run", action.run_id), plain))
    elif row.parked_on is ParkedOn.ROLLOUT:
        found.append((("parked_of", action.rollout_id), plain))
    if action.holder is not None and row.state in WAITING:
        found.append((("held", action.holder), plain))
    return found


def _set(table: dict[K, V], key: K, value: V, undo: list[Callable[[], object]]) -> None:
    if key in table:
        undo.append(partial(table.__setitem__, key, table[key]))
    else:
        undo.append(lambda: table.pop(key))
    table[key] = value
