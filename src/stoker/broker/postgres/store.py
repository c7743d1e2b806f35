"""The PostgreSQL store: one connection, one transaction per group, whole columns per statement.

What other engines keep in memory lies in rows here, since other gateways change it too: every row
that a group decides about is locked first (``statements.sql`` has the order of locks), or taken for
granted and checked as it is written (``trust``). Locks answer with a row's version, and only a row
that somebody else has changed is read again.
A lost connection is ``StorageLost``: the group may or may not have been committed, so nobody is
answered.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from stoker.broker.base import EventsRequest, LedgerEvent, LedgerEventKind
from stoker.broker.books import COUNTER_BITS
from stoker.broker.operating import AuditEntry
from stoker.broker.postgres.arrays import Ints, Texts, columns
from stoker.broker.postgres.connection import Db, partition_key
from stoker.broker.postgres.session import HOT, HOT_KINDS, MUTABLE_KINDS
from stoker.broker.postgres.trust import TrustingSession
from stoker.broker.postgres.wire import Result
from stoker.broker.rows import Queue, Row
from stoker.broker.store import (
    Counted,
    Enlisted,
    Entry,
    Head,
    Meta,
    Owner,
    Told,
)
from stoker.broker.store_sqlite_rows import (
    STATES,
    decode_completion,
    decode_row,
    encode,
    has_history,
    hot_columns,
    mutable_columns,
)
from stoker.errors import LedgerRefused
from stoker.model.action import Action
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId
from stoker.seams.clock import Instant

_STATE, _PLACE = HOT.index("state"), HOT.index("place")
_VERSION = len(HOT)
_COMPLETED = LedgerEventKind.COMPLETED


class PostgresStore(TrustingSession):
    """A store in one schema of a database; tables are shared, the connection is ours."""

    engine = "postgres"

    def __init__(self, db: Db, schema: str) -> None:
        super().__init__(db, schema)
        self.counters: Result = []
        self.ended = 0
        """Rows buried since somebody set this to nought."""
        self._owners: dict[tuple[RunId, str], Owner] = {}
        self._told_ahead: dict[tuple[object, ...], Result] = {}
        self._results: dict[int, Completion | None] = {}
        """Of this group, by place."""

    def _leave_group(self) -> None:
        super()._leave_group()
        self._owners.clear()
        self._told_ahead.clear()
        self._results.clear()

    # --- rows

    def read(self, result: Result) -> list[Row]:
        """Return rows of hot columns and version, with the inputs of those that have one."""
        inputs: dict[int, Action | None] = {}
        for columns_ in result:
            if columns_[_STATE] < len(STATES) - 1:
                kept = self._known.get(columns_[_PLACE])
                inputs[columns_[_PLACE]] = kept[1].action if kept is not None else None
        missing = [place for place, action in inputs.items() if action is None]
        for place, action in self.all("inputs", Ints(missing)) if missing else ():
            inputs[place] = msgspec.msgpack.decode(action, type=Action)
        found: list[Row] = []
        for columns_ in result:
            known = inputs.get(columns_[_PLACE])
            row = decode_row((*columns_[:_VERSION], None, None), known=known)
            self._known.keep(columns_[_VERSION], row)
            found.append(row)
        return found

    def held(self, found: Result) -> list[Row]:
        """Return locked rows by place and version; reads those that are not as they were here."""
        rows: dict[int, Row | None] = {}
        for place, version in found:
            kept = self._known.get(place)
            rows[place] = kept[1] if kept is not None and kept[0] == version else None
        changed = [place for place, row in rows.items() if row is None]
        for row in self.read(self.all("rows_at", Ints(changed))) if changed else ():
            rows[row.order] = row
        return [row for row in rows.values() if row is not None]

    def lock(self, name: str, *parameters: object) -> list[Row]:
        """Return the rows of a locking statement; ids drawn before are not used any more."""
        self._ids.clear()
        return self.read(self.all(name, *parameters))

    def lock_rows(self, ids: Sequence[ActionId]) -> list[Row]:
        """Lock the rows of known ids."""
        self._ids.clear()
        return self.held(self.all("lock_rows", Texts(ids)))

    def _many(self, name: str, kinds: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self.run(name, columns(kinds, rows))

    def insert(self, rows: Sequence[Row]) -> None:
        """Add new rows, without their inputs."""
        self._many("insert", HOT_KINDS, [hot_columns(row) for row in rows])
        self._written.update((row.order, row) for row in rows)
        self._assumed.difference_update(row.action_id for row in rows)

    def insert_inputs(self, rows: Sequence[Row]) -> None:
        """Add the inputs of new rows."""
        self._many("insert_input", "qb", [(row.order, encode(row.action)) for row in rows])

    def update(self, rows: Sequence[Row]) -> None:
        """Write the changed state of rows."""
        self._verify([row.order for row in rows if row.order in self._trusted])
        self._many("update", MUTABLE_KINDS, [mutable_columns(row) for row in rows])
        self._written.update((row.order, row) for row in rows)

    def lease(self, rows: Sequence[Row]) -> None:
        """Write what a lease changes."""
        names = ("deliveries", "fence", "worker", "alone", "queue_seconds")
        self._step("lease", "qqtqd", rows, *map(attrgetter, names))

    def start(self, rows: Sequence[Row]) -> None:
        """Write what a start changes."""
        self._step("start", "qd", rows, *map(attrgetter, ("attempts", "due_boot")))

    def complete(self, rows: Sequence[Row]) -> None:
        """Write what a result changes, in one way or another."""
        plain = [row for row in rows if not row.reclaim_fence and not has_history(row)]
        self._step("complete", "tq", plain, *map(attrgetter, ("settled_status", "settled_fence")))
        self.update([row for row in rows if row.reclaim_fence or has_history(row)])

    def acknowledge(self, rows: Sequence[Row]) -> None:
        """Write what an acknowledgement changes."""
        self._step("acknowledge", "", rows)

    def settle(self, rows: Sequence[Row]) -> None:
        """Add results."""
        self._many("settle", "qb", [(row.order, encode(row.completion)) for row in rows])
        self._results.update((row.order, row.completion) for row in rows)

    def bury(self, rows: Sequence[Row]) -> None:
        """Drop input, result and told events; dead letters keep input and result."""
        self.ended += len(rows)
        gone = [row.order for row in rows if row.settled_status is not CompletionStatus.DEAD]
        self._forget(gone, "bury_inputs", "bury_results")
        self._forget([row.order for row in rows], "bury_events")

    def _forget(self, places: list[int], *statements: str) -> None:
        for statement in statements if places else ():
            self.run(statement, (Ints(places),))

    def rows(self, ids: Iterable[ActionId]) -> list[Row]:
        """Return the rows of known ids, results included, without a lock."""
        return [decode_row(c) for c in self.all("rows", Texts(list(ids)))]

    def rollout_rows(self, rollout: RolloutId) -> list[Row]:
        """Return every row of a rollout."""
        return [decode_row(c) for c in self.all("rollout_rows", rollout)]

    def unfinished(self, rollout: RolloutId) -> list[Row]:
        """Lock the rows of a rollout that have no result yet."""
        return self.lock("unfinished", rollout)

    def outstanding(self, rollouts: Sequence[RolloutId]) -> dict[RolloutId, int]:
        """Count unfinished rows of each rollout, less those parked for its own cap."""
        counted = {RolloutId(r): n for r, n in self.all("outstanding", Texts(list(rollouts)))}
        return dict.fromkeys(rollouts, 0) | counted

    def queued(self, queue: Queue, limit: int) -> list[Row]:
        """Look at the head of one queue; nothing is locked."""
        return self.read(self.all("queued", *of_queue(queue), limit))

    def lock_queued(self, queue: Queue, after: tuple[int, int], limit: int) -> list[Row]:
        """Lock what comes next in one queue, as far as no other gateway is giving it away.

        Their fences are drawn in the same go.
        """
        found, numbers = self.together(
            (("lock_queued", (*of_queue(queue), *after, limit)), ("draw", (limit,)))
        )
        self.drawn(numbers)
        return self.held(found)

    def parked(self, worker_class: str, run_id: RunId, limit: int) -> list[Row]:
        """Lock a run's earliest rows of a class that are parked for the caps."""
        return self.lock("parked", worker_class, run_id, limit)

    def parked_run(self, run_id: RunId, limit: int) -> list[Row]:
        """Lock a run's earliest rows that are parked for its quota."""
        return self.lock("parked_run", run_id, limit)

    def parked_of(self, rollout: RolloutId, limit: int) -> list[Row]:
        """Lock the earliest rows that are parked for their rollout's cap."""
        return self.lock("parked_of", rollout, limit)

    def held_by(self, worker: WorkerId) -> list[Row]:
        """Lock waiting rows that only ``worker`` may run."""
        return self.lock("held_by", worker)

    def due(self, before: float, limit: int) -> list[Row]:
        """Lock unfinished rows whose time is up, as far as nobody else has them."""
        return self.lock("due", before, before, limit)

    def next_due(self) -> float | None:
        """Return nothing: the keeper of time asks the database itself."""
        return None

    def in_hands(self) -> list[Row]:
        """Return nothing: what is in a worker's hands is asked for when it is needed."""
        return []

    def counts(self) -> list[Counted]:
        """Return nothing: counters are rows (``counters``)."""
        return []

    def results(self) -> int:
        """Return nothing: counters are rows (``counters``)."""
        return 0

    def dead(self, run_id: RunId) -> list[Row]:
        """Return a run's dead letters that were not dropped."""
        return [decode_row(c) for c in self.all("dead", run_id)]

    def revive(self, rows: Sequence[Row]) -> None:
        """Give rows new times; their results and told events go."""
        times = [
            (r.accepted_wall, r.deadline_wall, r.accepted_boot, r.deadline_boot, r.order)
            for r in rows
        ]
        self._many("revive", "ddddq", times)
        self._forget_rows()
        self._forget([row.order for row in rows], "bury_results", "bury_events")

    def drop_dead(self, rows: Sequence[Row]) -> None:
        """Drop what dead letters keep; the tombstones stay."""
        self._forget([row.order for row in rows], "bury_inputs", "bury_results", "bury_events")

    def unsettled(self, after: int, limit: int) -> list[Row]:
        """Lock rows that have no result or are not reclaimed, in order, after a place."""
        return self.lock("unsettled", after, limit)

    def rebase(self, now: Instant) -> None:
        """Do nothing: all instants are the server's, whatever booted since."""

    def defer(self, until: float) -> None:
        """Let no started row be due before ``until``."""
        self.run("defer", (until,))
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Trust no row that this transaction may have changed by a rule."""
        self._known.clear()
        self._rewritten = True

    # --- events

    def tell(self, events: Sequence[Told]) -> None:
        """Add events; the server numbers them, under the locks of their partitions.

        Whoever holds a lock draws, writes and commits before anybody else draws: an event that
        commits later has a higher number, so ``events(after)`` passes none over.
        """
        self._told_ahead.clear()
        keys = {(told.run_id, told.partition) for told in events}
        locks = sorted(partition_key(self.schema, key) for key in keys)
        self.run("lock_partitions", (Ints(locks),))
        told = [
            (
                *(one.run_id, one.partition, one.kind.value, one.order),
                *(one.action_id, one.rollout_id, one.detail),
                encode(one.completion) if one.completion else None,
            )
            for one in events
        ]
        self.run("tell", (self.epoch << COUNTER_BITS, *columns("tttqtttb", told)))

    def told_ahead(self, polls: Sequence[EventsRequest]) -> None:
        """Read at once what these polls are going to ask for."""
        asked: list[tuple[str, tuple[object, ...]]] = []
        for poll in polls:
            asked.append(("owner", (poll.run_id, poll.partition)))
            asked.append(("told", (poll.run_id, poll.partition, poll.after, poll.limit)))
        found = self.together(asked)
        for owner in found[::2]:
            self.own(owner)
        self._told_ahead = {
            one[1]: told for one, told in zip(asked[1::2], found[1::2], strict=True)
        }
        self._read_results(event for told in found[1::2] for event in told)

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return events in order."""
        asked = (run_id, partition, after, limit)
        found = self._told_ahead.pop(asked, None)
        if found is None:
            found = self.all("told", *asked)
            self._read_results(found)
        results = self._results
        return [
            LedgerEvent(
                event_id=event_id,
                kind=LedgerEventKind(kind),
                action_id=action_id,
                rollout_id=rollout_id,
                completion=results.get(place) if kind == _COMPLETED else _decoded(late),
                detail=detail,
            )
            for event_id, kind, action_id, rollout_id, detail, late, place in found
        ]

    def _read_results(self, told: Iterable[tuple[Any, ...]]) -> None:
        """Read the results that these events tell of, but for those that came with this group."""
        ended = [event[-1] for event in told if event[1] == _COMPLETED]
        missing = [place for place in ended if place not in self._results]
        for place, completion in self.all("results", Ints(missing)) if missing else ():
            self._results[place] = decode_completion(completion)

    def forget_passed(self, run_id: RunId, partition: str, upto: int) -> None:
        """Drop requeued and reclaimed events that the coordinator has seen."""
        self._later.append(("forget_passed", (run_id, partition, upto)))

    def forget_late(self, ids: Sequence[int]) -> None:
        """Drop the events of these actions."""
        self.run("bury_events", (Ints(list(ids)),))

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal."""
        return next(iter(self.ends(run_id, [rollout])), None)

    def ends(self, run_id: RunId, rollouts: Sequence[RolloutId]) -> list[Head]:
        """Return the ends of these rollouts' journals, of those that have begun."""
        runs = Texts([run_id] * len(rollouts))
        return [as_head(c) for c in self.all("read_heads", runs, Texts(list(rollouts)))]

    def put_heads(self, heads: Sequence[Head]) -> None:
        """Write journal ends."""
        moved = sorted(head for head in heads if head.key in self._ends)
        if moved:
            ends = [(h.key, self._ends.pop(h.key), h.seq, h.finished) for h in moved]
            self.run("move_heads", (*columns("qqqq", ends), len(ends)))
        self._moved.update((head.key, head) for head in heads)
        self._many("put_heads", "qtttqq", sorted(set(heads).difference(moved)))

    def heads(self, run_id: RunId, after: RolloutId | None, limit: int) -> list[Head]:
        """Return a run's rollouts in order of admission."""
        return [as_head(c) for c in self.all("heads", run_id, run_id, after or "", limit)]

    def write(self, entries: Sequence[Entry]) -> None:
        """Add journal entries."""
        self._many("write", "qqb", entries)

    def entries(self, head: int, *, after: int, limit: int) -> list[bytes]:
        """Return journal entries from position ``after`` on."""
        return [bytes(c[0]) for c in self.all("entries", head, after, limit)]

    # --- owners and workers

    def owner(self, run_id: RunId, partition: str) -> Owner | None:
        """Return who owns a partition; locked where this group may change something for it."""
        known = self._owners.get((run_id, partition))
        if known is None:
            self.own(self.all("owner", run_id, partition))
        return self._owners.get((run_id, partition))

    def own(self, found: Result) -> None:
        """Take note of owners for the rest of this group."""
        for run_id, partition, fence, incarnation in found:
            owner = Owner(RunId(run_id), partition, Fence(fence), incarnation)
            self._owners[owner.run_id, owner.partition] = owner

    def put_owner(self, owner: Owner) -> None:
        """Write who owns a partition."""
        self.run("put_owner", owner)
        self._owners[owner.run_id, owner.partition] = owner

    def owners(self) -> list[Owner]:
        """Return who owns every partition."""
        self.own(self.all("owners"))
        return list(self._owners.values())

    def workers(self) -> list[Enlisted]:
        """Return nothing: incarnations are asked for when they are needed."""
        return []

    def put_workers(self, workers: Sequence[Enlisted]) -> None:
        """Write worker incarnations."""
        rows = [(w.worker_id, w.name, encode(w.slots), int(w.ended)) for w in workers]
        self._many("put_workers", "ttbq", rows)

    # --- operators

    def note(self, entry: AuditEntry) -> None:
        """Write down what an operator did."""
        about = (entry.run_id or "", entry.action_id or "", entry.detail)
        self.run("note", (entry.at, entry.who, entry.what, *about))

    def audit(self, run_id: RunId) -> list[AuditEntry]:
        """Return what operators did to a run and to the ledger as a whole."""
        return [
            AuditEntry(
                at=at,
                who=who,
                what=what,
                run_id=RunId(run) if run else None,
                action_id=ActionId(action) if action else None,
                detail=detail,
            )
            for at, who, what, run, action, detail in self.all("audit", run_id)
        ]

    def copy_to(self, path: str, pages: int) -> tuple[int, int]:  # noqa: ARG002 - the contract's
        """Refuse: PostgreSQL has tools for that."""
        raise LedgerRefused(
            "this ledger lies in PostgreSQL; nothing was copied; use pg_basebackup or pg_dump"
        )

    def compact(self) -> tuple[int, int]:
        """Refuse: PostgreSQL vacuums by itself."""
        raise LedgerRefused(
            "this ledger lies in PostgreSQL, which vacuums by itself; nothing was done"
        )

    # --- the ledger as a whole: counters are rows, see ``books``

    def meta(self) -> Meta | None:
        """Return the ledger's own record, counters at nought."""
        found = self.all("meta")
        return Meta(lineage=found[0][0], epoch=found[0][1]) if found else None

    def put_meta(self, meta: Meta) -> None:
        """Do nothing: counters are added up by ``books``, the rest is the opening's."""


def _decoded(completion: bytes | None) -> Completion | None:
    return decode_completion(completion) if completion else None


def as_head(found: tuple[Any, ...]) -> Head:
    """Return a journal's end as the ledger knows it."""
    head = Head(*found)
    return head._replace(finished=bool(head.finished))


def of_queue(queue: Queue) -> tuple[object, ...]:
    """Return a queue as the statements name it."""
    worker_class, run_id, holder, suspect = queue
    return (worker_class, run_id, holder or "", int(suspect))


def as_enlisted(found: tuple[Any, ...]) -> Enlisted:
    """Return a worker incarnation as the ledger knows it."""
    worker_id, name, slots, ended = found
    decoded = msgspec.msgpack.decode(slots, type=dict[str, int])
    return Enlisted(WorkerId(worker_id), name, decoded, bool(ended))
