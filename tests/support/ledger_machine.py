"""Any order of requests, deliveries, copies, crashes and power cuts, as a state machine."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stoker.broker.base import (
    Append,
    AppendBatch,
    Attach,
    Cancel,
    CancelDisposition,
    ClassStats,
    CompleteDisposition,
    CompleteRequest,
    DeadLettersRequest,
    Durability,
    Enroll,
    EventsRequest,
    HeartbeatRequest,
    HoldVerdict,
    Lease,
    LeaseRequest,
    LedgerEvent,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    StartRequest,
    StatsRequest,
)
from stoker.broker.operating import DeadLetterVerb, SettleDead
from stoker.broker.service import LedgerService
from stoker.errors import LedgerFenced, LedgerRefused, StokerError
from stoker.model.action import Action, ActionState, Effect, LatePolicy
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, WorkerId
from stoker.seams.clock import Instant
from support.ledger import ROLLOUT, RUN, ManualClock, act, action, held
from support.ledger_books import check_books
from support.ledger_crash import PowerStore
from support.ledger_model import Model

LIMITS = LedgerLimits(
    queued_max=6,
    queued_per_class_max=5,
    results_max=3,
    outstanding_per_rollout_max=5,
    lease_seconds=10.0,
    grace_seconds=10.0,
)
WORKERS = [WorkerId(f"wrk_{n}") for n in range(3)]
EFFECTS = [Effect.PURE, Effect.CONTAINED, Effect.EXTERNAL]

workers = st.sampled_from(WORKERS)
kinds = st.fixed_dictionaries(
    {
        "effect": st.sampled_from(EFFECTS),
        "late": st.sampled_from(LatePolicy),
        "deadline_seconds": st.sampled_from([300.0, 15.0]),
        "attempts_max": st.integers(1, 2),
    }
)
endings = st.sampled_from(["complete", "complete", "release", "keep"])
picks = st.integers(min_value=0, max_value=10**6)


def _done(lease: Lease) -> Completion:
    return Completion(
        action_id=lease.action.action_id, fence=lease.fence, status=CompletionStatus.OK
    )


class LedgerMachine(RuleBasedStateMachine):
    """One coordinator, three worker names, one ledger that crashes."""

    remembers = True
    """The books outlive their group."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = Model(LIMITS)
        self.leases: list[Lease] = []
        self.submitted = 0
        self.attached = 0
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.fence = self.fenced = Fence(0)
        self.seq = 0
        self.power_lost = False
        self.backup: tuple[Model, int, dict[WorkerId, WorkerId], Any] | None = None
        self.lineages = 1
        self.store: Any = None
        self.service: LedgerService
        self.open()

    def open(self) -> None:
        """Open the ledger, anew after a crash."""
        self.store = self.store or PowerStore()
        self.service = LedgerService(self.store, LIMITS, Durability.POWER_SAFE)
        self.service.open(self.clock.now(), boot_id="boot", lineage=f"lin_{self.lineages}")

    def lose_power(self) -> bool:
        """Crash the machine with the ledger's process; say whether this engine can show that."""
        self.store.lose_power()
        return True

    def copy(self) -> Any:
        """Return a copy of the ledger as it is."""
        return self.store.taken()

    def put_back(self, copy: Any) -> None:
        """Put a copy in the place of the ledger, which ends without a word."""
        self.store.put_back(copy)

    def let_time_pass(self) -> None:
        """Let what is due happen before the ledger is looked at, where not every group does it."""

    def ask(self, request: Any) -> Any:
        [reply] = self.ask_together(request)
        return reply

    def ask_together(self, *requests: Any) -> list[Any]:
        """Carry out one group: polls come last, after time has passed, as in the exchange."""
        now = self.clock.now()
        polls = [one for one in requests if isinstance(one, LeaseRequest | EventsRequest)]
        self.service.begin(requests, now)
        answers = [self._answer(one, now) for one in requests if one not in polls]
        self.service.settle(now)
        self.service.expect(polls)
        answers += [self._answer(one, now) for one in polls]
        self.service.commit()
        for answer in answers:
            if isinstance(answer, StokerError):
                raise answer
        return answers

    def _answer(self, request: Any, now: Instant) -> Any:
        try:
            return self.service.handle(request, now)
        except (LedgerFenced, LedgerRefused) as error:
            return error

    def worker(self, name: WorkerId) -> WorkerId:
        return WorkerId(f"{name}.{self.incarnations[name]}")

    def lease_at(self, pick: int) -> Lease:
        return self.leases[-1 - pick % min(len(self.leases), 8)]

    @initialize(count=st.integers(1, 3), kind=kinds)
    def begin(self, count: int, kind: dict[str, Any]) -> None:
        self.attach()
        for name in WORKERS:
            self.enroll(name)
        self.submit(count, kind, None)

    def attach(self) -> None:
        self.attached += 1
        attached = self.ask(Attach(run_id=RUN, incarnation=f"c{self.attached}"))
        self.model.fence(attached.fence)
        self.fenced, self.fence = self.fence, attached.fence

    def enroll(self, name: WorkerId) -> None:
        self.ask(Enroll(worker_id=self.worker(name), name=str(name), slots={"fast": 4}))

    def append(self, *submits: Action, acknowledges: tuple[ActionId, ...] = ()) -> Any:
        return self._appended(self.ask(self._append(*submits, acknowledges=acknowledges)))

    def _append(self, *submits: Action, acknowledges: tuple[ActionId, ...] = ()) -> AppendBatch:
        one = Append(
            rollout_id=ROLLOUT,
            expected_seq=self.seq,
            events=(b"event",),
            submits=submits,
            acknowledges=acknowledges,
        )
        return AppendBatch(run_id=RUN, fence=self.fence, appends=(one,))

    def _appended(self, reply: Any) -> Any:
        self.seq = reply.replies[0].seq
        return reply.replies[0]

    @rule(count=st.integers(1, 3), kind=kinds, holder=st.none() | workers)
    def submit(self, count: int, kind: dict[str, Any], holder: WorkerId | None) -> None:
        fresh = self._fresh(count, kind, holder)
        self._submitted(fresh, self.append(*fresh))

    def _fresh(
        self, count: int, kind: dict[str, Any], holder: WorkerId | None = None
    ) -> list[Action]:
        bearer = self.worker(holder) if holder else None
        numbers = range(self.submitted, self.submitted + count)
        return [action(n, holder=bearer, deliveries_max=4, **kind) for n in numbers]

    def _submitted(self, fresh: list[Action], reply: Any) -> None:
        assert all(str(d) in ("accepted", "parked") for d in reply.submits)
        self.submitted += len(fresh)
        self.model.accepted |= {one.action_id for one in fresh}

    @precondition(lambda self: self.submitted > 0)
    @rule(pick=picks)
    def submit_again(self, pick: int) -> None:
        known = act(pick % self.submitted)
        same = self.append(action(pick % self.submitted, effect=self._effect(known)))
        assert [str(d) for d in same.submits] == ["duplicate"]
        other = self.append(action(pick % self.submitted, b"other"))
        assert [str(d) for d in other.submits] == ["conflict"]

    def _effect(self, action_id: ActionId) -> Effect:
        digests = {e: action(int(action_id[4:]), effect=e).digest() for e in EFFECTS}
        [row] = self.store.rows((action_id,))
        return next(e for e, digest in digests.items() if digest == row.digest)

    @rule(name=workers, slots=st.integers(1, 4))
    def lease(self, name: WorkerId, slots: int) -> None:
        request = LeaseRequest(worker_id=self.worker(name), slots={"fast": slots})
        if any(lease.alone for lease in self._handed(request, self.ask(request))):
            assert self.ask(request).leases == (), "nothing runs beside a suspect (I5)"

    def _handed(self, request: LeaseRequest, reply: Any) -> list[Lease]:
        leases = list(reply.leases)
        assert len(leases) <= request.slots["fast"]
        for lease in leases:
            self.model.handed(lease.action.action_id, lease.fence)
            assert lease.action.holder in (None, request.worker_id)
            self.leases.append(lease)
        assert len(leases) == 1 or not any(lease.alone for lease in leases)
        return leases

    @rule(
        name=workers,
        kind=kinds,
        fresh=st.integers(0, 2),
        ends=st.lists(endings, min_size=1, max_size=4),
    )
    def work(self, name: WorkerId, kind: dict[str, Any], fresh: int, ends: list[str]) -> None:
        """What workers do all day: lease, start, and end each in some way, or keep it."""
        self.submit(fresh, kind, None)
        self.promises_are_kept()
        known = len(self.leases)
        self.lease(name, len(ends))
        self.promises_are_kept()
        for lease in self.leases[known:]:
            self.begin_work(lease)
        self.promises_are_kept()
        for lease, end in zip(self.leases[known:], ends[: len(self.leases) - known], strict=True):
            if end == "complete":
                self._take(self.ask(self._completing(lease)), lease)
            elif end == "release":
                self.ask(ReleaseRequest(worker_id=self._holder(lease), held=held(lease)))

    @precondition(lambda self: self.leases)
    @rule(pick=picks, kind=kinds, fresh=st.integers(0, 2), polling=st.tuples(workers, workers))
    def gather(
        self, pick: int, kind: dict[str, Any], fresh: int, polling: tuple[WorkerId, WorkerId]
    ) -> None:
        """One group holds a result, new actions that apply another, and two polls."""
        lease = self.lease_at(pick)
        actions = self._fresh(fresh, kind)
        told = [e.action_id for e in self.events() if e.kind is LedgerEventKind.COMPLETED]
        completing = self._completing(lease)
        appending = self._append(*actions, acknowledges=tuple(told[:1]))
        polls = [LeaseRequest(worker_id=self.worker(w), slots={"fast": 2}) for w in polling]
        completed, appended, *leased = self.ask_together(completing, appending, *polls)
        self._take(completed, lease)
        self._submitted(actions, self._appended(appended))
        for poll, reply in zip(polls, leased, strict=True):
            self._handed(poll, reply)

    def _holder(self, lease: Lease) -> WorkerId:
        [row] = self.store.rows((lease.action.action_id,))
        return row.bearer or self.worker(WORKERS[0])

    @rule(name=workers, power=st.booleans())
    def die_running(self, name: WorkerId, power: bool) -> None:  # noqa: FBT001 - given by name
        """A worker leases, starts everything and dies, perhaps with the machine under it."""
        known = len(self.leases)
        self.lease(name, 4)
        for lease in self.leases[known:]:
            self.begin_work(lease)
        if power:
            self.crash(power=True)
        self.replace_worker(name)

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def start(self, pick: int) -> None:
        self.begin_work(self.lease_at(pick))

    def begin_work(self, lease: Lease) -> None:
        request = StartRequest(worker_id=self._holder(lease), held=held(lease))
        [verdict] = self.ask(request).verdicts
        if verdict is HoldVerdict.OK:
            assert self.model.newest[lease.action.action_id] == lease.fence, "a stale fence (I4)"
            self.model.began(lease.action.action_id, lease.fence)

    @rule(name=workers)
    def heartbeat(self, name: WorkerId) -> None:
        mine = [lease for lease in self.leases[-12:] if self._holder(lease) == self.worker(name)]
        self.ask(HeartbeatRequest(worker_id=self.worker(name), held=held(*mine)))

    @precondition(lambda self: self.leases)
    @rule(pick=picks, times=st.integers(1, 2))
    def complete(self, pick: int, times: int) -> None:
        lease = self.lease_at(pick)
        self._take(self.ask(self._completing(lease, times)), lease)

    def _completing(self, lease: Lease, times: int = 1) -> CompleteRequest:
        return CompleteRequest(worker_id=self._holder(lease), completions=(_done(lease),) * times)

    def _take(self, reply: Any, lease: Lease) -> None:
        for disposition in reply.dispositions:
            if disposition is not CompleteDisposition.STALE:
                newest = self.model.newest[lease.action.action_id] == lease.fence
                assert newest or disposition is not CompleteDisposition.OK, "a stale fence (I4)"
                self.model.ended(lease.action.action_id, _done(lease))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = self.lease_at(pick)
        self.ask(ReleaseRequest(worker_id=self._holder(lease), held=held(lease)))

    @precondition(lambda self: self.submitted > 0)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        action_id = act(pick % self.submitted)
        request = Cancel(run_id=RUN, fence=self.fence, action_ids=(action_id,))
        [disposition] = self.ask(request).dispositions.values()
        [row] = self.store.rows((action_id,))
        assert row.terminal
        if disposition is CancelDisposition.CANCELLED:
            assert row.settled_status is CompletionStatus.CANCELLED

    def events(self) -> list[LedgerEvent]:
        return list(self.ask(EventsRequest(run_id=RUN, fence=self.fence, limit=10**6)).events)

    @rule(pick=picks, everything=st.booleans())
    def acknowledge(self, pick: int, everything: bool) -> None:  # noqa: FBT001 - given by name
        told = [event.action_id for event in self.events()]
        if told:
            self.append(acknowledges=tuple(told) if everything else (told[pick % len(told)],))

    @precondition(lambda self: self.submitted > 0)
    @rule(pick=picks, verb=st.sampled_from(DeadLetterVerb))
    def settle_dead(self, pick: int, verb: DeadLetterVerb) -> None:
        """An operator requeues or drops a dead letter, or what is none."""
        listed = sorted(self.model.letters()) or [act(pick % self.submitted)]
        action_id = listed[pick % len(listed)]
        [row] = self.store.rows((action_id,))
        request = SettleDead(run_id=RUN, verb=verb, action_ids=(action_id,), who="ops")
        refused = self.ask(request).refused
        waits = row.state is ActionState.COMPLETED
        letter = action_id in self.model.letters()
        may = letter and waits == (verb is DeadLetterVerb.REQUEUE)
        assert bool(refused) != may, (row, refused)
        if refused:
            return
        if verb is DeadLetterVerb.DROP:
            self.model.dropped.add(action_id)
            return
        self.model.requeued_dead(action_id)
        with pytest.raises(LedgerFenced):  # whoever heard of the dead result cannot apply it
            self.events()
        self.attach()

    @rule()
    def back_up(self) -> None:
        workers_then = {name: self.worker(name) for name in WORKERS}
        self.backup = (self.model.twin(), self.submitted, workers_then, self.copy())

    @precondition(lambda self: self.backup)
    @rule()
    def restore(self) -> None:
        """The copy takes the ledger's place: what came after it is unknown."""
        assert self.backup
        model, self.submitted, workers_then, copy = self.backup
        self.backup = None
        model.restored(self.model)
        self.model = model
        self.leases = [one for one in self.leases if one.action.action_id in model.accepted]
        self.put_back(copy)
        self.lineages += 1
        self.open()
        head = self.store.head(RUN, ROLLOUT)
        self.seq = head.seq if head else 0
        with pytest.raises(LedgerFenced):
            self.events()
        for name in WORKERS:
            with pytest.raises(LedgerRefused):
                self.ask(LeaseRequest(worker_id=workers_then[name], slots={"fast": 1}))
            self.incarnations[name] += 1
            self.enroll(name)
        self.attach()

    @rule(
        seconds=st.sampled_from([1.0, 4.0, 11.0, 40.0]),
        jump=st.sampled_from([0.0, -9e3, 9e3]),
        silent=st.sets(workers, max_size=2),
    )
    def pass_time(self, seconds: float, jump: float, silent: set[WorkerId]) -> None:
        self.clock.boot += seconds
        self.clock.wall += seconds + jump
        for name in WORKERS:
            if name not in silent:
                self.heartbeat(name)

    @precondition(lambda self: self.remembers)
    @rule()
    def sleep_until_the_alarm(self) -> None:
        """What the ledger's alarm is set for happens when it rings, not a moment later."""
        wake = self.service.next_wake()
        if wake is not None:
            seconds = max(0.0, wake - self.clock.boot)
            self.clock.boot += seconds
            self.clock.wall += seconds
            self.ask_together()
            again = self.service.next_wake()
            assert again is None or again > self.clock.boot, "it would ring without end"

    @rule(name=workers)
    def replace_worker(self, name: WorkerId) -> None:
        dead = self.worker(name)
        self.incarnations[name] += 1
        fresh = self.worker(name)
        self.ask(Enroll(worker_id=fresh, name=str(name), slots={"fast": 4}, replaces=dead))
        try:
            self.ask(LeaseRequest(worker_id=dead, slots={"fast": 1}))
        except LedgerRefused:
            return
        raise AssertionError("a dead incarnation was given work")

    @rule(power=st.booleans())
    def crash(self, power: bool) -> None:  # noqa: FBT001 - hypothesis gives arguments by name
        if power:
            self.power_lost = self.lose_power()
        self.open()
        if power:
            self.model.cut(self.store.rollout_rows(ROLLOUT))
        head = self.store.head(RUN, ROLLOUT)
        self.seq = head.seq if head else 0
        with pytest.raises(LedgerFenced):  # whoever was fenced stays so, whatever was lost (B7)
            self.ask(EventsRequest(run_id=RUN, fence=self.fenced))
        for name in WORKERS:
            self.enroll(name)
        self.attach()

    @invariant()
    def promises_are_kept(self) -> None:
        if not self.fence:
            return
        self.let_time_pass()
        events = self.events()
        rows = self.store.rollout_rows(ROLLOUT)
        self.model.check(rows, events, power_lost=self.power_lost)
        self.power_lost = False
        letters = self.ask(DeadLettersRequest(run_id=RUN)).actions
        assert {letter.action.action_id for letter in letters} == self.model.letters()
        stats = self.ask_stats()
        states = [row.state for row in rows]
        assert stats.queued == states.count(ActionState.ACCEPTED)
        assert stats.leased == states.count(ActionState.LEASED)
        assert stats.started == states.count(ActionState.STARTED)
        assert stats.parked == states.count(ActionState.PARKED)
        if self.remembers:
            check_books(self.service)

    def ask_stats(self) -> Any:
        return self.ask(StatsRequest()).classes.get("fast", ClassStats())

    def teardown(self) -> None:
        """Everything ends by its deadline plus one lease of uptime (I9)."""
        if not self.fence:
            return
        for _ in range(4):
            self.clock.boot += 310.0
            self.clock.wall += 310.0
            self.heartbeat(WORKERS[0])
        assert all(row.terminal for row in self.store.rollout_rows(ROLLOUT))
        self.promises_are_kept()
