"""A small world round a ledger, every step of which can be taken from every state: for the search.

One coordinator after another, workers, a tool that counts what really happens to it, and budgets
for what goes wrong: replies lost, workers killed or stopped, the ledger's process killed, power
cut, time passing. The ledger is the production service over a store that forgets what was not
synced. Every step checks what it was answered; ``check`` compares the whole with what was promised.
"""

import copy
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendDisposition,
    Attach,
    Cancel,
    CancelDisposition,
    CompleteDisposition,
    CompleteRequest,
    Durability,
    Enroll,
    EventsRequest,
    HeartbeatRequest,
    Held,
    HoldVerdict,
    Lease,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    StartRequest,
)
from stoker.broker.expiry import Expiry
from stoker.broker.rows import Row
from stoker.broker.service import LedgerService
from stoker.broker.store import Enlisted, Head, Owner, Told
from stoker.errors import LedgerFenced, LedgerRefused
from stoker.model.action import Action, ActionState, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, WorkerId
from stoker.seams.clock import Instant
from support.ledger import ROLLOUT, RUN
from support.ledger_crash import PowerStore
from support.ledger_model import Model

LIMITS = LedgerLimits(
    queued_max=4, results_max=2, outstanding_per_rollout_max=4, lease_seconds=10.0
)
TICK = 10.5
"""A silent worker is lost after one tick."""
NUMBERS_FROM = 1 << 40
"""Ids and fences: only their order means anything."""

for shared in (Row, Action, Completion, Lease, Enlisted, Head, Owner, Told):
    # Immutable, so a copied world shares them; a copy costs a tenth.
    copy._deepcopy_dispatch[shared] = lambda value, _memo: value  # type: ignore[attr-defined]


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """How often each thing may still happen."""

    lost_replies: int = 0
    deaths: int = 0
    kills: int = 0
    """Of the ledger's process; the disk keeps everything."""
    power_cuts: int = 0
    ticks: int = 0
    cancels: int = 0
    takeovers: int = 0
    repeats: int = 1
    """Completions sent again, each."""


class Work(msgspec.Struct):
    """One lease as its worker knows it."""

    lease: Lease
    begun: bool = False
    """The tool was touched."""
    sent: int = 0
    """Completions sent."""


class Step(NamedTuple):
    """One thing that happens next."""

    what: str
    whom: str = ""
    which: int = 0


CALM = Step("calm until every deadline has passed")
"""Taken from every state; what comes after it is not explored."""


