"""The PostgreSQL store: one connection, one transaction per group, whole columns per statement.

What other engines keep in memory lies in rows here, since other gateways change it too: every row
that a group decides about is locked first (``statements.sql`` has the order of locks). Inputs never
change once written, so they are kept after the group, by place. A lost connection is
``StorageLost``: the group may or may not have been committed, so nobody is answered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.broker.operating import AuditEntry
from stoker.broker.postgres.arrays import Ints, Texts, columns
from stoker.broker.postgres.connection import Db, partition_key
from stoker.broker.postgres.session import HOT, HOT_KINDS, MUTABLE_KINDS, Result, Session
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
    hot_columns,
    mutable_columns,
)
from stoker.errors import LedgerRefused
from stoker.model.action import Action
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId
from stoker.seams.clock import Instant

_INPUTS_KEPT = 8192
_STATE, _PLACE = HOT.index("state"), HOT.index("place")


class PostgresStore(Session):
    """A store in one schema of a database; tables are shared, the connection is ours."""

    engine = "postgres"

    def __init__(self, db: Db, schema: str) -> None:
        super().__init__(db, schema)
        self.counters: Result = []
        self._owners: dict[tuple[RunId, str], Owner] = {}
        self._inputs: OrderedDict[int, Action] = OrderedDict()

    def begin_with(self, asked: Sequence[tuple[str, tuple[object, ...]]]) -> list[Result]:
        """Open a transaction; who owns what is asked anew."""
        self._owners.clear()
        return super().begin_with(asked)

    # --- rows

    def read(self, result: Result) -> list[Row]:
        """Return rows of hot columns, with the inputs of those that have one."""
        unacknowledged = [c[_PLACE] for c in result if c[_STATE] < len(STATES) - 1]
        inputs = {place: self._inputs.get(place) for place in unacknowledged}
        missing = [place for place, action in inputs.items() if action is None]
        if missing:
            for place, action in self.all("inputs", Ints(missing)):
                inputs[place] = decoded = msgspec.msgpack.decode(action, type=Action)
                self.keep(place, decoded)
        return [decode_row((*c, None, None), known=inputs.get(c[_PLACE])) for c in result]

    def keep(self, place: int, action: Action) -> None:
        """Remember an input; it never changes."""
        self._inputs[place] = action
        if len(self._inputs) > _INPUTS_KEPT:
            self._inputs.popitem(last=False)

    def lock(self, name: str, *parameters: object) -> list[Row]:
        """Return the rows of a locking statement; ids drawn before are not used any more."""
        self._ids.clear()
        return self.read(self.all(name, *parameters))

    def _many(self, name: str, kinds: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self.run(name, columns(kinds, rows))

    def insert(self, rows: Sequence[Row]) -> None:
        """Add new rows."""
        self._many("insert", HOT_KINDS, [hot_columns(row) for row in rows])
        self._many("insert_input", "qb", [(row.order, encode(row.action)) for row in rows])
        for row in rows:
            self.keep(row.order, row.action)

    def update(self, rows: Sequence[Row]) -> None:
        """Write the changed state of rows."""
        self._many("update", MUTABLE_KINDS, [mutable_columns(row) for row in rows])

    def settle(self, rows: Sequence[Row]) -> None:
        """Add results."""
        self._many("settle", "qb", [(row.order, encode(row.completion)) for row in rows])

    def bury(self, rows: Sequence[Row]) -> None:
        """Drop input, result and told events; dead letters keep input and result."""
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

    def outstanding(self, rollout: RolloutId) -> int:
        """Count unfinished rows, less those parked for the rollout's own cap."""
        return sum(count for _, count in self.all("outstanding", Texts([rollout])))

    def queued(self, queue: Queue, limit: int) -> list[Row]:
        """Look at the head of one queue; nothing is locked."""
        return self.read(self.all("queued", *of_queue(queue), limit))

    def lock_queued(self, queue: Queue, after: tuple[int, int], limit: int) -> list[Row]:
        """Lock what comes next in one queue, as far as no other gateway is giving it away."""
        return self.lock("lock_queued", *of_queue(queue), *after, limit)

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
        return self.lock("due", before, limit)

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

    # --- events

    def lock_partitions(self, keys: Iterable[tuple[RunId, str]]) -> None:
        """Make the numbers of these partitions' events rise in the order of commits.

        Whoever holds the lock draws, writes and commits before anybody else draws: an event that
        commits later has a higher number, so ``events(after)`` passes none over.
        """
        self._ids.clear()
        locks = sorted(partition_key(self.schema, key) for key in keys)
        self.run("lock_partitions", (Ints(locks),))

    def tell(self, events: Sequence[Told]) -> None:
        """Add events; their partitions are locked."""
        self._many(
            "tell",
            "qtttqtttb",
            [
                (
                    *(told.event_id, told.run_id, told.partition, told.kind.value, told.order),
                    *(told.action_id, told.rollout_id, told.detail),
                    encode(told.completion) if told.completion else None,
                )
                for told in events
            ],
        )

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return events in order."""
        return [
            LedgerEvent(
                event_id=event_id,
                kind=LedgerEventKind(kind),
                action_id=action_id,
                rollout_id=rollout_id,
                completion=decode_completion(completion) if completion else None,
                detail=detail,
            )
            for event_id, kind, action_id, rollout_id, detail, completion in self.all(
                "told", run_id, partition, after, limit
            )
        ]

    def forget_passed(self, run_id: RunId, partition: str, upto: int) -> None:
        """Drop requeued and reclaimed events that the coordinator has seen."""
        self.run("forget_passed", (run_id, partition, upto))

    def forget_late(self, ids: Sequence[int]) -> None:
        """Drop the events of these actions."""
        self.run("bury_events", (Ints(list(ids)),))

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal."""
        found = self.all("head", run_id, rollout)
        return as_head(found[0]) if found else None

    def put_heads(self, heads: Sequence[Head]) -> None:
        """Write journal ends."""
        self._many("put_heads", "qtttqq", heads)

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
