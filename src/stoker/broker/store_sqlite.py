"""The embedded engine's store: one SQLite database, one connection, exclusive locking, WAL.

One connection because the WAL-reset bug of older SQLite versions needs two (facts). Commits run
with ``synchronous = NORMAL``; where a group holds something that must survive a power cut, the
write-ahead log is synced after the commit and before any reply: what FULL would do, chosen per
group (SQLite itself takes the setting only between transactions, before the group is known). A sync
makes every earlier commit durable too. SQL lives in ``sql/*.sql``.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import apsw
import msgspec

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.broker.operating import AuditEntry
from stoker.broker.rows import ParkedOn, Queue, Row
from stoker.broker.schema import migrate
from stoker.broker.store import (
    Counted,
    Enlisted,
    Entry,
    Head,
    Meta,
    Owner,
    StorageFull,
    Told,
)
from stoker.broker.store_sqlite_files import FileCopy, compact
from stoker.broker.store_sqlite_rows import (
    STATES,
    decode_completion,
    decode_row,
    encode,
    hot_columns,
    mutable_columns,
)
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId
from stoker.seams.clock import Instant
from stoker.seams.disk import sync_directory
from stoker.seams.faultpoints import declare, reach

COMMIT_BEFORE = declare(
    "ledger.commit.before", "a group of ledger transitions is about to commit", "kill", "disk_full"
)
COMMIT_AFTER = declare("ledger.commit.after", "a group has committed; nobody has been told")
SYNC_BEFORE = declare("ledger.sync.before", "a committed group is about to be synced")

_STATEMENT_CACHE = 128
_CHECKPOINT_PAGES = 4000
_CACHE_KIB = 4096
# What a group touches, not the file: SQLite looks through all of its cache at nearly every commit
# (a page that a split of its tree numbered past the file's end for a moment makes it). 64 MiB took
# 5 µs of a cycle and found no page more than 8 MiB do; a page not found costs a read of 1 µs from
# the kernel's cache.
_DEAD = CompletionStatus.DEAD

Bindings = tuple[object, ...]


class SqliteStore:
    """A store in one file."""

    engine = "sqlite"

    def __init__(self, path: Path) -> None:
        self._grouping = False
        self.commits = 0
        self.syncs = 0
        self._sql = _statements()
        self._db = apsw.Connection(str(path), statementcachesize=_STATEMENT_CACHE)
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            "temp_store = MEMORY",
            f"cache_size = -{_CACHE_KIB}",
        ):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        # Without it SQLite plans a join again for every new binding (its STAT4), at 25 µs a time.
        self._db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        try:
            migrate(self._db, path)
        except BaseException:
            self._db.close()
            raise
        self._path = path
        self._copy: FileCopy | None = None
        self._wal = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        sync_directory(path.parent)

    # --- transactions

    def begin(self) -> None:
        """Open a transaction, which begins with the first statement that gains by it."""
        self._grouping = True

    def _begin(self) -> None:
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")

    def commit(self, *, sync: bool) -> None:
        """Close the transaction; with ``sync`` it is on disk when this returns.

        A failing sync is an ``OSError`` that must end the process: the page cache can no longer be
        believed, only a reopening reads what is really there.
        """
        with _room():
            reach(COMMIT_BEFORE)
            if self._db.in_transaction:
                self._db.execute("COMMIT")
        self._grouping = False
        self.commits += 1
        if sync:
            reach(SYNC_BEFORE)
            os.fdatasync(self._wal)
            self.syncs += 1
        reach(COMMIT_AFTER)

    def rollback(self) -> None:
        """Undo the transaction."""
        self._grouping = False
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Checkpoint and close the file."""
        if self._copy is not None:
            self._copy.close()
        os.close(self._wal)
        self._db.close()

    # --- statements

    def _many(self, name: str, rows: Sequence[Bindings]) -> None:
        if rows:
            with _room():
                self._begin()
                self._db.executemany(self._sql[name], rows)

    def _all(self, name: str, bindings: Bindings = ()) -> list[tuple[Any, ...]]:
        return list(self._db.execute(self._sql[name], bindings))

    def _each(self, name: str, asked: Sequence[Bindings]) -> list[tuple[Any, ...]]:
        """Ask one question for many; what has no answer is left out."""
        if self._grouping:  # between groups nothing may stay open: a copy could not be made
            self._begin()
        return list(self._db.executemany(self._sql[name], asked))

    def _rows(self, name: str, bindings: Bindings = ()) -> list[Row]:
        return [decode_row(columns) for columns in self._db.execute(self._sql[name], bindings)]

    # --- the ledger as a whole

    def meta(self) -> Meta | None:
        """Return the ledger's own record."""
        found = self._all("meta")
        return msgspec.msgpack.decode(found[0][0], type=Meta) if found else None

    def put_meta(self, meta: Meta) -> None:
        """Write the ledger's own record."""
        self._many("put_meta", [(encode(meta),)])

    # --- actions

    def insert(self, rows: Sequence[Row]) -> None:
        """Add new rows."""
        self._many("insert", [hot_columns(row) for row in rows])
        self._many("insert_input", [(row.order, encode(row.action)) for row in rows])

    def update(self, rows: Sequence[Row]) -> None:
        """Write the changed state of rows."""
        self._many("update", [mutable_columns(row) for row in rows])

    def lease(self, rows: Sequence[Row]) -> None:
        """Write what a lease changes."""
        self._many(
            "lease",
            [(r.deliveries, r.fence, r.worker, r.alone, r.queue_seconds, r.order) for r in rows],
        )

    def start(self, rows: Sequence[Row]) -> None:
        """Write what a start changes."""
        self._many("start", [(r.attempts, r.due_boot, r.order) for r in rows])

    complete = update

    def acknowledge(self, rows: Sequence[Row]) -> None:
        """Write what an acknowledgement changes."""
        self._many("acknowledge", [(r.order,) for r in rows])

    def settle(self, rows: Sequence[Row]) -> None:
        """Add results."""
        self._many("settle", [(row.order, encode(row.completion)) for row in rows])

    def bury(self, rows: Sequence[Row]) -> None:
        """Drop input, result and told events; dead letters keep input and result."""
        places = [(row.order,) for row in rows if row.settled_status is not _DEAD]
        self._many("bury_input", places)
        self._many("bury_result", places)
        self._many("bury_events", [(row.order,) for row in rows])

    def rows(self, ids: Iterable[ActionId]) -> list[Row]:
        """Return the rows of known ids."""
        return [decode_row(columns) for columns in self._each("row", [(i,) for i in ids])]

    def rollout_rows(self, rollout: RolloutId) -> list[Row]:
        """Return every row of a rollout."""
        return self._rows("rollout_rows", (rollout,))

    def unfinished(self, rollout: RolloutId) -> list[Row]:
        """Return the rows of a rollout that have no result yet."""
        return sorted(self._rows("unfinished", (rollout,)), key=lambda row: row.order)

    def outstanding(self, rollouts: Sequence[RolloutId]) -> dict[RolloutId, int]:
        """Count unfinished rows of each rollout, less those parked for its own cap."""
        counts = self._each("outstanding", [(rollout,) for rollout in rollouts])
        return {rollout: count for rollout, (count,) in zip(rollouts, counts, strict=True)}

    def queued(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue."""
        worker_class, run_id, holder, suspect = queue
        return self._rows("queued", (worker_class, holder or "", suspect, run_id, limit))

    def parked(self, worker_class: str, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows of a class that are parked for the caps."""
        return self._rows("parked", (worker_class, run_id, limit))

    def parked_run(self, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows that are parked for its quota."""
        return self._rows("parked_run", (run_id, limit))

    def parked_of(self, rollout: RolloutId, limit: int) -> list[Row]:
        """Return the earliest rows that are parked for their rollout's cap."""
        return self._rows("parked_of", (rollout, limit))

    def held_by(self, worker: WorkerId) -> list[Row]:
        """Return waiting rows that only ``worker`` may run."""
        return self._rows("held_by", (worker,))

    def due(self, before: float, limit: int) -> list[Row]:
        """Return unfinished rows whose time is up."""
        return self._rows("due", (before, limit))

    def next_due(self) -> float | None:
        """Return the earliest time at which a row is due."""
        found = self._all("next_due")
        return float(found[0][0]) if found else None

    def in_hands(self) -> list[Row]:
        """Return rows that are leased, started, or not yet reclaimed."""
        return self._rows("in_hands")

    def counts(self) -> list[Counted]:
        """Count unfinished rows."""
        return [
            Counted(
                Queue(cls, RunId(run_id), WorkerId(holder) or None, bool(suspect)),
                STATES[state],
                ParkedOn(parked_on),
                count,
            )
            for cls, run_id, holder, suspect, state, parked_on, count in self._all("counts")
        ]

    def results(self) -> int:
        """Count results that are not acknowledged."""
        return int(self._all("results")[0][0])

    def dead(self, run_id: RunId) -> list[Row]:
        """Return a run's dead letters."""
        return self._rows("dead", (run_id,))

    def revive(self, rows: Sequence[Row]) -> None:
        """Give rows new times; their results and told events go."""
        self._many(
            "revive",
            [
                (r.accepted_wall, r.deadline_wall, r.accepted_boot, r.deadline_boot, r.order)
                for r in rows
            ],
        )
        self._many("bury_result", [(row.order,) for row in rows])
        self._many("bury_events", [(row.order,) for row in rows])

    def drop_dead(self, rows: Sequence[Row]) -> None:
        """Drop what dead letters keep."""
        places = [(row.order,) for row in rows]
        self._many("bury_input", places)
        self._many("bury_result", places)

    def unsettled(self, after: int, limit: int) -> list[Row]:
        """Return rows that have no result or are not reclaimed."""
        return self._rows("unsettled", (after, limit))

    def rebase(self, now: Instant) -> None:
        """Move stored instants to this boot's clock."""
        self._begin()
        self._db.execute(self._sql["rebase"], {"boot": now.boot, "wall": now.wall})

    def defer(self, until: float) -> None:
        """Let no started row be due before ``until``."""
        self._begin()
        self._db.execute(self._sql["defer"], (until,))

    # --- events

    def tell(self, events: Sequence[Told]) -> None:
        """Add events."""
        self._many(
            "tell",
            [(*told[:8], encode(told.completion) if told.completion else None) for told in events],
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
            for event_id, kind, action_id, rollout_id, detail, completion in self._all(
                "told", (run_id, partition, after, limit)
            )
        ]

    def forget_passed(self, run_id: RunId, partition: str, upto: int) -> None:
        """Drop requeued and reclaimed events that the coordinator has seen."""
        self._many("forget_passed", [(run_id, partition, upto)])

    def forget_late(self, ids: Sequence[int]) -> None:
        """Drop the events of these actions."""
        self._many("bury_events", [(order,) for order in ids])

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal."""
        return next(iter(self.ends(run_id, [rollout])), None)

    def ends(self, run_id: RunId, rollouts: Sequence[RolloutId]) -> list[Head]:
        """Return the ends of these rollouts' journals, of those that have begun."""
        return [_head(c) for c in self._each("head", [(run_id, r) for r in rollouts])]

    def put_heads(self, heads: Sequence[Head]) -> None:
        """Write journal ends."""
        self._many("put_head", heads)

    def heads(self, run_id: RunId, after: RolloutId | None, limit: int) -> list[Head]:
        """Return a run's rollouts in order of admission."""
        bindings = {"run": run_id, "after": after or "", "limit": limit}
        return [_head(columns) for columns in self._db.execute(self._sql["heads"], bindings)]

    def write(self, entries: Sequence[Entry]) -> None:
        """Add journal entries."""
        self._many("write", entries)

    def entries(self, head: int, *, after: int, limit: int) -> list[bytes]:
        """Return journal entries from position ``after`` on."""
        return [columns[0] for columns in self._all("entries", (head, after, limit))]

    # --- owners and workers

    def owner(self, run_id: RunId, partition: str) -> Owner | None:
        """Return who owns a partition."""
        found = self._all("owner", (run_id, partition))
        return Owner(*found[0]) if found else None

    def owners(self) -> list[Owner]:
        """Return who owns every partition."""
        return [Owner(*columns) for columns in self._all("owners")]

    def put_owner(self, owner: Owner) -> None:
        """Write who owns a partition."""
        self._many("put_owner", [owner])

    def workers(self) -> list[Enlisted]:
        """Return every known worker incarnation."""
        return [
            Enlisted(WorkerId(i), name, msgspec.msgpack.decode(slots, type=dict[str, int]), bool(e))
            for i, name, slots, e in self._all("workers")
        ]

    def put_workers(self, workers: Sequence[Enlisted]) -> None:
        """Write worker incarnations."""
        self._many("put_worker", [(w[0], w[1], encode(w.slots), w.ended) for w in workers])

    # --- operators

    def note(self, entry: AuditEntry) -> None:
        """Write down what an operator did."""
        whose = (entry.run_id or "", entry.action_id or "", entry.detail)
        self._many("note", [(entry.at, entry.who, entry.what, *whose)])

    def audit(self, run_id: RunId) -> list[AuditEntry]:
        """Return what operators did."""
        return [
            AuditEntry(
                at=at,
                who=who,
                what=what,
                run_id=run or None,
                action_id=action_id or None,
                detail=detail,
            )
            for at, who, what, run, action_id, detail in self._all("audit", (run_id,))
        ]

    def copy_to(self, path: str, pages: int) -> tuple[int, int]:
        """Copy some more pages into ``path``."""
        if self._copy is None or self._copy.path != path:
            if self._copy is not None:
                self._copy.close()
                self._copy = None
            self._copy = FileCopy(self._db, path)
        copy, self._copy = self._copy, None
        remaining, total = copy.step(pages)
        if remaining:
            self._copy = copy
        return remaining, total

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without its unused pages."""
        if self._copy is not None:
            self._copy.close()  # whoever asked for it begins again, on a smaller file
            self._copy = None
        with _room():
            return compact(self._db, self._path)


@contextmanager
def _room() -> Iterator[None]:
    """Turn *no space left* into ``StorageFull``; every other failure of the disk ends the owner."""
    try:
        yield
    except apsw.FullError as error:
        raise StorageFull(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StorageFull(str(error)) from error


def _head(columns: tuple[Any, ...]) -> Head:
    head = Head(*columns)
    return head._replace(finished=bool(head.finished))


def _statements() -> dict[str, str]:
    text = (files("stoker.broker") / "sql" / "statements.sql").read_text("utf-8")
    parts = text.split("-- name: ")[1:]
    named = (part.partition("\n") for part in parts)
    return {name.strip(): body.strip().rstrip(";") for name, _, body in named}
