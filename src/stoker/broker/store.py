"""What the ledger's verbs need of a store: rows, journal and events in one transaction.

A store decides nothing. Everything between ``begin`` and ``commit`` becomes durable together or not
at all; reads inside a transaction see its own writes. The backlog is only ever asked for in
pieces, so that a million queued actions cost disk, not memory (B13).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from stoker.broker.base import LedgerEvent, LedgerEventKind, WorkerStats
from stoker.broker.operating import AuditEntry
from stoker.broker.rates import Bucket
from stoker.broker.rows import ParkedOn, Queue, Row
from stoker.model.action import ActionState
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId
from stoker.seams.clock import Instant


class Meta(msgspec.Struct, kw_only=True):
    """The ledger as a whole."""

    lineage: str
    """Identity of this ledger; renewed when it is restored without certainty (I3)."""
    epoch: int = 0
    """Openings so far; the upper part of every id and fence."""
    boot_id: str = ""
    """Boot to whose clock the stored instants belong."""
    deliveries: int = 0
    attempts: int = 0
    retries: int = 0
    late: int = 0
    dead: int = 0
    completions: dict[str, int] = {}
    buckets: dict[str, Bucket] = {}
    """Remote service → where its rate stands; elsewhere where gateways share a ledger."""
    copied: bool = False
    """This file is a copy of another ledger and was not opened since: see ``restore``."""


class Head(NamedTuple):
    """One rollout's journal, at its end."""

    key: int
    """Place in order of admission; never reused."""
    run_id: RunId
    rollout_id: RolloutId
    partition: str
    seq: int
    """Entries it has."""
    finished: bool


class Entry(NamedTuple):
    """One journal entry on its way to the store."""

    head: int
    seq: int
    event: bytes


class Owner(NamedTuple):
    """Who owns a partition."""

    run_id: RunId
    partition: str
    fence: Fence
    incarnation: str


class Counted(NamedTuple):
    """How many unfinished rows are alike."""

    queue: Queue
    state: ActionState
    parked_on: ParkedOn
    number: int


class Told(NamedTuple):
    """One ledger event on its way to the store."""

    event_id: int
    """Drawn when it is written, 0 until then."""
    run_id: RunId
    partition: str
    kind: LedgerEventKind
    order: int
    action_id: ActionId
    rollout_id: RolloutId
    detail: str
    completion: Completion | None
    """Of a reconciled late result; a completed event finds its result with the action."""


class Enlisted(NamedTuple):
    """One worker incarnation, as stored."""

    worker_id: WorkerId
    name: str
    slots: dict[str, int]
    ended: bool
    """Known to be dead for good."""

    def stats(self, leases: int, silent_seconds: float) -> WorkerStats:
        """Return what ``stats`` shows of a live one."""
        return WorkerStats(
            worker_id=self.worker_id,
            name=self.name,
            slots=self.slots,
            leases=leases,
            silent_seconds=silent_seconds,
        )