class World:
    """One state; ``taken`` returns the next."""

    def __init__(self, actions: list[Action], workers: int, budgets: Budgets) -> None:
        self.now = Instant(1_000.0, 1_700_000_000.0)
        self.budgets = budgets
        self.store = PowerStore()
        self.service = LedgerService(self.store, LIMITS, Durability.POWER_SAFE)
        self.service.open(self.now, boot_id="boot", lineage="lin_world")
        self.hands: dict[WorkerId, list[Work]] = {}
        self.effects: dict[ActionId, list[Fence]] = {}
        """The oracle at the tool: every time it was really touched, by which lease."""
        self.applied: dict[ActionId, tuple[CompletionStatus, Fence]] = {}
        """What coordinators have applied under their fence."""
        self.model = Model(LIMITS)
        self.fence = Fence(0)
        self.stale: Fence | None = None
        """Of the coordinator that was fenced."""
        self.seq = 0
        self.power_lost = False
        self.attach()
        for number in range(workers):
            self.enroll(WorkerId(f"w{number}"))
        self.append(submits=tuple(actions))
        self.model.accepted |= {action.action_id for action in actions}
        self.check()

    def twin(self) -> "World":
        """Return a copy that goes its own way."""
        other: World = object.__new__(World)
        store = copy.copy(self.store)
        store.copy_tables_of(self.store)
        service = LedgerService(store, LIMITS, Durability.POWER_SAFE)
        memo: dict[int, Any] = {id(self.store): store, id(LIMITS): LIMITS}
        service._books = copy.deepcopy(self.service._books, memo)
        service._expiry = Expiry.__new__(Expiry)
        service._expiry._books = service._books
        service._expiry._calm_until = self.service._expiry._calm_until
        service._expiry._watch = list(self.service._expiry._watch)
        service._grace_until = self.service._grace_until
        service._meta_stored = self.service._meta_stored
        other.now, other.budgets, other.store, other.service = (
            self.now, self.budgets, store, service
        )  # fmt: skip
        other.hands = {w: [copy.copy(work) for work in held] for w, held in self.hands.items()}
        other.effects = {action: list(fences) for action, fences in self.effects.items()}
        other.applied = dict(self.applied)
        other.model = self.model.twin()
        other.fence, other.stale, other.seq = self.fence, self.stale, self.seq
        other.power_lost = False
        return other

    # --- what can happen

    def steps(self) -> Iterator[Step]:
        """Yield everything that can happen next."""
        left = self.budgets
        for worker, held in self.hands.items():
            yield from self._worker_steps(worker, held)
        if left.ticks:
            yield from (Step("tick", worker) for worker in ("", *self.hands))
        if left.kills:
            yield Step("kill the ledger")
        if left.power_cuts:
            yield Step("cut the power")
        if left.takeovers:
            yield Step("take over")
        for number, row in enumerate(self.rows()):
            if row.state is ActionState.COMPLETED:
                yield Step("apply", "", number)
            if left.cancels and not row.terminal:
                yield Step("cancel", "", number)

    def _worker_steps(self, worker: WorkerId, held: list[Work]) -> Iterator[Step]:
        may_be_lost = ("", ", reply lost") if self.budgets.lost_replies else ("",)
        if all(work.sent for work in held):
            yield from (Step(f"lease{lost}", worker) for lost in may_be_lost)
        for number, work in enumerate(held):
            if not work.begun and not work.sent:
                yield Step("release", worker, number)
                yield from (Step(f"start{lost}", worker, number) for lost in may_be_lost)
            elif work.begun and work.sent <= self.budgets.repeats:
                yield Step("complete", worker, number)
        if self.budgets.deaths:
            yield Step("die", worker)

    def taken(self, step: Step) -> "World":
        """Return the world after ``step``, with every promise checked."""
        world = self.twin()
        world._take(step)
        world.check()
        return world

    def _take(self, step: Step) -> None:
        if step.whom:
            self._take_of_worker(WorkerId(step.whom), step)
            return
        match step.what:
            case CALM.what:
                self.calm()
            case "tick":
                self._spend("ticks")
                self.tick(None)
            case "kill the ledger" | "cut the power":
                self.crash(power=step.what == "cut the power")
            case "take over":
                self._spend("takeovers")
                self.stale = self.fence
                self.attach()
            case "apply":
                self.apply(self.rows()[step.which].action_id)
            case "cancel":
                self._spend("cancels")
                self.cancel(self.rows()[step.which].action_id)

    def _take_of_worker(self, worker: WorkerId, step: Step) -> None:
        match step.what:
            case "lease" | "lease, reply lost":
                self.lease(worker, lost=self._spent("lost_replies", step))
            case "start" | "start, reply lost":
                self.start(worker, step.which, lost=self._spent("lost_replies", step))
            case "release":
                work = self.hands[worker].pop(step.which)
                self.ask(ReleaseRequest(worker_id=worker, held=_held(work)))
            case "complete":
                self.complete(worker, self.hands[worker][step.which])
            case "tick":
                self._spend("ticks")
                self.tick(worker)
            case "die":
                self._spend("deaths")
                del self.hands[worker]
                self.enroll(WorkerId(f"{worker}'"), replaces=worker)

    def _spent(self, budget: str, step: Step) -> bool:
        lost = step.what.endswith("reply lost")
        if lost:
            self._spend(budget)
        return lost

    def _spend(self, budget: str) -> None:
        self.budgets = replace(self.budgets, **{budget: getattr(self.budgets, budget) - 1})

    # --- the parties

    def ask(self, request: Any) -> Any:
        self.service.begin()
        try:
            return self.service.handle(request, self.now)
        finally:
            self.service.settle(self.now)
            self.service.commit()

    def attach(self) -> None:
        attached = self.ask(Attach(run_id=RUN, incarnation=f"c{self.model.last_fence}"))
        self.model.fence(attached.fence)
        self.fence = attached.fence
        head = self.store.head(RUN, ROLLOUT)
        self.seq = head.seq if head else 0

    def append(self, *, submits: tuple[Action, ...] = (), acks: tuple[ActionId, ...] = ()) -> None:
        one = Append(
            rollout_id=ROLLOUT,
            expected_seq=self.seq,
            events=(b"e",),
            submits=submits,
            acknowledges=acks,
        )
        batch = AppendBatch(run_id=RUN, fence=self.fence, appends=(one,))
        [reply] = self.ask(batch).replies
        assert reply.disposition is AppendDisposition.APPLIED
        [again] = self.ask(batch).replies
        assert again.disposition is AppendDisposition.ALREADY, "repeating changes nothing (I11)"
        assert [str(d) for d in again.submits] == ["duplicate"] * len(submits), "I7"
        self.seq = reply.seq

    def enroll(self, worker: WorkerId, replaces: WorkerId | None = None) -> None:
        self.hands[worker] = []
        self.ask(Enroll(worker_id=worker, name=worker, slots={"fast": 1}, replaces=replaces))

    def lease(self, worker: WorkerId, *, lost: bool) -> None:
        try:
            reply = self.ask(LeaseRequest(worker_id=worker, slots={"fast": 1}))
        except LedgerRefused:  # a power cut may undo the death of the one before, never revive it
            raise AssertionError(f"{worker} lives and was refused") from None
        for lease in reply.leases:
            self.model.handed(lease.action.action_id, lease.fence)
            if not lost:
                self.hands[worker].append(Work(lease))

    def start(self, worker: WorkerId, number: int, *, lost: bool) -> None:
        work = self.hands[worker][number]
        request = StartRequest(worker_id=worker, held=_held(work))
        [verdict] = self.ask(request).verdicts
        if verdict is HoldVerdict.OK:
            self.model.began(work.lease.action.action_id, work.lease.fence)
        if lost:
            return
        if verdict is HoldVerdict.OK:
            work.begun = True
            self.effects.setdefault(work.lease.action.action_id, []).append(work.lease.fence)
        else:
            self.hands[worker].pop(number)

    def complete(self, worker: WorkerId, work: Work) -> None:
        action, fence = work.lease.action.action_id, work.lease.fence
        result = Completion(action_id=action, fence=fence, status=CompletionStatus.OK)
        [before] = self.store.rows((action,))
        request = CompleteRequest(worker_id=worker, completions=(result,))
        [disposition] = self.ask(request).dispositions
        [after] = self.store.rows((action,))
        work.sent += 1
        if before.fence == fence:
            assert disposition is CompleteDisposition.OK
            assert after.state is ActionState.COMPLETED
            self.model.ended(action, result)
            return
        expected = CompleteDisposition.STALE
        if before.terminal and before.settled_fence == fence:
            expected = CompleteDisposition.ALREADY
        assert disposition is expected
        unchanged = ("state", "fence", "worker", "attempts", "settled_status", "settled_fence")
        for name in unchanged:
            assert getattr(before, name) == getattr(after, name), f"a stale fence moved {name} (I4)"

    def tick(self, living: WorkerId | None) -> None:
        """Let a lease's time pass in which only ``living``, if anybody, is heard of."""
        for part in (TICK / 2, TICK / 2):
            self.now = Instant(self.now.boot + part, self.now.wall + part)
            if living is not None:
                held = tuple(h for work in self.hands[living] if not work.sent for h in _held(work))
                self.ask(HeartbeatRequest(worker_id=living, held=held))
        self.service.begin()
        self.service.settle(self.now)
        self.service.commit()

    def crash(self, *, power: bool) -> None:
        self._spend("power_cuts" if power else "kills")
        if power:
            self.store.lose_power()
            self.power_lost = True
        self.service = LedgerService(self.store, LIMITS, Durability.POWER_SAFE)
        self.service.open(self.now, boot_id="boot", lineage="lin_world")
        for worker in self.hands:
            self.ask(Enroll(worker_id=worker, name=worker, slots={"fast": 1}))
        self.attach()

    def cancel(self, action: ActionId) -> None:
        request = Cancel(run_id=RUN, fence=self.fence, action_ids=(action,))
        reply = self.ask(request).dispositions
        [row] = self.store.rows((action,))
        assert row.terminal, "a cancel ends the action at once (I10)"
        assert reply[action] is CancelDisposition.CANCELLED
        again = self.ask(request).dispositions
        assert again == reply, "repeating is harmless"

    def apply(self, action: ActionId) -> None:
        """Read what is told of one action and apply it, result and position in one append."""
        told = [
            event
            for event in self.events()
            if event.action_id == action and event.kind is LedgerEventKind.COMPLETED
        ]
        assert len(told) == 1, "I8"
        assert told[0].completion is not None
        result = (told[0].completion.status, told[0].completion.fence)
        # An acknowledgement is lazy: lost with power, the same result is told again, and the
        # coordinator's own position, lost with it, lets it be applied again. Never another one.
        assert self.applied.setdefault(action, result) == result, "applied twice, and differently"
        self.append(acks=(action,))

    def events(self) -> list[Any]:
        request = EventsRequest(run_id=RUN, fence=self.fence, limit=1000)
        return list(self.ask(request).events)

    # --- what must hold

    def rows(self) -> list[Row]:
        return self.store.rollout_rows(ROLLOUT)

    def check(self) -> None:
        """Compare the whole ledger with what was promised, and with what the tool has seen."""
        rows = self.rows()
        self.model.check(rows, self.events(), power_lost=self.power_lost)
        if self.stale is not None:
            self._check_fenced(self.stale)
        for row in rows:
            self._check_effects(row)

    def _check_fenced(self, stale: Fence) -> None:
        one = Append(rollout_id=ROLLOUT, expected_seq=self.seq, events=(b"stale",))
        try:
            self.ask(AppendBatch(run_id=RUN, fence=stale, appends=(one,)))
        except LedgerFenced:
            head = self.store.head(RUN, ROLLOUT)
            assert head is not None
            assert head.seq == self.seq, "a stale coordinator changed something (I11)"
            return
        raise AssertionError("a stale coordinator was not refused")

    def _check_effects(self, row: Row) -> None:
        touched = self.effects.get(row.action_id, [])
        assert len(set(touched)) == len(touched), "one lease touched the tool twice"
        status = row.settled_status
        if status is CompletionStatus.OK:
            assert row.settled_fence in touched, "a result without the work"
        if row.action.effect is not Effect.EXTERNAL or row.state is ActionState.ACKNOWLEDGED:
            return
        assert len(touched) <= 1, "an external effect happened twice (I12)"
        if touched and status is not None and status is not CompletionStatus.OK:
            assert row.completion is not None
            assert row.completion.external_effect_possible, f"{status} hides an effect (I12)"

    def calm(self) -> None:
        """Everything ends by its deadline and one lease of uptime, whatever was before (I9)."""
        latest = max((row.due_boot for row in self.rows() if not row.terminal), default=0.0)
        jump = max(0.0, latest - self.now.boot) + 2 * LIMITS.lease_seconds
        self.now = Instant(self.now.boot + jump, self.now.wall + jump)
        self.tick(None)
        assert all(row.terminal for row in self.rows()), "not ended by its deadline (I9)"

    # --- telling states apart

    def digest(self) -> bytes:
        """Return the same for worlds whose futures are the same: numbers count by their order."""
        told = (self._state(), self._books())
        numbers: set[int] = set()
        _collect(told, numbers)
        ranks = {number: rank for rank, number in enumerate(sorted(numbers))}
        return blake2b(msgspec.msgpack.encode(_ranked(told, ranks)), digest_size=16).digest()

    def _state(self) -> tuple[Any, ...]:
        tables = [self.store.tables()]
        if not self.store.synced:
            tables.append(self.store.disk())
        hands = [
            (worker, [(w.lease.action.action_id, w.lease.fence, w.begun, w.sent) for w in held])
            for worker, held in sorted(self.hands.items())
        ]
        return (
            [self._table(one) for one in tables],
            hands,
            msgspec.structs.astuple(self.budgets),
            sorted((a, len(f)) for a, f in self.effects.items()),
            sorted((a, str(s), f) for a, (s, f) in self.applied.items()),
            sorted((a, str(s), f) for a, (s, f) in self.model.results.items()),
            (self.fence, self.stale or 0),
        )

    def _table(self, tables: dict[str, Any]) -> tuple[Any, ...]:
        boot = self.now.boot
        rows = [
            (
                row.action_id, str(row.state), row.deliveries, row.attempts, row.fence,
                row.worker or "", row.alone, row.suspect, row.due_boot - boot,
                str(row.settled_status), row.settled_fence, row.reclaim_fence,
                row.reclaim_worker or "", row.lost_fences, row.late_fences, str(row.parked_on),
            )
            for row in tables["_rows"].values()
        ]  # fmt: skip
        events = [(t.event_id, str(t.kind), t.action_id) for t in tables["_events"].values()]
        workers = sorted((w.worker_id, w.ended) for w in tables["_workers"].values())
        owners = [(owner.fence,) for owner in tables["_owners"].values()]
        return rows, events, workers, owners

    def _books(self) -> tuple[Any, ...]:
        books, boot = self.service._books, self.now.boot
        workers = [
            (w, r.seen - boot, r.lost, r.enlisted.ended,
             sorted((a, at - boot) for a, at in r.named.items()), sorted(r.untold))
            for w, r in sorted(books.workers.items())
        ]  # fmt: skip
        return workers, max(self.service._expiry._calm_until - boot, 0.0)


def _held(work: Work) -> tuple[Held, ...]:
    return (Held(work.lease.action.action_id, work.lease.fence),)


def _collect(value: Any, numbers: set[int]) -> None:
    if isinstance(value, int):
        if value >= NUMBERS_FROM:
            numbers.add(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, numbers)


def _ranked(value: Any, ranks: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_ranked(inner, ranks) for inner in value]
    if isinstance(value, int) and value >= NUMBERS_FROM:
        return NUMBERS_FROM + ranks[value]
    return value
