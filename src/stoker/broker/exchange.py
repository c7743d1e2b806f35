"""Groups and long polls: what every engine's loop does between its sockets and the service.

One call of ``run`` is one group: all requests that are there, then the passing of time, then the
polls that became answerable, then one commit, then every reply. A request that breaks the service
(a bug of ours) is answered with an internal error, one that its store cannot hold with a refusal;
its neighbours are carried out without it.
"""

import logging
from collections.abc import Callable, Sequence

import apsw

from stoker.broker.base import (
    EventsReply,
    EventsRequest,
    LeaseReply,
    LeaseRequest,
    Poll,
    Request,
    TicketsReply,
    TicketsRequest,
)
from stoker.broker.operating import OUTSIDE_GROUPS
from stoker.broker.service import LedgerService, NotYet, Reply
from stoker.broker.store import StorageConflict, StorageFull, StorageLost, StorageUnfit
from stoker.errors import InternalError, LedgerRefused, LedgerStorageFailed, StokerError
from stoker.seams.clock import Instant
from stoker.seams.faultpoints import declare, reach

REPLY_BEFORE = declare("ledger.reply.before", "a committed group's replies are about to be sent")

Answer = Reply | StokerError
_TRIES = 8
_log = logging.getLogger("stoker.ledger")


class Pending:
    """One request on its way to one answer."""

    __slots__ = ("answer", "forgotten", "prepare", "request", "resent", "seen")

    def __init__(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        *,
        prepare: Callable[[Answer], None] = lambda _: None,
        resent: bool = False,
    ) -> None:
        self.request = request
        self.answer = answer
        self.prepare = prepare
        """Told the answer before its group has committed: it may never be given."""
        self.resent = resent
        """It was sent before, on a connection that broke before the reply."""
        self.seen = -1
        """The service's sequence number when it was last asked for this poll."""
        self.forgotten = False
        """Nobody waits for the answer any more."""


