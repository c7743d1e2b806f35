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
    LedgerLimits,
    ReleaseRequest,
    StartRequest,
    StatsRequest,
)
from stoker.broker.operating import DeadLetterVerb, SettleDead
from stoker.broker.service import LedgerService
from stoker.errors import LedgerFenced, LedgerRefused
from stoker.model.action import Action, ActionState, Effect, LatePolicy
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, WorkerId
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
picks = st.integers(min_value=0, max_value=10**6)


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

    def ask(self, request: Any) -> Any:
        now = self.clock.now()
        polls = [request] if isinstance(request, LeaseRequest | EventsRequest) else []
        self.service.begin([request], now)
        try:
            if polls:  # time passes first, as in the exchange
                self.service.settle(now)
                self.service.expect(polls)
            return self.service.handle(request, now)
        finally:
            if not polls:
                self.service.settle(now)
            self.service.commit()

    def worker(self, name: WorkerId) -> WorkerId:
        return WorkerId(f"{name}.{self.incarnations[name]}")

    def lease_at(self, pick: int) -> Lease:
        return self.leases[-1 - pick % min(len(self.leases), 8)]

    @initialize()
    def begin(self) -> None:
        self.attach()
        for name in WORKERS:
            self.enroll(name)

    def attach(self) -> None:
        self.attached += 1
        attached = self.ask(Attach(run_id=RUN, incarnation=f"c{self.attached}"))
        self.model.fence(attached.fence)
        self.fenced, self.fence = self.fence, attached.fence

    def enroll(self, name: WorkerId) -> None:
        self.ask(Enroll(worker_id=self.worker(name), name=str(name), slots={"fast": 4}))

    def append(self, *submits: Action, acknowledges: tuple[ActionId, ...] = ()) -> Any:
        one = Append(
            rollout_id=ROLLOUT,
            expected_seq=self.seq,
            events=(b"event",),
            submits=submits,
            acknowledges=acknowledges,
        )
        reply = self.ask(AppendBatch(run_id=RUN, fence=self.fence, appends=(one,)))
        self.seq = reply.replies[0].seq
        return reply.replies[0]

    @rule(
        count=st.integers(1, 3),
        effect=st.sampled_from(EFFECTS),
        late=st.sampled_from(LatePolicy),
        deadline=st.sampled_from([15.0, 300.0]),
        holder=st.none() | workers,
        attempts=st.integers(1, 2),
    )
    def submit(
        self,
        count: int,
        effect: Effect,
        late: LatePolicy,
        deadline: float,
        holder: WorkerId | None,
        attempts: int,
    ) -> None:
        fresh = [
            action(
                self.submitted + n,
                effect=effect,
                late=late,
                deadline_seconds=deadline,
                holder=self.worker(holder) if holder else None,
                attempts_max=attempts,
                deliveries_max=4,
            )
            for n in range(count)
        ]
        reply = self.append(*fresh)
        assert all(str(d) in ("accepted", "parked") for d in reply.submits)
        self.submitted += count
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
        reply = self.ask(request)
        assert len(reply.leases) <= slots
        for lease in reply.leases:
            self.model.handed(lease.action.action_id, lease.fence)
            assert lease.action.holder in (None, self.worker(name))
            self.leases.append(lease)
        if any(lease.alone for lease in reply.leases):
            assert len(reply.leases) == 1
            assert self.ask(request).leases == (), "nothing runs beside a suspect (I5)"

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
        result = Completion(
            action_id=lease.action.action_id, fence=lease.fence, status=CompletionStatus.OK
        )
        request = CompleteRequest(worker_id=self._holder(lease), completions=(result,) * times)
        for disposition in self.ask(request).dispositions:
            if disposition is not CompleteDisposition.STALE:
                newest = self.model.newest[lease.action.action_id] == lease.fence
                assert newest or disposition is not CompleteDisposition.OK, "a stale fence (I4)"
                self.model.ended(lease.action.action_id, result)

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

    @rule(pick=picks)
    def acknowledge(self, pick: int) -> None:
        told = [event.action_id for event in self.events()]
        if told:
            self.append(acknowledges=(told[pick % len(told)],))

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

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 40.0]), jump=st.sampled_from([0.0, -9e3, 9e3]))
    def pass_time(self, seconds: float, jump: float) -> None:
        self.clock.boot += seconds
        self.clock.wall += seconds + jump
        self.heartbeat(WORKERS[0])

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
