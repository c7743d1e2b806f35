"""The ledger's books while it is open: what is in memory between store and decisions.

Kept here: rows in workers' hands (bounded by ``results_max``), counters, worker incarnations,
everything a group of requests has changed but not yet written, and a bounded number of what was
used last, since most of it is used again at once. The backlog is never here (B13).
After a failed commit the books are thrown away and read again from the store.

Invariant: ids, fences and event ids all come from ``draw``: ``epoch << 40 | counter``, the epoch
made durable before the first reply, so none ever comes back (I3).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from stoker.broker.base import LedgerEventKind, LedgerLimits
from stoker.broker.recent import Recent
from stoker.broker.rows import LIVE, TERMINAL, Decision, ParkedOn, Queue, Row
from stoker.broker.store import Enlisted, Entry, Head, Meta, Store, Told
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId

COUNTER_BITS = 40
ANY = WorkerId("")
"""In place of a worker: all of them together."""

K = TypeVar("K")


class Line(NamedTuple):
    """A run's actions of one worker class: what competes for that class's slots."""

    worker_class: str
    run_id: RunId


class WorkerRecord:
    """One worker incarnation, now."""

    def __init__(self, enlisted: Enlisted, seen: float) -> None:
        self.enlisted = enlisted
        self.seen = seen
        """Boot clock of the last sign of life."""
        self.lost = False
        """Silent for a lease; a sign of life makes it a worker again, with none of its leases."""
        self.named: dict[ActionId, float] = {}
        """Actions in its hands → when it last named them (or got them)."""
        self.untold: dict[ActionId, Fence] = {}
        """Revoked leases it has not been told of yet."""

    @property
    def dead(self) -> bool:
        """Whether its environments are gone."""
        return self.lost or self.enlisted.ended


class Books:
    """Working memory of an open ledger."""

    def __init__(self, store: Store, limits: LedgerLimits, meta: Meta, seen: float) -> None:
        self.store = store
        self.limits = limits
        self.meta = meta
        self.counter = 0
        self.sync = False
        """The open group must survive a power cut before its replies go out."""
        self.transitions = 0
        self.work_seq = 0
        """Rises whenever a waiting ``lease`` may have become answerable."""
        self.events_seq = 0
        """Rises whenever a waiting ``events`` may have become answerable."""
        self.tickets_seq = 0
        """Rises whenever the queue of a class that is leased by ticket has changed."""
        self._hands: dict[ActionId, Row] = {}
        self._group: dict[ActionId, Row] = {}
        self._recent = Recent()
        self._absent: set[ActionId] = set()
        """Ids that this group has looked for in vain."""
        self._fresh: dict[ActionId, Row] = {}
        self._dirty: dict[ActionId, Row] = {}
        self._settled: list[Row] = []
        self._buried: list[Row] = []
        self._told: list[Told] = []
        self._entries: list[Entry] = []
        self._heads_dirty: set[tuple[RunId, RolloutId]] = set()
        self.states: defaultdict[str, Counter[ActionState]] = defaultdict(Counter)
        self.parked_caps: Counter[Line] = Counter()
        self.parked_runs: Counter[RunId] = Counter()
        self.parked_rollouts: Counter[RunId] = Counter()
        self.waiting: Counter[Line] = Counter()
        """Queued actions."""
        self.out: Counter[Line] = Counter()
        """Leased and started actions."""
        self.run_out: Counter[RunId] = Counter()
        self.run_queued: Counter[RunId] = Counter()
        """Queued, leased and started actions."""
        self.served: dict[RunId, int] = {}
        """Run → when it was last given to a worker, as an id; the longest ago goes first."""
        self.suspects: Counter[str] = Counter()
        # Queued actions that one worker alone may run; ``ANY`` sums them up.
        self.held: Counter[tuple[str, WorkerId]] = Counter()
        self.relieved: set[RolloutId] = set()
        """Rollouts of which an action ended while some wait for their own cap."""
        self.queued = 0
        self.busy = 0
        self.results = store.results()
        self.next_due = store.next_due()
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.unwatched: list[WorkerId] = []
        """Incarnations whose silence nobody counts yet; ``expiry`` takes them."""
        self._load(seen)

    def _load(self, seen: float) -> None:
        for queue, state, parked_on, count in self.store.counts():
            self._count(queue, state, parked_on, count)
            if queue.holder is not None:
                self.worker(queue.holder, seen)
        for enlisted in self.store.workers():
            self.workers[enlisted.worker_id] = WorkerRecord(enlisted, seen)
            self.unwatched.append(enlisted.worker_id)
        for row in self.store.in_hands():
            assert row.bearer is not None, f"{row.action_id} is in nobody's hands"
            self._hands[row.action_id] = row
            self.worker(row.bearer, seen).named[row.action_id] = seen

    def worker(self, worker_id: WorkerId, seen: float) -> WorkerRecord:
        """Return an incarnation; one that never enrolled has a lease's time to show itself."""
        record = self.workers.get(worker_id)
        if record is None:
            record = WorkerRecord(Enlisted(worker_id, str(worker_id), {}, False), seen)
            self.workers[worker_id] = record
            self.unwatched.append(worker_id)
        return record

    def draw(self) -> int:
        """Return an id that no opening of this ledger ever drew before."""
        self.counter += 1
        assert self.counter < 1 << COUNTER_BITS, "this epoch's ids are used up"
        return self.meta.epoch << COUNTER_BITS | self.counter

    # --- rows

    def rows(self, ids: Iterable[ActionId]) -> dict[ActionId, Row]:
        """Return the current rows of known ids."""
        found: dict[ActionId, Row] = {}
        missing: list[ActionId] = []
        for i in ids:
            row = self._hands.get(i) or self._group.get(i) or self._recent.rows.get(i)
            if row is not None:
                found[i] = row
            elif i not in self._absent:
                missing.append(i)
        if missing:
            for row in self.store.rows(missing):
                self._group[row.action_id] = found[row.action_id] = row
            self._absent.update(i for i in missing if i not in found)
        return found

    def row(self, action_id: ActionId) -> Row | None:
        """Return the current row of one id."""
        return self.rows((action_id,)).get(action_id)

    def current(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows as this group has left them."""
        return [self._hands.get(r.action_id) or self._group.get(r.action_id) or r for r in rows]

    def add(self, row: Row) -> None:
        """Take a newly accepted row."""
        self._fresh[row.action_id] = self._group[row.action_id] = row
        self._account(None, row)
        self.transitions += 1

    def apply(self, old: Row, decision: Decision) -> Row:
        """Write a decision down: row, counters, events."""
        row = decision.row
        if row is not old:
            self._replace(old, row)
        for note in decision.notes:
            late_result = note.completion if note.kind is LedgerEventKind.LATE else None
            self._told.append(
                Told(
                    0,
                    row.action.run_id,
                    row.partition,
                    note.kind,
                    row.order,
                    row.action_id,
                    row.action.rollout_id,
                    note.detail,
                    late_result,
                )
            )
            self.events_seq += 1
            self.meta.late += note.kind is LedgerEventKind.LATE
            self.meta.retries += note.kind is LedgerEventKind.REQUEUED
        return row

    def _replace(self, old: Row, row: Row) -> None:
        self.transitions += 1
        if row.action_id in self._fresh:
            self._fresh[row.action_id] = row
        else:
            self._dirty[row.action_id] = row
        self._group[row.action_id] = row
        self._account(old, row)
        self._hand_over(old, row)
        if row.terminal and not old.terminal:
            self._settled.append(row)
            self.sync = True  # a result must not be undone once anybody has seen it (I13)
            assert row.settled_status is not None
            totals, status = self.meta.completions, row.settled_status.value
            totals[status] = totals.get(status, 0) + 1
            self.meta.dead += row.settled_status is CompletionStatus.DEAD
            if self.parked_rollouts:
                self.relieved.add(row.action.rollout_id)
        if row.state is ActionState.ACKNOWLEDGED and old.state is not row.state:
            self._buried.append(row)

    def _hand_over(self, old: Row, row: Row) -> None:
        if old.bearer is not None:
            record = self.workers[old.bearer]
            if row.bearer != old.bearer:
                record.named.pop(row.action_id, None)
                record.untold.pop(row.action_id, None)
            elif row.reclaim_fence and not old.reclaim_fence:
                record.untold[row.action_id] = row.reclaim_fence
        if row.bearer is not None:
            self._hands[row.action_id] = row
        elif old.bearer is not None:
            del self._hands[row.action_id]
        if old.bearer != row.bearer or row.reclaim_fence != old.reclaim_fence:
            self.work_seq += 1

    def hand(self, row: Row, now_boot: float) -> None:
        """Note that a worker has just been given ``row``."""
        assert row.worker is not None, f"{row.action_id} was given to nobody"
        self.workers[row.worker].named[row.action_id] = now_boot

    def head_of(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue, as this group has left it."""
        self.flush()
        return self.store.queued(queue, limit)

    def runs_alone(self, worker: WorkerRecord) -> bool:
        """Whether a worker has a lease that tolerates no other beside it."""
        return any(row.alone for row in self.in_hands(worker))

    def results_room(self) -> int:
        """Return how many more leases have room for their results."""
        return self.limits.results_max - self.results - self.busy

    def in_hands(self, worker: WorkerRecord) -> list[Row]:
        """Return what is in a worker's hands, live or to be reclaimed."""
        return [self._hands[action_id] for action_id in worker.named]

    # --- counters

    def _account(self, old: Row | None, new: Row) -> None:
        if not new.terminal and (self.next_due is None or new.due_boot < self.next_due):
            self.next_due = new.due_boot
        if old is None:
            self._recount(new, 1)
        elif old.state in LIVE and new.state in LIVE:  # a start: it stays where it is counted
            self._count_start(old, new)
        elif (old.state, old.parked_on, old.suspect) != (new.state, new.parked_on, new.suspect):
            self._recount(old, -1)
            self._recount(new, 1)
            if new.state is ActionState.ACKNOWLEDGED:
                self.work_seq += 1
        else:
            return
        if new.state is ActionState.ACCEPTED:
            self.work_seq += 1

    def _count_start(self, old: Row, new: Row) -> None:
        states = self.states[new.action.worker_class]
        states[old.state] -= 1
        states[new.state] += 1

    def _recount(self, row: Row, sign: int) -> None:
        ended = row.state in TERMINAL
        if row.state is ActionState.COMPLETED:
            self.results += sign
        elif not ended:
            self._count(row.queue, row.state, row.parked_on, sign)
        if not ended and row.parked_on is not ParkedOn.ROLLOUT:
            rollout_id = row.action.rollout_id
            if rollout_id in self._recent.outstanding:
                self._recent.outstanding[rollout_id] += sign

    def _count(self, queue: Queue, state: ActionState, parked_on: ParkedOn, count: int) -> None:
        cls, run_id, holder, suspect = queue
        self.states[cls][state] += count
        if state is ActionState.PARKED:
            if parked_on is ParkedOn.CAPS:
                _add(self.parked_caps, Line(cls, run_id), count)
            elif parked_on is ParkedOn.RUN:
                _add(self.parked_runs, run_id, count)
            else:
                _add(self.parked_rollouts, run_id, count)
            return
        self.queued += count
        _add(self.run_queued, run_id, count)
        if state is ActionState.ACCEPTED:
            self.tickets_seq += cls in self.limits.ticket_classes
            _add(self.waiting, Line(cls, run_id), count)
            self.suspects[cls] += count if suspect else 0
            if holder is not None:
                _add(self.held, (cls, holder), count)
                _add(self.held, (cls, ANY), count)
        else:
            self.busy += count
            _add(self.out, Line(cls, run_id), count)
            _add(self.run_out, run_id, count)

    def class_queued(self, worker_class: str) -> int:
        """Count queued and leased actions of a class."""
        states = self.states[worker_class]
        return (
            states[ActionState.ACCEPTED] + states[ActionState.LEASED] + states[ActionState.STARTED]
        )

    def outstanding(self, rollout: RolloutId) -> int:
        """Count a rollout's unfinished actions, less those parked for its own cap."""
        count = self._recent.outstanding.get(rollout)
        if count is None:
            self.flush()
            count = self._recent.outstanding[rollout] = self.store.outstanding(rollout)
        return count

    def begin(self, rollout: RolloutId) -> None:
        """Note that a rollout begins: nothing needs to be read to know that it has no actions."""
        self._recent.outstanding[rollout] = 0

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal, as this group has left it."""
        key = (run_id, rollout)
        found = self._recent.heads.get(key) or self.store.head(run_id, rollout)
        if found is not None:
            self._recent.heads[key] = found
        return found

    def put_head(self, head: Head) -> None:
        """Move the end of a rollout's journal."""
        self._recent.heads[head.run_id, head.rollout_id] = head
        self._heads_dirty.add((head.run_id, head.rollout_id))

    def write(self, head: Head, events: Iterable[bytes]) -> None:
        """Add journal entries behind ``head.seq``."""
        self._entries.extend(
            Entry(head.key, head.seq + offset, event) for offset, event in enumerate(events)
        )

    # --- groups

    def flush(self) -> None:
        """Write everything this group has changed, so that queries see it."""
        store = self.store
        if self._fresh:
            store.insert(list(self._fresh.values()))
            self._fresh.clear()
        if self._dirty:
            store.update(list(self._dirty.values()))
            self._dirty.clear()
        if self._settled:
            store.settle(self._settled)
            self._settled = []
        if self._told:
            store.tell(self._numbered(self._told))
            self._told = []
        if self._buried:
            store.bury(self._buried)
            self._buried = []
        if self._heads_dirty:
            store.put_heads([self._recent.heads[key] for key in self._heads_dirty])
            self._heads_dirty.clear()
        if self._entries:
            store.write(self._entries)
            self._entries = []

    def _numbered(self, told: list[Told]) -> list[Told]:
        """Return events with their numbers, drawn in order."""
        return [one._replace(event_id=self.draw()) for one in told]

    def close_group(self) -> None:
        """Forget what only the group needed, and the oldest of the rest."""
        self._recent.take(self._group.values())
        self._group.clear()
        self._absent.clear()
        self.sync = False


def _add(counter: Counter[K], key: K, count: int) -> None:
    """Count, and forget what has come to nothing: runs come and go."""
    counter[key] += count
    if not counter[key]:
        del counter[key]