class Exchange:
    """Runs groups of requests through a service."""

    def __init__(self, service: LedgerService) -> None:
        self.service = service
        self._waiting: dict[Pending, None] = {}

    def run(self, group: Sequence[Pending], now: Instant) -> bool:
        """Carry out a group and answer everything that can be answered.

        Returns ``False`` when the disk was full: nothing was kept, and trying at once is no use.
        """
        if not group and not self._due(now):
            return True
        kept = True
        try:
            answers = self._tried(group, now)
        except StorageFull as error:
            kept = False
            self.service.rollback(now)
            _log.warning("no room on the disk for %d requests: %s", len(group), error)
            answers = [(pending, _no_room(error)) for pending in group]
        except (OSError, apsw.IOError, MemoryError, StorageLost):
            raise  # the disk can no longer be believed: no reply, the owner ends and reopens
        except Exception as error:  # a named boundary: one bad request must not end the ledger
            self.service.rollback(now)
            if not isinstance(error, StorageUnfit):
                _log.exception("one of %d requests broke the ledger", len(group))
            if len(group) != 1:
                if not group:
                    raise
                kept_each = [self.run((pending,), now) for pending in group]
                return all(kept_each)
            answers = [(group[0], _refusal(error))]
        reach(REPLY_BEFORE)
        for pending, answer in answers:
            self._waiting.pop(pending, None)
            if not pending.forgotten:
                pending.answer(answer)
        return kept

    def _due(self, now: Instant) -> bool:
        """Return whether there is something to do although nobody has asked for anything."""
        wake = self.service.next_wake()
        woken = any(pending.seen != self._seq(pending) for pending in self._waiting)
        return woken or (wake is not None and wake <= now.boot)

    def _tried(self, group: Sequence[Pending], now: Instant) -> list[tuple[Pending, Answer]]:
        """Carry out a group, again where another gateway was in its way."""
        for _ in range(_TRIES - 1):
            try:
                return self._group(group, now)
            except StorageConflict as error:
                self.service.rollback(now)
                _log.info("a group is tried again: %s", error)
        return self._group(group, now)

    def _group(self, group: Sequence[Pending], now: Instant) -> list[tuple[Pending, Answer]]:
        service = self.service
        service.begin([pending.request for pending in group], now, map(_polled, self._waiting))
        answers: list[tuple[Pending, Answer]] = []
        polls: list[Pending] = []
        outside = [p for p in group if isinstance(p.request, OUTSIDE_GROUPS)]
        for pending in (p for p in group if p not in outside):
            if isinstance(pending.request, Poll):
                polls.append(pending)
            else:
                self._ask(pending, answers, lambda p: service.handle(p.request, now))
        service.settle(now)
        waiting = [p for p in self._waiting if p.seen != self._seq(p)]
        service.expect([_polled(pending) for pending in (*polls, *waiting)])
        for pending in polls:
            self._ask(pending, answers, lambda p: self._first(p, now))
        for pending in [p for p in self._waiting if p.seen != self._seq(p) and p not in polls]:
            self._ask(pending, answers, lambda p: service.poll(_polled(p), now))
        service.commit(lambda: _prepare(answers))
        for pending in outside:
            self._ask(pending, answers, self._maintained)
        return answers

    def _maintained(self, pending: Pending) -> Reply:
        assert isinstance(pending.request, OUTSIDE_GROUPS), "told apart by the caller"
        try:
            return self.service.maintain(pending.request)
        except StorageFull as error:  # the group itself is committed
            raise _no_room(error) from error

    def _first(self, pending: Pending, now: Instant) -> Reply | NotYet:
        request = pending.request
        if pending.resent and isinstance(request, LeaseRequest):
            repeated = self.service.undelivered(request, now)
            if repeated.leases:
                return repeated
        return self.service.handle(request, now)

    def _ask(
        self,
        pending: Pending,
        answers: list[tuple[Pending, Answer]],
        ask: Callable[[Pending], Reply | NotYet],
    ) -> None:
        try:
            answer = ask(pending)
        except StokerError as error:
            answers.append((pending, error))
            return
        if isinstance(answer, NotYet):
            pending.seen = self._seq(pending)
            self._waiting[pending] = None
        else:
            answers.append((pending, answer))

    def _seq(self, pending: Pending) -> int:
        if isinstance(pending.request, EventsRequest):
            return self.service.events_seq
        if isinstance(pending.request, TicketsRequest):
            return self.service.tickets_seq
        return self.service.work_seq

    def forget(self, pending: Pending) -> None:
        """Stop waiting: nobody wants the answer. Called between groups only."""
        pending.forgotten = True
        self._waiting.pop(pending, None)

    def time_out(self, pending: Pending) -> None:
        """Answer a waiting poll with nothing; does nothing when it was answered already."""
        if self._waiting.pop(pending, self) is self:
            return
        pending.answer(nothing_for(pending.request))

    @property
    def waiting(self) -> int:
        """Polls that wait."""
        return len(self._waiting)

    def next_wake(self) -> float | None:
        """Return the boot time of the next thing that happens by itself."""
        return self.service.next_wake()


def _prepare(answers: Sequence[tuple[Pending, Answer]]) -> None:
    for pending, answer in answers:
        if not pending.forgotten:
            pending.prepare(answer)


def _polled(pending: Pending) -> Poll:
    assert isinstance(pending.request, Poll), "only polls wait"
    return pending.request


def nothing_for(request: Request) -> Reply:
    """Return the reply of a poll that has nothing to tell."""
    if isinstance(request, TicketsRequest):
        return TicketsReply(tickets=(), mark=request.mark)
    return EventsReply(events=()) if isinstance(request, EventsRequest) else LeaseReply()


def _refusal(error: Exception) -> StokerError:
    if isinstance(error, StorageUnfit):
        return LedgerRefused(
            f"{error}, and an id or name of this request has one; nothing was changed; send it "
            "without"
        )
    return InternalError(f"the ledger could not carry out a request: {error!r}")


def _no_room(error: StorageFull) -> LedgerStorageFailed:
    return LedgerStorageFailed(
        f"the ledger's disk is full ({error}); nothing of this request was kept; free some space "
        "and send it again"
    )
