"""The ledger's verbs on PostgreSQL: the same verbs and decisions, over books made for one group.

A gateway keeps nothing between groups that it could not lose: who it is (a slot for its counters),
whether it keeps time, and inputs, which never change. Groups of several gateways run side by side;
rows they both name make one wait for the other.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from stoker.broker import queueing, throttling, views
from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    Capabilities,
    Claim,
    ClaimReply,
    ClaimRequest,
    Durability,
    HeartbeatRequest,
    HoldReply,
    LedgerLimits,
    Poll,
    Request,
    StatsReply,
    StatsRequest,
)
from stoker.broker.claims import CLAIM_SECONDS, sharing
from stoker.broker.dead_letters import settle_dead
from stoker.broker.operating import SettledDead, SettleDead
from stoker.broker.postgres.books import GROUP_MAX, GroupBooks, read_buckets
from stoker.broker.postgres.known import Trusted
from stoker.broker.postgres.needs import Needs, ahead
from stoker.broker.postgres.store import PostgresStore
from stoker.broker.postgres.sweeper import SWEEP_ROWS
from stoker.broker.postgres.time import TICK_SECONDS, KeptTime, ServerClock
from stoker.broker.postgres.wire import Result
from stoker.broker.rates import emptied
from stoker.broker.service import LedgerService, epochs_passed
from stoker.broker.store import Meta
from stoker.broker.store_sqlite_rows import encode
from stoker.broker.worker_verbs import refuse_ended
from stoker.errors import LedgerUnavailable
from stoker.model.ids import ActionId, RunId, WorkerId
from stoker.seams.clock import Instant

_KEEPER_LOCK = 2
_SLOT_LOCKS = 1000
_SLOTS_MAX = 1000
_decode_claim = msgspec.msgpack.Decoder(Claim).decode


class GatewayService(LedgerService):
    """One gateway's part of a ledger."""

    _store: PostgresStore
    _books: GroupBooks

    def __init__(
        self,
        store: PostgresStore,
        limits: LedgerLimits,
        durability: Durability,
        clock: ServerClock | None = None,
    ) -> None:
        super().__init__(store, limits, durability)
        self._clock = clock
        """Told the server's time with every group; ``None``: a test's clock."""
        self._slot = 0
        self._meta = Meta(lineage="")
        self._keeper = False
        self._in_office = False
        """Keeper since a group that was committed."""
        self._serial = False
        self._next_tick = 0.0
        self._next_due: float | None = None
        self._seqs = (0, 0, 0)
        self._token_due: float | None = None
        """When a lease that waits here may have its service's token."""
        self._served: dict[RunId, int] = {}
        """A hint for fair shares, this gateway's own."""
        self._handling: GroupBooks | None = None
        self._begun_at = self._seqs
        self._ring: Callable[[], None] | None = None
        self._sweep: Callable[[], None] | None = None
        self._gateways = 1
        self._verbs[HeartbeatRequest] = self._heartbeat
        self._verbs[ActionsRequest] = lambda r, _now: self._actions(r)
        self._verbs[SettleDead] = self._settle_dead
        self._verbs[ClaimRequest] = lambda r, now: self._claim(r.claim, now.boot)
        self._verbs[StatsRequest] = lambda _r, now: self._stats(now)

    def open(self, now: Instant, *, boot_id: str, lineage: str) -> None:  # noqa: ARG002 - the server's boots are told by its tables
        """Join the ledger: a slot, an epoch that a crash of the server has made new."""
        store = self._store
        self._slot = self._take_slot()
        store.begin()
        store.run("caps", (store.key,))
        found = store.all("meta")
        [(history,)] = store.all("server_history")
        new = (lineage, 0, None, history, 1)
        known_lineage, epoch, limits, known_history, replicated = found[0] if found else new
        uncertain = not _same_history(known_history, history, certain=bool(replicated))
        self._leave_dead_slots()
        [(others,)] = store.all("SELECT count(*) FROM gateway")
        if others and limits is not None:
            self.limits = msgspec.msgpack.decode(limits, type=LedgerLimits)
        [(opened,)] = store.all("opened")
        epoch += epochs_passed(lineage) if uncertain else not opened
        if uncertain or not opened:  # the last leases may be gone, and their tokens with them
            for name, bucket in read_buckets(store.all("buckets")).items():
                store.run("put_bucket", (encode(emptied(bucket, now.boot)), name))
        replicated = self.durability is Durability.REPLICATED and (replicated or not others)
        self._meta = Meta(lineage=known_lineage, epoch=epoch)
        store.epoch = epoch
        encoded = msgspec.msgpack.encode(self.limits)
        # An uncertain history stands until the ledger is renewed: that must not be forgotten.
        kept = known_history if uncertain else history
        store.run("put_meta", (known_lineage, epoch, encoded, kept, int(replicated)))
        store.run("mark_opened")
        store.run("gather_counters", (self._slot,))
        store.run("join", (self._slot, f"{self._slot}"))
        self._keep_time(now)
        store.commit(sync=True)
        self._in_office = self._keeper
        if uncertain:
            self._renew(lineage, history, now)

    def _renew(self, lineage: str, history: str, now: Instant) -> None:
        """Make a new ledger of one that may have lost commits with its server (I3)."""
        self._serial = True
        self.begin((), now)
        self._books.read_all_workers()
        self.restore(lineage, now)
        self._store.run("renew", (lineage, history))
        self.commit()
        self._meta.lineage = lineage

    def _take_slot(self) -> int:
        for slot in range(_SLOTS_MAX):
            if self._store.all("try_lock", self._store.key, _SLOT_LOCKS + slot)[0][0]:
                return slot
        raise LedgerUnavailable(f"{_SLOTS_MAX} gateways serve this ledger already; end some")

    def _leave_dead_slots(self) -> None:
        """Strike off gateways that ended without a word; their counters count on."""
        key = self._store.key
        for (slot,) in self._store.all("gateways"):
            if slot == self._slot:
                self._store.run("leave", (slot,))
            elif self._store.all("try_lock", key, _SLOT_LOCKS + slot)[0][0]:
                self._store.run("leave", (slot,))
                self._store.run("unlock", (key, _SLOT_LOCKS + slot))

    def _keep_time(self, now: Instant) -> None:
        """Become the keeper of time where nobody is."""
        store = self._store
        self._next_tick, self._next_due = now.boot + TICK_SECONDS, None
        if self._keeper or not store.all("try_lock", store.key, _KEEPER_LOCK)[0][0]:
            return
        self._keeper = True
        self._grace_until = now.boot + self.limits.grace_seconds
        store.run("expect_enrolled", (now.boot,))
        store.run("expect_bearers", (now.boot,))
        store.run("forgive", (now.boot, now.boot))
        store.defer(now.boot + self.limits.lease_seconds)

    def ask_time(self) -> None:
        """Set the clock by the server's."""
        [(seconds, _)] = self._store.all("moment")
        if self._clock is not None:
            self._clock.told(seconds)

    def rings(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called after a commit that may answer polls at other gateways."""
        self._ring = ring

    def sweeps(self, sweep: Callable[[], None]) -> None:
        """Have ``sweep`` called after commits by which many rows have ended."""
        self._sweep = sweep

    def leave(self) -> None:
        """Say that this gateway ends."""
        self._store.begin()
        self._store.run("leave", (self._slot,))
        self._store.commit(sync=False)

    def capabilities(self) -> Capabilities:
        """Return what this ledger promises, and what would make it better."""
        return replace(super().capabilities(), advice=self._store.advice())

    @property
    def store(self) -> PostgresStore:
        """Return this gateway's way to the tables."""
        return self._store

    # --- groups

    def begin(
        self,
        requests: Sequence[Request] = (),
        now: Instant | None = None,
        waiting: Iterable[Poll] = (),
    ) -> None:
        """Open a group: lock and read what its requests name."""
        assert now is not None, "a gateway's group has a time"
        needs = Needs(requests, waiting)
        # Further away than it ever is: the server's clock was set back.
        self._next_tick = min(self._next_tick, now.boot + TICK_SECONDS)
        self._grace_until = min(self._grace_until, now.boot + self.limits.grace_seconds)
        self._serial = self._serial or needs.submits > GROUP_MAX
        while True:
            trusted = self._store.trust(needs)
            books, found = self._open_books(needs, trusted, now)
            if self._serial or not books.tight(self._gateways):
                break
            self._store.rollback()  # a cap is near: alone from the start
            self._serial = True
        books.serial = self._serial or self._gateways == 1
        self._serial = books.tight(self._gateways)
        self._books = self._handling = books
        self._expiry = KeptTime(books, self._grace_until)
        books.read_ahead(needs, trusted, found)

    def _open_books(
        self, needs: Needs, trusted: Trusted, now: Instant
    ) -> tuple[GroupBooks, dict[str, Result]]:
        """Begin, lock and read in one go; counters are read after the lock that orders them."""
        store = self._store
        asked = [
            ("caps" if self._serial else "caps_shared", (store.key,)),
            ("moment", ()),
            ("counters", ()),
            *ahead(needs, trusted, now.boot),
        ]
        found = dict(zip((name for name, _ in asked), store.begin_with(asked), strict=True))
        [(seconds, self._gateways)], store.counters = found["moment"], found["counters"]
        if self._clock is not None:
            self._clock.told(seconds)
        meta = Meta(lineage=self._meta.lineage, epoch=self._meta.epoch)
        books = GroupBooks(store, self.limits, meta, now.boot, self._slot)
        books.work_seq, books.events_seq, books.tickets_seq = self._seqs
        books.served = self._served
        books.token_due = self._token_due
        self._begun_at = self._seqs
        return books, found

    def expect(self, polls: Sequence[Poll]) -> None:
        """Read what the polls that come now need."""
        self._books.expect(polls)

    def settle(self, now: Instant) -> None:
        """Let time pass, where this gateway keeps it, and parked actions in."""
        if now.boot >= self._next_tick or self._is_due(now):
            self._books.work_seq += 1  # a wake-up may have died with the gateway that owed it
            self._books.events_seq += 1
            self._books.tickets_seq += 1
            self._begun_at = self._now_seqs()  # every gateway looks by itself
            self._books.flush()
            self._keep_time(now)
            if self._keeper:
                self._expiry.tick(now)
        queueing.unpark(self._books)
        throttling.pass_time(self._books, now)

    def _is_due(self, now: Instant) -> bool:
        return self._keeper and self._next_due is not None and self._next_due <= now.boot

    def commit(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Write the group and commit it; then its replies may go out.

        While the server is busy with it ``meanwhile`` is called.

        Raises:
            StorageFull, StorageConflict: call ``rollback``; nothing was kept.
            StorageLost: whether it was kept is not known; answer nobody.
        """
        books = self._books
        synced = books.sync and self.durability is not Durability.PROCESS_SAFE

        def write() -> None:
            books.flush()
            books.write_counters(synced=synced)

        self._store.commit_after(write, sync=synced, meanwhile=meanwhile)
        self._in_office = self._keeper
        self._token_due = books.token_due
        books.work_seq += books.cut_short  # after the polls: they are asked again at once
        before, self._seqs, self._handling = self._begun_at, self._now_seqs(), None
        if self._ring is not None and self._gateways > 1 and self._seqs != before:
            self._ring()
        if self._sweep is not None and self._store.ended >= SWEEP_ROWS:
            self._store.ended = 0
            self._sweep()
        if books.next_due is not None:
            self._next_due = min(books.next_due, self._next_due or books.next_due)

    def rollback(self, now: Instant) -> None:  # noqa: ARG002 - nothing is read again
        """Undo the open group."""
        self._store.rollback()
        if self._keeper and not self._in_office:
            self._store.run("unlock", (self._store.key, _KEEPER_LOCK))
            self._keeper = False
        self._handling = None
        self.wake()

    @property
    def work_seq(self) -> int:
        """Rises when a waiting lease request may have become answerable."""
        return self._now_seqs()[0]

    @property
    def events_seq(self) -> int:
        """Rises when a waiting events request may have become answerable."""
        return self._now_seqs()[1]

    @property
    def tickets_seq(self) -> int:
        """Rises when a waiting tickets request may have become answerable."""
        return self._now_seqs()[2]

    def _now_seqs(self) -> tuple[int, int, int]:
        books = self._handling
        if books is None:
            return self._seqs
        return (books.work_seq, books.events_seq, books.tickets_seq)

    @property
    def lineage(self) -> str:
        """Identity of this ledger."""
        return self._meta.lineage

    def wake(self) -> None:
        """Have every waiting poll asked again: another gateway changed something."""
        work, events, tickets = self._seqs
        self._seqs = (work + 1, events + 1, tickets + 1)

    def next_wake(self) -> float | None:
        """Return when this gateway looks next, asked or not."""
        due = self._next_due if self._keeper else None
        times = (self._next_tick, due, self._token_due)
        return min(at for at in times if at is not None)

    def forgive(self, now: Instant) -> None:
        """Give every worker a fresh lease's time: this gateway was stopped, perhaps alone."""
        if self._keeper:
            self._store.run("forgive", (now.boot, now.boot))

    # --- verbs that look at rows in their own way

    def _heartbeat(self, request: HeartbeatRequest, now: Instant) -> HoldReply:
        refuse_ended(self._expiry.hear(request.worker_id, now))
        self._books.flush()
        expiry = self._expiry
        assert isinstance(expiry, KeptTime), "a gateway's books and its time belong together"
        return expiry.heartbeat(request, now)

    def _actions(self, request: ActionsRequest) -> ActionsReply:
        self._books.flush()
        rows = self._store.rows(request.action_ids) if request.action_ids else []
        if request.rollout_id is not None:
            rows += self._store.rollout_rows(request.rollout_id)
        return views.as_views(rows)

    def _settle_dead(self, request: SettleDead, now: Instant) -> SettledDead:
        self._books.read_results(request.action_ids)
        return settle_dead(self._books, request, now)

    def _stats(self, now: Instant) -> StatsReply:
        books = self._books
        books.flush()
        books.read_totals()
        books.read_all_workers()
        for worker_id, action_id in self._store.all("hands"):
            books.worker(WorkerId(worker_id), now.boot).named[ActionId(action_id)] = now.boot
        books.held.clear()
        for worker_class, holder, count in self._store.all("all_held"):
            books.held[worker_class, WorkerId(holder)] = count
        return views.stats(books, now)

    def _claim(self, claim: Claim, now: float) -> ClaimReply:
        store = self._store
        store.run("make_claim", (claim.run_id, claim.partition, now, msgspec.msgpack.encode(claim)))
        store.run("forget_claims", (now - 2 * CLAIM_SECONDS, now + 2 * CLAIM_SECONDS))
        found = store.all("claims", now - CLAIM_SECONDS, now + CLAIM_SECONDS)
        known = [_decode_claim(one) for (one,) in found]
        return ClaimReply(claims=sharing(claim, known))


def _same_history(known: str, now: str, *, certain: bool) -> bool:
    """Return whether this server has everything that was promised.

    It has on the timeline that wrote last. A standby that took over begins another one; it has all
    of it where every commit waited for standbys. A server made of a dump is another server.
    """
    if known == now:
        return True
    return certain and known.partition("/")[0] == now.partition("/")[0]
