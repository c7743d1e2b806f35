"""The ledger's books while it is open: what is in memory between store and decisions.

Kept here: rows in workers' hands (bounded by ``results_max``), counters, worker incarnations,
everything a group of requests has changed but not yet written, and a bounded number of what was
used last, since most of it is used again at once. The backlog is never here (B13).
After a failed commit the books are thrown away and read again from the store.

Invariant: ids, fences and event ids all come from ``draw``: ``epoch << 40 | counter``, the epoch
made durable before the first reply, so none ever comes back (I3).
"""

from collections.abc import Iterable
from typing import Literal

from stoker.broker.base import LedgerEvent, LedgerEventKind, LedgerLimits
from stoker.broker.counts import Counts, line_of
from stoker.broker.lineup import Lineup
from stoker.broker.rates import Bucket
from stoker.broker.recent import Recent
from stoker.broker.rows import (
    ACCEPTED,
    ACKNOWLEDGED,
    COMPLETED,
    LEASED,
    STARTED,
    Decision,
    Note,
    Queue,
    Row,
)
from stoker.broker.store import Enlisted, Entry, Head, Meta, Owner, Store, Told
from stoker.broker.unseen import Unseen
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId

COUNTER_BITS = 40
_OWNERS_KEPT = 4096
"""Of partitions that ended long ago, too: they are read again when somebody asks."""

_LATE, _REQUEUED, _TOLD_RESULT = (
    LedgerEventKind.LATE,
    LedgerEventKind.REQUEUED,
    LedgerEventKind.COMPLETED,
)
_DEAD = CompletionStatus.DEAD
_Change = Literal["update", "lease", "start", "complete", "acknowledge"]
"""How a changed row is written; all but the first write only what that step of its life changes."""
_STEPS: dict[tuple[ActionState, ActionState], _Change] = {
    (ACCEPTED, LEASED): "lease",
    (LEASED, STARTED): "start",
    (STARTED, COMPLETED): "complete",
    (COMPLETED, ACKNOWLEDGED): "acknowledge",
}
_FORWARD: frozenset[_Change] = frozenset({"lease", "start"})


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


