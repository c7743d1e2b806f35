"""One group's books: what the embedded engine keeps in memory, read from rows and written back.

Other gateways change the same ledger, so nothing here outlives the group. Counters are sums over
the gateways' rows; where a cap could be reached by groups that run side by side, groups run one
after another instead (``tight``), so caps are as exact as with one process.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from stoker.broker.base import EventsRequest, LeaseRequest, LedgerEvent, LedgerLimits, Poll
from stoker.broker.books import Books, WorkerRecord
from stoker.broker.postgres.arrays import Blobs, Floats, Ints, Texts, columns
from stoker.broker.postgres.known import Trusted
from stoker.broker.postgres.needs import Needs, demand, texts
from stoker.broker.postgres.store import PostgresStore, as_enlisted, as_head
from stoker.broker.postgres.wire import Result
from stoker.broker.rates import Bucket
from stoker.broker.rows import Decision, ParkedOn, Queue, Row
from stoker.broker.store import Enlisted, Head, Meta
from stoker.broker.store_sqlite_rows import STATE_NUMBERS, STATES, encode
from stoker.model.action import ActionState
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId

GROUP_MAX = 512
"""Submits, and leases, of one group that runs beside others'."""
_OTHERS = WorkerId("others")
"""Stands for every holder that this group has not asked for."""
_QUEUE_CHUNK = 64
STREAMED_ROWS = 128
"""Changed by a group so far: the server is given them while the rest is decided."""
_NO_PLACE = (-(2**62), 0)
_NOT_PARKED = ParkedOn.NOTHING


_decode_missing = msgspec.msgpack.Decoder(dict[ActionId, float]).decode
_decode_bucket = msgspec.msgpack.Decoder(Bucket).decode
Key = tuple[Queue, ActionState, ParkedOn]
GAUGES = {4: "results", 6: "alone", 7: "reclaims"}
"""Counters of the ledger as a whole, under numbers that no waiting or held action's state has."""


class Beat(WorkerRecord):
    """One worker incarnation as its heartbeat row has it."""

    def __init__(self, enlisted: Enlisted, seen: float) -> None:
        super().__init__(enlisted, seen)
        self.beat = 0.0
        """When it last sent a heartbeat; all it held then were named, but for ``missing``."""
        self.missing: dict[ActionId, float] = {}
        self.stored: tuple[float, dict[ActionId, float], bool] = (0.0, {}, False)

    def read(self, found: tuple[object, ...]) -> None:
        """Take over a heartbeat row."""
        _, self.seen, self.beat, missing, lost = found  # type: ignore[assignment]
        self.missing = _decode_missing(missing) if isinstance(missing, bytes) else {}
        self.lost = bool(lost)
        self.stored = (self.beat, self.missing, self.lost)

    def named_at(self, row: Row) -> float:
        """Return when this worker last named ``row``, or was given it."""
        handed = row.accepted_boot + row.queue_seconds
        return self.missing.get(row.action_id, max(handed, self.beat))