class Store(Protocol):
    """Tables and transactions of one ledger."""

    engine: str
    commits: int
    syncs: int

    def meta(self) -> Meta | None:
        """Return the ledger's own record, ``None`` when it is new."""
        ...

    def put_meta(self, meta: Meta) -> None:
        """Write the ledger's own record."""
        ...

    def begin(self) -> None:
        """Open a transaction."""
        ...

    def commit(self, *, sync: bool) -> None:
        """Close the transaction.

        Raises:
            StorageFull: no room; the transaction is still open and must be rolled back.
        **Durability:** with ``sync`` it and everything before it survives a power cut.
        """
        ...

    def rollback(self) -> None:
        """Undo the transaction."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...

    # --- actions

    def insert(self, rows: Sequence[Row]) -> None:
        """Add new rows."""
        ...

    def update(self, rows: Sequence[Row]) -> None:
        """Write the changed state of rows; never their input."""
        ...

    def lease(self, rows: Sequence[Row]) -> None:
        """Write rows of which nothing has changed but that they were leased; like ``update``."""
        ...

    def start(self, rows: Sequence[Row]) -> None:
        """Write rows of which nothing has changed but that they were started; like ``update``."""
        ...

    def complete(self, rows: Sequence[Row]) -> None:
        """Write rows that were started and have a result now; like ``update``."""
        ...

    def acknowledge(self, rows: Sequence[Row]) -> None:
        """Write rows of which nothing has changed but that they were acknowledged."""
        ...

    def settle(self, rows: Sequence[Row]) -> None:
        """Add the results of rows that became terminal."""
        ...

    def bury(self, rows: Sequence[Row]) -> None:
        """Turn acknowledged rows into tombstones: input, result and told events go."""
        ...

    def rows(self, ids: Iterable[ActionId]) -> list[Row]:
        """Return the rows of known ids."""
        ...

    def rollout_rows(self, rollout: RolloutId) -> list[Row]:
        """Return every row of a rollout, tombstones included, in order."""
        ...

    def unfinished(self, rollout: RolloutId) -> list[Row]:
        """Return the rows of a rollout that have no result yet."""
        ...

    def outstanding(self, rollouts: Sequence[RolloutId]) -> dict[RolloutId, int]:
        """Count unfinished rows of each rollout, less those parked for its own cap."""
        ...

    def queued(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue: highest priority, then earliest."""
        ...

    def parked(self, worker_class: str, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows of a class that are parked for the caps."""
        ...

    def parked_run(self, run_id: RunId, limit: int) -> list[Row]:
        """Return a run's earliest rows that are parked for its quota."""
        ...

    def parked_of(self, rollout: RolloutId, limit: int) -> list[Row]:
        """Return the earliest rows that are parked for their rollout's cap."""
        ...

    def held_by(self, worker: WorkerId) -> list[Row]:
        """Return waiting rows that only ``worker`` may run."""
        ...

    def due(self, before: float, limit: int) -> list[Row]:
        """Return unfinished rows whose time is up, most overdue first."""
        ...

    def next_due(self) -> float | None:
        """Return the earliest time at which a row is due."""
        ...

    def in_hands(self) -> list[Row]:
        """Return rows that are leased, started, or not yet reclaimed."""
        ...

    def counts(self) -> list[Counted]:
        """Count unfinished rows by queue, state and what parks them."""
        ...

    def results(self) -> int:
        """Count results that are not acknowledged."""
        ...

    def dead(self, run_id: RunId) -> list[Row]:
        """Return a run's dead letters that were not dropped."""
        ...

    def revive(self, rows: Sequence[Row]) -> None:
        """Give rows new times; their results and told events go."""
        ...

    def drop_dead(self, rows: Sequence[Row]) -> None:
        """Drop what dead letters keep; the tombstones stay."""
        ...

    def unsettled(self, after: int, limit: int) -> list[Row]:
        """Return rows that have no result or are not reclaimed, in order, after a place."""
        ...

    def rebase(self, now: Instant) -> None:
        """Move stored instants to this boot's clock by way of the wall clock (B11)."""
        ...

    def defer(self, until: float) -> None:
        """Let no started row be due before ``until``."""
        ...

    # --- events

    def tell(self, events: Sequence[Told]) -> None:
        """Add events."""
        ...

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return events in order."""
        ...

    def forget_passed(self, run_id: RunId, partition: str, upto: int) -> None:
        """Drop requeued and reclaimed events that the coordinator has seen."""
        ...

    def forget_late(self, ids: Sequence[int]) -> None:
        """Drop the events of actions (by order) whose coordinator acknowledged them again."""
        ...

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal."""
        ...

    def ends(self, run_id: RunId, rollouts: Sequence[RolloutId]) -> list[Head]:
        """Return the ends of these rollouts' journals, of those that have begun."""
        ...

    def put_heads(self, heads: Sequence[Head]) -> None:
        """Write journal ends."""
        ...

    def heads(self, run_id: RunId, after: RolloutId | None, limit: int) -> list[Head]:
        """Return a run's rollouts in order of admission."""
        ...

    def write(self, entries: Sequence[Entry]) -> None:
        """Add journal entries."""
        ...

    def entries(self, head: int, *, after: int, limit: int) -> list[bytes]:
        """Return journal entries from position ``after`` on."""
        ...

    # --- owners and workers

    def owner(self, run_id: RunId, partition: str) -> Owner | None:
        """Return who owns a partition."""
        ...

    def put_owner(self, owner: Owner) -> None:
        """Write who owns a partition."""
        ...

    def owners(self) -> list[Owner]:
        """Return who owns every partition."""
        ...

    def workers(self) -> list[Enlisted]:
        """Return every known worker incarnation."""
        ...

    def put_workers(self, workers: Sequence[Enlisted]) -> None:
        """Write worker incarnations."""
        ...

    # --- operators

    def note(self, entry: AuditEntry) -> None:
        """Write down what an operator did."""
        ...

    def audit(self, run_id: RunId) -> list[AuditEntry]:
        """Return what operators did to a run and to the ledger as a whole."""
        ...

    def copy_to(self, path: str, pages: int) -> tuple[int, int]:
        """Copy some more pages, outside of transactions; return how many remain, and of how many.

        Raises:
            LedgerRefused: this store has no file, or ``path`` cannot be written.
        """
        ...

    def compact(self) -> tuple[int, int]:
        """Give unused pages back, outside of transactions; return bytes before and after.

        Raises:
            LedgerRefused: this store has no file.
            StorageFull: no room to rewrite it; nothing was changed.
        """
        ...


class StorageFull(Exception):
    """No room on the disk; nothing of the open transaction is durable."""


class StorageConflict(Exception):
    """Another gateway was in the way; nothing was kept, the same group may be tried again."""


class StorageLost(Exception):
    """The store is out of reach; whether the open transaction is durable is not known."""


class StorageUnfit(Exception):
    """A request names something that this store cannot hold; nothing of the group was kept."""