class Books(Counts):
    """Working memory of an open ledger."""

    def __init__(self, store: Store, limits: LedgerLimits, meta: Meta, seen: float) -> None:
        self._recent = Recent()
        super().__init__(limits, self._recent.outstanding)
        self.store = store
        self.meta = meta
        self.counter = 0
        self.sync = False
        """The open group must survive a power cut before its replies go out."""
        self.transitions = 0
        self.token_due: float | None = None
        """Boot clock at which a remote service allows another lease that somebody waits for."""
        self.refusals: list[tuple[str, float, float]] = []
        """Of this group: service, when the refused action was handed out, seconds asked for."""
        self._hands: dict[ActionId, Row] = {}
        self._group = self._recent.rows
        """What this group has touched, and what was used last before it."""
        self._lineup = Lineup()
        self._unseen = Unseen()
        self._owners: dict[tuple[RunId, str], Owner] = {}
        self._absent: set[ActionId] = set()
        """Ids that this group has looked for in vain."""
        self._fresh: dict[ActionId, Row] = {}
        self._changed: dict[ActionId, tuple[_Change, Row]] = {}
        self._settled: list[Row] = []
        self._buried: list[Row] = []
        self._told: list[Told] = []
        self._entries: list[Entry] = []
        self._heads_dirty: set[tuple[RunId, RolloutId]] = set()
        self._heads_sought: set[tuple[RunId, RolloutId]] = set()
        """What this group has read; what is not known then has not begun."""
        self.results = store.results()
        self.next_due = store.next_due()
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.unwatched: list[WorkerId] = []
        """Incarnations whose silence nobody counts yet; ``expiry`` takes them."""
        self._load(seen)

    def _load(self, seen: float) -> None:
        for enlisted in self.store.workers():
            self.workers[enlisted.worker_id] = WorkerRecord(enlisted, seen)
            self.unwatched.append(enlisted.worker_id)
        for queue, state, parked_on, count in self.store.counts():
            self._count(queue, state, parked_on, count)
            if queue.holder is not None:
                self.worker(queue.holder, seen)
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

    # --- remote services

    def bucket(self, service: str) -> Bucket | None:
        """Return a service's bucket to decide by; ``None``: it was never used."""
        return self.meta.buckets.get(service)

    def put_bucket(self, service: str, bucket: Bucket) -> None:
        """Change a service's bucket."""
        self.meta.buckets = {**self.meta.buckets, service: bucket}

    def buckets(self) -> dict[str, Bucket]:
        """Return every bucket there is, to look at."""
        return self.meta.buckets

    # --- rows

    def rows(self, ids: Iterable[ActionId]) -> dict[ActionId, Row]:
        """Return the current rows of known ids."""
        found: dict[ActionId, Row] = {}
        missing: list[ActionId] = []
        for i in ids:
            row = self._hands.get(i) or self._group.get(i)
            if row is not None:
                found[i] = row
            elif i not in self._absent:
                missing.append(i)
        if missing:
            for row in self.store.rows(missing):
                self._recent.keep(row)
                found[row.action_id] = row
            self._absent.update(i for i in missing if i not in found)
        return found

    def row(self, action_id: ActionId) -> Row | None:
        """Return the current row of one id."""
        row = self._hands.get(action_id) or self._group.get(action_id)
        if row is None and action_id not in self._absent:
            row = self.rows((action_id,)).get(action_id)
        return row

    def current(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows as this group has left them."""
        return [self._hands.get(r.action_id) or self._group.get(r.action_id) or r for r in rows]

    def add(self, row: Row) -> None:
        """Take a newly accepted row."""
        self._fresh[row.action_id] = row
        self._account(None, row)
        known = self._line_up(None, row)
        self._recent.keep(row, again=known)  # from behind a backlog it is read with its queue
        self.transitions += 1

    def apply(self, old: Row, decision: Decision) -> Row:
        """Write a decision down: row, counters, events."""
        row = decision.row
        if row is not old:
            self._replace(old, row)
        for note in decision.notes:
            self._note(row, note)
        return row

    def _note(self, row: Row, note: Note) -> None:
        kind, action = note.kind, row.action
        self._told.append(
            Told(
                self._event_id(),
                action.run_id,
                row.partition,
                kind,
                row.order,
                action.action_id,
                action.rollout_id,
                note.detail,
                note.completion if kind is _LATE else None,
            )
        )
        self.events_seq += 1
        if kind is not _TOLD_RESULT:
            self.meta.late += kind is _LATE
            self.meta.retries += kind is _REQUEUED

    def _event_id(self) -> int:
        return self.draw()

    def _replace(self, old: Row, row: Row) -> None:
        self.transitions += 1
        action_id = row.action.action_id
        step = _STEPS.get((old.state, row.state), "update")
        if action_id in self._fresh:
            self._fresh[action_id] = row
        else:
            again = action_id in self._changed
            self._changed[action_id] = ("update" if again else step, row)
        if step in _FORWARD:
            self._forward(old, row)
            return
        self._recent.keep(row)
        self._account(old, row)
        self._line_up(old, row)
        self._hand_over(old, row)
        if row.state is COMPLETED and not old.terminal:
            self._settle(row)
        elif step == "acknowledge":
            self._buried.append(row)

    def _forward(self, old: Row, row: Row) -> None:
        """Keep the books of a lease or a start: of little else, and of these there are the most."""
        self._count_step(old, row)
        action_id = row.action.action_id
        if old.state is ACCEPTED:
            self._lineup.discard(old)
        self._group.pop(action_id, None)  # from here on it is in hands
        self._hands[action_id] = row

    def _settle(self, row: Row) -> None:
        self._settled.append(row)
        self.sync = True  # a result must not be undone once anybody has seen it (I13)
        assert row.settled_status is not None
        totals, status = self.meta.completions, row.settled_status
        totals[status] = totals.get(status, 0) + 1
        self.meta.dead += status is _DEAD
        if self.parked_rollouts:
            self.relieved.add(row.action.rollout_id)

    def _line_up(self, old: Row | None, row: Row) -> bool:
        """Keep the queues in memory; called when ``row`` has been counted.

        Returns whether it stands in one.
        """
        if old is not None and old.state is ACCEPTED:
            self._lineup.discard(old)
        if row.state is not ACCEPTED:
            return False
        action = row.action
        others = self.waiting[line_of(action.worker_class, action.run_id)] - 1
        return self._lineup.add(row, others)

    def _hand_over(self, old: Row, row: Row) -> None:
        before, after, action_id = old.bearer, row.bearer, row.action.action_id
        if before is not None:
            record = self.workers[before]
            if after != before:
                record.named.pop(action_id, None)
                record.untold.pop(action_id, None)
            elif row.reclaim_fence and not old.reclaim_fence:
                record.untold[action_id] = row.reclaim_fence
        if after is not None:
            self._hands[action_id] = row
        elif before is not None:
            del self._hands[action_id]
        if before != after or row.reclaim_fence != old.reclaim_fence:
            self.work_seq += 1

    def hand(self, row: Row, now_boot: float) -> None:
        """Note that a worker has just been given ``row``."""
        assert row.worker is not None, f"{row.action_id} was given to nobody"
        self.workers[row.worker].named[row.action_id] = now_boot

    def head_of(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue, as this group has left it."""
        known = self._lineup.head(
            queue, limit, self.waiting[line_of(queue.worker_class, queue.run_id)]
        )
        if known is not None:
            return known
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

    def outstanding(self, rollout: RolloutId) -> int:
        """Count a rollout's unfinished actions, less those parked for its own cap."""
        self.learn_outstanding((rollout,))
        return self._recent.outstanding[rollout]

    def learn_outstanding(self, rollouts: Iterable[RolloutId]) -> None:
        """Count for many rollouts at once what ``outstanding`` would flush for one by one."""
        counts = self._recent.outstanding
        unknown = [rollout for rollout in dict.fromkeys(rollouts) if rollout not in counts]
        if unknown:
            self.flush()
            counts.update(self.store.outstanding(unknown))

    def begin(self, rollout: RolloutId) -> None:
        """Note that a rollout begins: nothing needs to be read to know that it has no actions."""
        self._recent.outstanding[rollout] = 0

    # --- owners and events

    def owner(self, run_id: RunId, partition: str) -> Owner | None:
        """Return who owns a partition."""
        found = self._owners.get((run_id, partition))
        if found is None:
            found = self.store.owner(run_id, partition)
            if found is not None:
                self._owners[run_id, partition] = found
        return found

    def put_owner(self, owner: Owner) -> None:
        """Write who owns a partition."""
        self.store.put_owner(owner)
        self._owners[owner.run_id, owner.partition] = owner

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return what a partition was told after ``after``; what was passed may be forgotten."""
        self.flush()
        key, unseen = (run_id, partition), self._unseen
        found = unseen.after(key, after, limit)
        if after and not unseen.calm(key):
            self.store.forget_passed(run_id, partition, after)
            unseen.passed(key, after)
        if found is None:
            found = self.store.told(run_id, partition, after, limit)
            unseen.watch(key, self.meta.epoch << COUNTER_BITS | self.counter)
        return found

    def bury_told(self, row: Row) -> None:
        """Forget an action's events: its coordinator has acknowledged it after hearing them."""
        self.store.forget_late([row.order])
        self._unseen.bury(row.action.action_id)

    def revive(self, row: Row) -> None:
        """Give a row new times; its result and its events so far go."""
        self.store.revive([row])
        self._unseen.bury(row.action.action_id)

    # --- journal

    def head(self, run_id: RunId, rollout: RolloutId) -> Head | None:
        """Return the end of a rollout's journal, as this group has left it."""
        self.learn_heads(run_id, (rollout,))
        return self._recent.heads.get((run_id, rollout))

    def learn_heads(self, run_id: RunId, rollouts: Iterable[RolloutId]) -> None:
        """Read at once what ``head`` would read one by one."""
        heads, sought = self._recent.heads, self._heads_sought
        keys = [(run_id, rollout) for rollout in rollouts]
        unknown = [key for key in keys if key not in heads and key not in sought]
        if unknown:
            sought.update(unknown)
            found = self.store.ends(run_id, [rollout for _, rollout in unknown])
            heads.update(((run_id, head.rollout_id), head) for head in found)

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
        if self._changed:
            self._write_changed()
        if self._settled:
            store.settle(self._settled)
            self._settled = []
        if self._told:
            self._tell(self._told)
            self._told = []
        if self._buried:
            store.bury(self._buried)
            for row in self._buried:
                self._unseen.bury(row.action.action_id)
            self._buried = []
        if self._heads_dirty:
            store.put_heads([self._recent.heads[key] for key in self._heads_dirty])
            self._heads_dirty.clear()
        if self._entries:
            store.write(self._entries)
            self._entries = []

    def _write_changed(self) -> None:
        changed: dict[_Change, list[Row]] = {}
        for change, row in self._changed.values():
            changed.setdefault(change, []).append(row)
        for change, rows in changed.items():
            getattr(self.store, change)(rows)
        self._changed.clear()

    def _tell(self, told: list[Told]) -> None:
        self.store.tell(told)
        for one in told:
            completed = one.kind is _TOLD_RESULT
            result = self._group[one.action_id].completion if completed else one.completion
            self._unseen.add(one, result)

    def close_group(self) -> None:
        """Forget what only the group needed, and the oldest of the rest."""
        self._recent.trim()
        if len(self._owners) > _OWNERS_KEPT:
            self._owners.clear()
        self._absent.clear()
        self._heads_sought.clear()
        self.sync = False