class GroupBooks(Books):
    """Working memory of one group of requests."""

    store: PostgresStore

    def __init__(
        self, store: PostgresStore, limits: LedgerLimits, meta: Meta, now: float, slot: int
    ) -> None:
        self.alone = 0
        self.reclaims = 0
        self.serial = True
        """No other gateway's group runs now; counters are exact."""
        self.given = 0
        self._now = now
        self._slot = slot
        self._hands_known: set[WorkerId] = set()
        self._queues: dict[Queue, list[Row]] = {}
        self._queue_ends: dict[Queue, tuple[int, int] | None] = {}
        self._changes: Counter[Key] = Counter()
        self._gauges_before: list[int] = []
        self._demand: dict[str, int] = {}
        self._buckets_locked = False
        self._buckets_changed: set[str] = set()
        self._totals_before: dict[str, int] = {}
        self._inputs: list[Row] = []
        super().__init__(store, limits, meta, now)

    def bucket(self, service: str) -> Bucket | None:
        """Return a service's bucket; all of them are locked at once, so that no order can clash.

        What this group has to tell is written first: buckets come after partitions.
        """
        if not self._buckets_locked:
            self.flush()
            self._buckets_locked = True
            names = texts(self.limits.services)
            found = self.store.all("lock_buckets", names)
            if len(found) < len(self.limits.services):
                self.store.run("add_buckets", (names,))
                found = self.store.all("lock_buckets", names)
            self.meta.buckets = read_buckets(found)
        return super().bucket(service)

    def put_bucket(self, service: str, bucket: Bucket) -> None:
        """Change a service's bucket."""
        super().put_bucket(service, bucket)
        self._buckets_changed.add(service)

    def buckets(self) -> dict[str, Bucket]:
        """Return every bucket there is, without a lock."""
        if not self._buckets_locked:
            self.meta.buckets = read_buckets(self.store.all("buckets"))
        return self.meta.buckets

    def _load(self, seen: float) -> None:  # noqa: ARG002 - Books gives it
        for cls, run_id, state, parked_on, suspect, held, count in self.store.counters:
            if not cls:
                name = GAUGES[state]
                setattr(self, name, getattr(self, name) + count)
                continue
            queue = Queue(cls, RunId(run_id), _OTHERS if held else None, bool(suspect))
            self._count(queue, STATES[state], ParkedOn(parked_on), count)
        self._changes.clear()
        self._gauges_before = [getattr(self, name) for name in GAUGES.values()]

    def _count(self, queue: Queue, state: ActionState, parked_on: ParkedOn, count: int) -> None:
        super()._count(queue, state, parked_on, count)
        self._changes[queue, state, parked_on] += count

    def _line_up(self, old: Row | None, row: Row) -> bool:  # noqa: ARG002 - kept nowhere
        """Other gateways change the queues as well."""
        return False

    def _count_step(self, old: Row, new: Row) -> None:
        super()._count_step(old, new)
        queue, changes = new.queue, self._changes
        changes[queue, old.state, _NOT_PARKED] -= 1
        changes[queue, new.state, _NOT_PARKED] += 1

    def _forward(self, old: Row, row: Row) -> None:
        self._recent.keep(row)
        self._count_step(old, row)
        self._hand_over(old, row)

    def _counted(self) -> list[tuple[object, ...]]:
        """Return by how much this group changed each counter."""
        summed: Counter[tuple[object, ...]] = Counter()
        for (queue, state, parked_on), n in self._changes.items():
            held, number = queue.holder is not None, STATE_NUMBERS[state]
            place = (queue.worker_class, queue.run_id, number, parked_on.value)
            summed[*place, int(queue.suspect), int(held)] += n
        changes: list[tuple[object, ...]] = [(*key, n) for key, n in summed.items() if n]
        for (number, name), before in zip(GAUGES.items(), self._gauges_before, strict=True):
            if getattr(self, name) != before:
                changes.append(("", "", number, "", 0, 0, getattr(self, name) - before))
        return sorted(changes)

    def _totals(self) -> dict[str, int]:
        meta = self.meta
        return {
            "deliveries": meta.deliveries,
            "attempts": meta.attempts,
            "retries": meta.retries,
            "late": meta.late,
            "dead": meta.dead,
            "transitions": self.transitions,
            **{f"completed:{status}": n for status, n in meta.completions.items()},
        }

    def tight(self, gateways: int) -> bool:
        """Whether groups that run side by side could together pass a cap."""
        margin = max(0, gateways - 1) * GROUP_MAX
        if not margin:
            return False
        limits = self.limits
        caps = (
            (limits.queued_max, self.queued),
            (limits.queued_per_class_max, max(map(self.class_queued, self.states), default=0)),
            (limits.results_max, self.results + self.busy),
            (limits.queued_per_run_max, max(self.run_queued.values(), default=0)),
            (limits.leased_per_run_max, max(self.run_out.values(), default=0)),
        )
        parked = self.parked_rollouts or self.parked_runs or self.parked_caps
        return bool(parked) or any(
            most is not None and count + margin > most for most, count in caps
        )

    # --- reading ahead

    def read_ahead(self, needs: Needs, trusted: Trusted, found: dict[str, Result]) -> None:
        """Take in what ``ahead`` has locked and read, and what need not be."""
        store = self.store
        store.rely(trusted)
        self._group |= trusted.rows
        self._recent.heads |= trusted.heads
        store.drawn(found.get("draw", []))
        store.own(found.get("lock_owners", []))
        unheard = needs.holders - {WorkerId(c[0]) for c in found.get("lock_holders", [])}
        beats = [
            *(store.all("hear", self._now, texts(unheard)) if unheard else ()),
            *found.get("lock_replaced", []),
            *found.get("hear", []),
            *found.get("lock_holders", []),
            *found.get("lock_polling", []),
        ]
        # Whoever polls and is somebody else's now is asked for again, by a lock where that matters.
        free = {WorkerId(c[0]) for c in found.get("lock_polling", [])}
        self._take_workers(
            [*needs.replaced, *needs.heard, *needs.holders, *free],
            beats,
            found.get("workers_named", []),
        )
        for end in found.get("read_heads", []):
            head = as_head(end)
            self._recent.heads[head.run_id, head.rollout_id] = head
        self._heads_sought |= needs.heads | needs.moves
        for row in store.held(found.get("lock_rows", [])):
            self._group[row.action_id] = row
        self._absent |= (needs.actions | needs.steps | needs.fresh) - self._group.keys()
        self._recent.outstanding |= dict.fromkeys(needs.submitting, 0)
        self._recent.outstanding |= {RolloutId(r): n for r, n in found.get("outstanding", [])}

    def expect(self, polls: Sequence[Poll]) -> None:
        """Read the workers of polls that are about to be asked for, and what is held for them."""
        asking = {one.worker_id for one in polls if isinstance(one, LeaseRequest)}
        for worker_class, slots in demand(polls).items():
            self._demand[worker_class] = self._demand.get(worker_class, 0) + slots
        listening = [one for one in polls if isinstance(one, EventsRequest)]
        if listening:
            self.flush()
            self.store.told_ahead(listening)
        if not asking:
            return
        strangers = [w for w in asking if w not in self.workers]
        if strangers:
            names = texts(strangers)
            beats, enlisted = self.store.together(
                (("lock_polling", (names,)), ("workers_named", (names,)))
            )
            self._take_workers(strangers, beats, enlisted)
        if any(count for count in self.suspects.values()):
            self.read_all_workers()
        if any(count for count in self.held.values()):
            self._count_held(asking)
        if self.reclaims:
            self.flush()
            for worker, action_id, fence in self.store.all("untold", texts(asking)):
                self.workers[WorkerId(worker)].untold[ActionId(action_id)] = fence

    def _count_held(self, asking: set[WorkerId]) -> None:
        self.flush()
        found = {(c, WorkerId(h)): n for c, h, n in self.store.all("held_counts", texts(asking))}
        for worker_class in {c for c, _ in self.held}:
            for worker in asking:
                self.held[worker_class, worker] = found.get((worker_class, worker), 0)

    def _take_workers(self, asked: Iterable[WorkerId], beats: Result, enlisted: Result) -> None:
        known = {one.worker_id: one for one in map(as_enlisted, enlisted)}
        rows = {found[0]: found for found in beats}
        for worker_id in asked:
            if worker_id in self.workers:
                continue
            stranger = Enlisted(worker_id, str(worker_id), {}, ended=False)
            record = Beat(known.get(worker_id, stranger), self._now)
            if worker_id in rows:
                record.read(rows[worker_id])
            elif worker_id in known:
                record.lost = True  # somebody else is deciding about it now: nothing is given to it
                record.stored = (record.beat, record.missing, record.lost)
            self.workers[worker_id] = record

    def read_all_workers(self) -> None:
        """Look at every incarnation, without a lock."""
        beats, enlisted = self.store.together((("heartbeats", ()), ("workers", ())))
        everybody = [WorkerId(c[0]) for c in beats] + [WorkerId(c[0]) for c in enlisted]
        self._take_workers(everybody, beats, enlisted)

    def worker(self, worker_id: WorkerId, seen: float) -> Beat:
        """Return an incarnation, locked; one that never enrolled has a lease's time."""
        if worker_id not in self.workers:
            names = texts([worker_id])
            beats, enlisted = self.store.together(
                (("lock_replaced", (names,)), ("workers_named", (names,)))
            )
            if not beats:
                beats = self.store.all("hear", seen, names)
            self._take_workers([worker_id], beats, enlisted)
        record = self.workers[worker_id]
        assert isinstance(record, Beat), "workers of a group come from rows"
        return record

    # --- rows

    def draw(self) -> int:
        """Return an id above all that were drawn when this group's newest lock was taken."""
        return self.store.draw(at_least=min(GROUP_MAX, sum(self._demand.values())))

    def rows(self, ids: Iterable[ActionId]) -> dict[ActionId, Row]:
        """Return the rows of known ids, locked."""
        wanted = list(ids)
        missing = [i for i in wanted if i not in self._group and i not in self._absent]
        if missing:
            for row in self.store.lock_rows(missing):
                self._group[row.action_id] = row
            self._absent.update(i for i in missing if i not in self._group)
        return {i: self._group[i] for i in wanted if i in self._group}

    def read_results(self, ids: Sequence[ActionId]) -> None:
        """Add the results of these actions to their rows."""
        self.flush()
        known = self.rows(ids)
        for row in self.store.rows(ids):
            if row.completion is not None:
                kept = replace(known[row.action_id], completion=row.completion)
                self._group[row.action_id] = kept

    def in_hands(self, worker: WorkerRecord) -> list[Row]:
        """Return what is in a worker's hands, locked."""
        worker_id = worker.enlisted.worker_id
        if worker_id not in self._hands_known:
            self._hands_known.add(worker_id)
            for row in self.store.lock("lock_in_hands", *[worker_id] * 4):
                self._group.setdefault(row.action_id, row)
        return [row for row in self._group.values() if row.bearer == worker_id]

    def runs_alone(self, worker: WorkerRecord) -> bool:
        """Whether a worker has a lease that tolerates no other beside it."""
        return self.alone > 0 and super().runs_alone(worker)

    def results_room(self) -> int:
        """Return how many more leases this group may give."""
        room = super().results_room()
        return room if self.serial else min(room, GROUP_MAX - self.given)

    def hand(self, row: Row, now_boot: float) -> None:
        """Count a lease."""
        super().hand(row, now_boot)
        self.given += 1

    @property
    def cut_short(self) -> bool:
        """Whether polls may have got nothing only because this group gave all it might."""
        return not self.serial and self.given >= GROUP_MAX

    def head_of(self, queue: Queue, limit: int) -> list[Row]:
        """Return the head of one queue: locked rows, and what this group put into it."""
        known = self._queues.setdefault(queue, [])
        head = self._queue_now(queue)
        while len(head) < limit and self._queue_ends.setdefault(queue, _NO_PLACE) is not None:
            chunk = 1 if queue.suspect else self._chunk(queue.worker_class)
            wanted = max(limit - len(head), chunk)
            more = self.store.lock_queued(queue, self._queue_ends[queue] or _NO_PLACE, wanted)
            known += more
            last = more[-1] if len(more) == wanted else None
            self._queue_ends[queue] = (-last.action.priority, last.order) if last else None
            head = self._queue_now(queue)
        return head[:limit]

    def _chunk(self, worker_class: str) -> int:
        """Return how many to lock at once: other polls of this group want some too."""
        lines = sum(line.worker_class == worker_class for line in self.waiting) or 1
        share = self._demand.get(worker_class, 1) // lines
        return max(1, min(_QUEUE_CHUNK, share, self.results_room()))

    def _queue_now(self, queue: Queue) -> list[Row]:
        found = {row.action_id: row for row in self._queues[queue]}
        for row in self._group.values():
            if row.action_id in found or row.queue == queue:
                found[row.action_id] = row
        waiting = [r for r in found.values() if r.state is ActionState.ACCEPTED]
        return sorted(waiting, key=lambda row: (-row.action.priority, row.order))

    def told(self, run_id: RunId, partition: str, after: int, limit: int) -> list[LedgerEvent]:
        """Return what a partition was told; other gateways tell it as well."""
        self.flush()
        if after:
            self.store.forget_passed(run_id, partition, after)
        return self.store.told(run_id, partition, after, limit)

    def _hand_over(self, old: Row, row: Row) -> None:
        self.alone += (row.live and row.alone) - (old.live and old.alone)
        self.reclaims += bool(row.reclaim_fence) - bool(old.reclaim_fence)
        left = old.bearer is not None and old.bearer != row.bearer
        if left or row.reclaim_fence != old.reclaim_fence:  # a lease makes nothing answerable
            self.work_seq += 1

    # --- writing

    def flush(self) -> None:
        """Send everything this group has changed; what is asked next sees it."""
        with self.store.streamed():
            if self._heads_dirty:  # rollouts come before actions in the order of locks
                self.store.put_heads([self._recent.heads[key] for key in self._heads_dirty])
                self._heads_dirty.clear()
            if self._inputs:
                self.store.insert_inputs(self._inputs)
                self._inputs = []
            super().flush()

    def add(self, row: Row) -> None:
        """Take a newly accepted row."""
        super().add(row)
        self._inputs.append(row)

    def write(self, head: Head, events: Iterable[bytes]) -> None:
        """Add journal entries behind ``head.seq``."""
        super().write(head, events)
        if len(self._entries) >= 4 * STREAMED_ROWS:
            self.stream()

    def apply(self, old: Row, decision: Decision) -> Row:
        """Write a decision down: row, counters, events."""
        row = super().apply(old, decision)
        if len(self._changed) >= STREAMED_ROWS:
            self.stream()
        return row

    def stream(self) -> None:
        """Send what is decided, but for what would be dearer or wrong before the group's end.

        New rows are often leased by the same group, and are then written once; events come last,
        since they are numbered under the locks of partitions, and whatever forgets events behind
        them.
        """
        fresh, self._fresh = self._fresh, {}
        told, self._told = self._told, []
        buried, self._buried = self._buried, []
        if not told:
            self._buried, buried = buried, []
        self.flush()
        self._fresh, self._told, self._buried = fresh, told, buried

    def _event_id(self) -> int:
        return 0  # the server numbers them: no id can be drawn amid a pipeline

    def write_counters(self, *, synced: bool) -> None:
        """Add what this group changed to this gateway's counters, and workers to their rows."""
        for service in sorted(self._buckets_changed):
            self.store.run("put_bucket", (encode(self.meta.buckets[service]), service))
        beats = [r for r in self.workers.values() if isinstance(r, Beat) and r.stored != _beat(r)]
        changed = self._counted()
        added = [(k, n - self._totals_before.get(k, 0)) for k, n in self._totals().items()]
        added = sorted(one for one in added if one[1])
        if changed or added:
            added += [("commits", 1), ("syncs", int(synced))]
        if beats:
            self.store.run("put_heartbeats", _beat_columns(beats))
        if changed:
            self.store.run("count", (self._slot, *columns("ttqtqqq", changed)))
        if added:
            names, counts = zip(*added, strict=True)
            self.store.run("count_total", (self._slot, Texts(names), Ints(counts)))

    def read_totals(self) -> None:
        """Read what all gateways did so far, for whoever asks for statistics."""
        found: dict[str, int] = dict(self.store.all("totals"))
        meta = self.meta
        for name in ("deliveries", "attempts", "retries", "late", "dead"):
            setattr(meta, name, getattr(meta, name) + found.get(name, 0))
        for name, n in found.items():
            if name.startswith("completed:"):
                status = name.removeprefix("completed:")
                meta.completions[status] = meta.completions.get(status, 0) + n
        self.transitions += found.get("transitions", 0)
        self._totals_before = found
        self.store.commits, self.store.syncs = found.get("commits", 0), found.get("syncs", 0)


def read_buckets(found: Result) -> dict[str, Bucket]:
    """Return the buckets that were ever used."""
    return {name: _decode_bucket(state) for name, state in found if state is not None}


def _beat(record: Beat) -> tuple[float, dict[ActionId, float], bool]:
    return (record.beat, record.missing, record.lost)


def _beat_columns(beats: Sequence[Beat]) -> tuple[object, ...]:
    return (
        Texts([record.enlisted.worker_id for record in beats]),
        Floats([record.beat for record in beats]),
        Blobs([encode(record.missing) if record.missing else None for record in beats]),
        Ints([int(record.lost) for record in beats]),
    )
