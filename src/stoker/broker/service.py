"""The ledger's verbs over a store: synchronous, one group of requests per transaction.

A caller opens a group, handles any number of requests, lets time pass (``settle``), answers waiting
polls, and commits; only then may replies go out. ``NotYet`` is the answer of a long poll that has
nothing to tell: the caller keeps the request and asks again after the next group, or tells the
empty reply when its time is up.

Invariant: between groups the books equal the store. ``rollback`` reads them again.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from stoker.broker import coordinator_verbs, expiry, queueing, throttling, views, worker_verbs
from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    AppendBatch,
    AppendBatchReply,
    Attach,
    Attached,
    Cancel,
    CancelReply,
    Capabilities,
    CapabilitiesRequest,
    ClaimReply,
    ClaimRequest,
    CompleteReply,
    CompleteRequest,
    DeadLettersRequest,
    Durability,
    Enroll,
    Enrolled,
    EventsReply,
    EventsRequest,
    HeartbeatRequest,
    HoldReply,
    JournalReply,
    JournalRequest,
    LeaseReply,
    LeaseRequest,
    LedgerLimits,
    Poll,
    ReleaseRequest,
    Request,
    RolloutsReply,
    RolloutsRequest,
    StartRequest,
    StatsReply,
    StatsRequest,
    TicketsReply,
    TicketsRequest,
)
from stoker.broker.books import Books
from stoker.broker.claims import Claims
from stoker.broker.dead_letters import settle_dead
from stoker.broker.loss import restored
from stoker.broker.operating import (
    AuditEntry,
    AuditReply,
    AuditRequest,
    CompactReply,
    CompactRequest,
    CopyReply,
    CopyRequest,
    OperatorReply,
    SettleDead,
)
from stoker.broker.rates import emptied, reopened
from stoker.broker.store import Meta, Store
from stoker.errors import LedgerRefused
from stoker.model.ids import Fence
from stoker.model.value import INLINE_BYTES_MAX
from stoker.seams.clock import Instant

Reply = (
    Attached
    | AppendBatchReply
    | EventsReply
    | CancelReply
    | Enrolled
    | LeaseReply
    | TicketsReply
    | HoldReply
    | CompleteReply
    | JournalReply
    | RolloutsReply
    | ActionsReply
    | StatsReply
    | ClaimReply
    | Capabilities
    | OperatorReply
)


_RESTORED_AT_ONCE = 1000
_EPOCHS_SKIPPED = 1 << 14
"""At least so many epochs lie between a copy and what is made of it: more openings than its
original will have had since, so that no fence of the one is a fence of the other (I3)."""


class NotYet(msgspec.Struct, frozen=True):
    """A long poll has nothing to tell now."""


class LedgerService:
    """One open ledger."""

    def __init__(self, store: Store, limits: LedgerLimits, durability: Durability) -> None:
        self.limits = limits
        self.durability = durability
        self._store = store
        self._books: Books
        self._expiry: expiry.Expiry
        self._grace_until = 0.0
        self._meta_stored: Meta
        claims = Claims()
        verbs: dict[type, Callable[..., Any]] = {
            Attach: self._attach,
            AppendBatch: lambda r, now: coordinator_verbs.append(self._books, r, now),
            EventsRequest: self._events,
            Cancel: lambda r, _now: coordinator_verbs.cancel_actions(self._books, r),
            Enroll: self._enroll,
            LeaseRequest: self._lease,
            TicketsRequest: lambda r, _now: self._tickets(r),
            StartRequest: self._worker(worker_verbs.start_work),
            HeartbeatRequest: self._worker(worker_verbs.heartbeat),
            CompleteRequest: self._worker(worker_verbs.complete_work),
            ReleaseRequest: self._worker(worker_verbs.release_work),
            JournalRequest: lambda r, _now: views.journal(self._books, r),
            RolloutsRequest: lambda r, _now: views.rollouts(self._books, r),
            ActionsRequest: lambda r, _now: views.actions(self._books, r),
            DeadLettersRequest: lambda r, _now: views.dead_letters(self._books, r),
            StatsRequest: lambda _r, now: views.stats(self._books, now),
            ClaimRequest: lambda r, now: claims.make(r.claim, now.boot),
            CapabilitiesRequest: lambda _r, _now: self.capabilities(),
            SettleDead: lambda r, now: settle_dead(self._books, r, now),
            AuditRequest: lambda r, _now: AuditReply(entries=tuple(store.audit(r.run_id))),
        }
        self._verbs = verbs

    def open(self, now: Instant, *, boot_id: str, lineage: str) -> None:
        """Open the store: a new epoch, durable before this returns, and a time of grace.

        ``lineage`` is used when the ledger is new, or a copy of another: then it is restored.
        **Durability:** synced.
        """
        self._store.begin()
        found = self._store.meta()
        meta = found or Meta(lineage=lineage)
        if found is not None and found.boot_id != boot_id:
            self._store.rebase(now)
            meta.buckets = {name: reopened(b, now.boot) for name, b in meta.buckets.items()}
        elif meta.copied:
            meta.buckets = {name: emptied(b, now.boot) for name, b in meta.buckets.items()}
        if found is not None:
            self._store.defer(now.boot + self.limits.lease_seconds)
            self._grace_until = now.boot + self.limits.grace_seconds
        meta.boot_id = boot_id
        meta.epoch += epochs_passed(lineage) if meta.copied else 1
        self._store.put_meta(meta)
        self._store.commit(sync=True)
        self._read(now)
        if meta.copied:
            self.begin()
            self.restore(lineage, now)
            self.commit()

    def restore(self, lineage: str, now: Instant) -> None:
        """Make a ledger of a copy, within the open group: what was after the copy is unknown.

        A new identity, new fences for every partition, every worker of the old one over, and what
        they held decided by ``loss.restored`` (I3, I12).
        """
        books, store = self._books, self._store
        before = books.meta.lineage
        books.meta.lineage, books.meta.copied = lineage, False
        for owner in store.owners():
            books.put_owner(owner._replace(fence=Fence(books.draw()), incarnation=lineage))
        for record in books.workers.values():
            record.lost, record.enlisted = True, record.enlisted._replace(ended=True)
        store.put_workers([record.enlisted for record in books.workers.values()])
        place = 0
        while rows := store.unsettled(place, _RESTORED_AT_ONCE):
            for row in rows:
                books.apply(row, restored(row))
            books.flush()
            place = rows[-1].order
        store.note(
            AuditEntry(
                at=now.wall,
                who="stoker",
                what="restored",
                run_id=None,
                action_id=None,
                detail=f"from a copy of {before}; this ledger is {lineage} now",
            )
        )
        books.sync = True

    def _read(self, now: Instant) -> None:
        meta = self._store.meta()
        assert meta is not None, "the ledger is open without a record of itself"
        self._meta_stored = meta
        self._books = Books(self._store, self.limits, msgspec.structs.replace(meta), now.boot)
        self._expiry = expiry.Expiry(self._books, self._grace_until)

    # --- groups

    def begin(
        self,
        requests: Sequence[Request] = (),  # noqa: ARG002 - engines without memory read its rows
        now: Instant | None = None,  # noqa: ARG002 - they keep time in rows, too
        waiting: Iterable[Poll] = (),  # noqa: ARG002 - they lock whom it waits for
    ) -> None:
        """Open a group that holds ``requests``; more may be handled, and ``waiting`` be asked."""
        self._store.begin()

    def expect(self, polls: Sequence[Poll]) -> None:
        """Learn which polls the open group is about to ask for."""

    def handle(self, request: Request, now: Instant) -> Reply | NotYet:
        """Carry out one request within the open group; the reply holds once it has committed.

        Raises:
            LedgerFenced: a coordinator whose fence is old; nothing was changed.
            LedgerRefused: the request does not fit; nothing was changed.
        """
        reply: Reply | NotYet = self._verbs[type(request)](request, now)
        return reply

    def settle(self, now: Instant) -> None:
        """Let time pass and parked actions in; after the group's requests, before its polls."""
        self._expiry.tick(now)
        queueing.unpark(self._books)
        throttling.pass_time(self._books, now)

    def commit(self, meanwhile: Callable[[], None] = lambda: None) -> None:  # noqa: ARG002 - nobody else works on it
        """Make the group durable as its requests demand; then its replies may go out.

        An engine whose commits are carried out elsewhere calls ``meanwhile`` until they are.

        Raises:
            StorageFull: call ``rollback``; nothing of the group was kept.
            OSError, apsw.Error: the disk failed; end the process without a reply.
        """
        books = self._books
        books.flush()
        if books.meta != self._meta_stored:
            self._store.put_meta(books.meta)
            self._meta_stored = msgspec.convert(msgspec.to_builtins(books.meta), Meta)
        self._store.commit(sync=books.sync and self.durability is Durability.POWER_SAFE)
        books.close_group()

    def rollback(self, now: Instant) -> None:
        """Undo the open group and read the books again; leases get a fresh length."""
        old = self._books
        self._store.rollback()
        self._read(now)
        self._books.counter = old.counter  # numbers drawn in vain are not drawn again
        self._books.work_seq = old.work_seq + 1
        self._books.events_seq = old.events_seq + 1
        self._books.tickets_seq = old.tickets_seq + 1

    @property
    def lineage(self) -> str:
        """Identity of this ledger."""
        return self._books.meta.lineage

    @property
    def work_seq(self) -> int:
        """Rises when a waiting lease request may have become answerable."""
        return self._books.work_seq

    @property
    def events_seq(self) -> int:
        """Rises when a waiting events request may have become answerable."""
        return self._books.events_seq

    @property
    def tickets_seq(self) -> int:
        """Rises when a waiting tickets request may have become answerable."""
        return self._books.tickets_seq

    def next_wake(self) -> float | None:
        """Return the boot time of the next thing that happens by itself, if any."""
        times = (self._expiry.next_wake(), self._books.token_due)
        return min((at for at in times if at is not None), default=None)

    def forgive(self, now: Instant) -> None:
        """Give every lease a fresh length: the ledger itself was stopped, not its workers."""
        for record in self._books.workers.values():
            record.seen = max(record.seen, now.boot)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def capabilities(self) -> Capabilities:
        """Return what this ledger promises."""
        return Capabilities(
            engine=self._store.engine,
            durability=self.durability,
            value_bytes_max=INLINE_BYTES_MAX,
            limits=self.limits,
            lineage=self._books.meta.lineage,
        )

    def maintain(self, request: CopyRequest | CompactRequest) -> CopyReply | CompactReply:
        """Work on the file as a whole, between two groups.

        Raises:
            LedgerRefused: there is no file, or work is in workers' hands.
            StorageFull: no room; nothing was changed.
        """
        if isinstance(request, CopyRequest):
            remaining, total = self._store.copy_to(request.path, request.pages)
            return CopyReply(remaining=remaining, total=total)
        if self._books.busy:
            raise LedgerRefused(
                f"work is in workers' hands (actions: {self._books.busy}), and rewriting the file "
                "keeps everybody waiting; nothing was changed; compact when the runs have ended or "
                "pause"
            )
        before, after = self._store.compact()
        return CompactReply(bytes_before=before, bytes_after=after)

    # --- verbs that need more than the books

    def _worker(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, now: verb(self._books, self._expiry, request, now)

    def _attach(self, request: Attach, _now: Instant) -> Attached:
        fence = coordinator_verbs.attach(self._books, request)
        return Attached(fence=fence, capabilities=self.capabilities())

    def _enroll(self, request: Enroll, now: Instant) -> Enrolled:
        worker_verbs.enroll(self._books, self._expiry, request, now)
        return Enrolled(lease_seconds=self.limits.lease_seconds, capabilities=self.capabilities())

    def _events(self, request: EventsRequest, _now: Instant) -> EventsReply | NotYet:
        reply = coordinator_verbs.events(self._books, request)
        return reply if reply.events or request.wait_seconds <= 0 else NotYet()

    def _lease(self, request: LeaseRequest, now: Instant) -> LeaseReply | NotYet:
        return _or_wait(worker_verbs.lease(self._books, self._expiry, request, now), request)

    def _tickets(self, request: TicketsRequest) -> TicketsReply | NotYet:
        reply = views.tickets(self._books, request)
        same = reply.mark == request.mark
        return NotYet() if same and request.wait_seconds > 0 else reply

    def poll(self, request: Poll, now: Instant) -> Reply | NotYet:
        """Ask again for a request that waits. Raises like ``handle``."""
        if isinstance(request, TicketsRequest):
            return self._tickets(request)
        if isinstance(request, EventsRequest):
            return self._events(request, now)
        return _or_wait(worker_verbs.poll(self._books, request, now), request)

    def undelivered(self, request: LeaseRequest, now: Instant) -> LeaseReply:
        """Answer a lease request that is sent again after a broken connection."""
        return worker_verbs.undelivered(self._books, request, now)


def epochs_passed(lineage: str) -> int:
    """Return how many epochs a new lineage begins above the one it comes from."""
    digest = blake2b(lineage.encode(), digest_size=2).digest()
    return _EPOCHS_SKIPPED + int.from_bytes(digest, "big") % _EPOCHS_SKIPPED


def _or_wait(reply: LeaseReply, request: LeaseRequest) -> LeaseReply | NotYet:
    empty = not reply.leases and not reply.revoked
    return NotYet() if empty and request.wait_seconds > 0 else reply
