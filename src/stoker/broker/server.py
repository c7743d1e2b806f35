"""The owner's loop: drain every ready socket, carry out one group, reply; no timer, no poll.

While a group syncs, the next one gathers in the sockets' buffers: that is the group commit. Replies
leave only after ``Exchange.run`` has returned, hence after their commit. A peer that sends what is
not our protocol, or that runs as somebody else, is told so and closed; the loop lives on (B14).
"""

import logging
import os
import selectors
import socket
import struct
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import msgspec

from stoker.broker.base import Poll
from stoker.broker.envelope import (
    CONNECTION,
    Answer,
    Call,
    Forget,
    decode_hello,
    decode_incoming,
    encode,
)
from stoker.broker.exchange import Answer as Outcome
from stoker.broker.exchange import Exchange, Pending, nothing_for
from stoker.errors import LedgerFenced, StokerError, WireViolation
from stoker.seams.clock import Clock, Instant
from stoker.seams.faultpoints import declare, end, reach, tears
from stoker.wire.frames import PROTOCOL_VERSION, FrameDecoder, Hello, frame

_READ_BYTES = 256 * 1024
_UNSENT_BYTES_MAX = 256 * 1024 * 1024
"""A peer that does not read for this long a queue is closed."""
_SLEEP_SECONDS_MAX = 3600.0
"""No deadline is too far away for ``select``, which takes 24 days at most."""
_FULL_SECONDS = 0.2
REPLY_SEND = declare("ledger.reply.send", "the bytes of replies are about to leave", "torn")
REPLY_LOST = declare("ledger.reply.lost", "replies are about to be sent to one peer", "lost")
REPLY_AFTER = declare("ledger.reply.after", "a group's replies have left")

_PEER = struct.Struct("3i")
_log = logging.getLogger("stoker.ledger")


class Connection:
    """One peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameDecoder()
        self.greeted = False
        """It has said what it is; until then it may be anybody, or a knock at the door."""
        self.role = "stranger"
        self.unsent = bytearray()
        self.calls: dict[int, Pending] = {}
        self.events = selectors.EVENT_READ
        self.awaited = False
        """A poll was answered: whoever waited for it goes on with it."""
        self.closing = False
        """Close once everything is sent; nothing more is read."""
        self.closed = False


class Server:
    """Serves one exchange on one listening socket until nobody has been there for a while."""

    def __init__(
        self, exchange: Exchange, listener: socket.socket, clock: Clock, idle_exit_seconds: float
    ) -> None:
        self._exchange = exchange
        self._listener = listener
        self._clock = clock
        self._idle_exit = idle_exit_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._connections: set[Connection] = set()
        self._alarms: list[tuple[float, int, Connection, int]] = []
        self._serial = count()
        self._stopping = False
        self._breathe = False
        """The disk was full: do not spin on what time demands."""
        self._group: list[Pending] = []

    def watch(self, source: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` before a group whenever ``source`` can be read."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def stop(self) -> None:
        """End after the group that is being carried out; may be called by a signal handler."""
        self._stopping = True
        self._wake_writer.send(b"x")  # a signal alone does not end a select

    def serve(self) -> None:
        """Run until stopped or idle. Raises what the disk raises; then no reply has gone out."""
        quiet_since = self._clock.monotonic()
        after = self._clock.now()
        while not self._stopping:
            if self._needed():
                quiet_since = self._clock.monotonic()
            elif self._clock.monotonic() - quiet_since >= self._idle_exit:
                return
            timeout = self._timeout(quiet_since)
            ready = self._selector.select(timeout)
            before, after = after, self._clock.now()
            self._forgive_own_sleep(before, after, timeout)
            for key, mask in ready:
                self._serve_ready(key.data, mask)
            group, self._group = self._group, []
            self._breathe = not self._exchange.run(group, after)
            self._ring()
            unsent = [c for c in self._connections if c.unsent or c.closing]
            for connection in sorted(unsent, key=lambda c: not c.awaited):
                self._send(connection)
            if group:
                reach(REPLY_AFTER)

    def close(self) -> None:
        """Close every socket."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()

    def _needed(self) -> bool:
        """Whether somebody is here. A knock is nobody: each new owner tries its neighbours' doors.

        Where owners come and go, those knocks would keep one that nobody uses for ever.
        """
        return any(connection.greeted for connection in self._connections)

    def _timeout(self, quiet_since: float) -> float | None:
        moments: list[float] = []
        wake = self._exchange.next_wake()
        if wake is not None:
            moments.append(wake - self._clock.now().boot)
        if self._alarms:
            moments.append(self._alarms[0][0] - self._clock.monotonic())
        if not self._needed():
            moments.append(quiet_since + self._idle_exit - self._clock.monotonic())
        least = _FULL_SECONDS if self._breathe else 0.0
        return max(least, min(*moments, _SLEEP_SECONDS_MAX)) if moments else None

    def _forgive_own_sleep(self, before: Instant, after: Instant, timeout: float | None) -> None:
        """A ledger that was itself stopped must not take its own silence for its workers'.

        Nor may a clock that was set back (a database server's may be) make the dead look alive.
        """
        much = self._exchange.service.limits.lease_seconds / 3
        passed = after.boot - before.boot
        if passed < -much or (timeout is not None and passed - timeout > much):
            _log.warning("this ledger was stopped, or its clock set, by %.1f s", passed)
            self._exchange.service.forgive(after)

    # --- reading

    def _serve_ready(self, connection: Connection | Callable[[], None] | None, mask: int) -> None:
        if callable(connection):
            connection()
            return
        if connection is None:
            self._accept()
            return
        if mask & selectors.EVENT_READ and not connection.closing:
            self._read(connection)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # for instance no descriptors left: the others are served on
                _log.warning("a connection could not be taken: %s", error)
                return
            sock.setblocking(False)
            connection = Connection(sock)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)
            peer = peer_uid(sock)
            if peer not in (0, os.getuid()):
                self._refuse(connection, f"user {peer} may not use the ledger of {os.getuid()}")
            else:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        while not connection.closing:
            try:
                data = connection.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._drop(connection)
                return
            try:
                for document in connection.frames.feed(data):
                    self._take(connection, document)
            except (WireViolation, msgspec.MsgspecError) as error:
                self._refuse(connection, f"not a message of this protocol: {error}")
            if len(data) < _READ_BYTES:
                return

    def _take(self, connection: Connection, document: bytes) -> None:
        if not connection.greeted:
            self._greet(connection, decode_hello(document))
            return
        message = decode_incoming(document)
        if isinstance(message, Forget):
            self._forget(connection, message.call_id)
        else:
            self._call(connection, message)

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise WireViolation(
                f"the peer speaks protocol {hello.protocol}, this ledger {PROTOCOL_VERSION}; "
                "use one version of stoker for a run"
            )
        connection.role = hello.role
        lineage = self._exchange.service.lineage
        if hello.lineage not in ("", lineage):
            fault = LedgerFenced(
                f"this ledger was restored from a copy: it is {lineage} now, and this {hello.role} "
                f"knows {hello.lineage}; what it holds of that is void, and nothing was changed; "
                "end it and start it again"
            )
            self._end(connection, fault)
            return
        connection.greeted = True
        reply = Hello(protocol=PROTOCOL_VERSION, role="ledger", lineage=lineage)
        connection.unsent += frame(encode(reply))

    def _call(self, connection: Connection, call: Call) -> None:
        if call.call_id <= CONNECTION or call.call_id in connection.calls:
            raise WireViolation(f"call id {call.call_id} is in use or reserved")

        prepared: list[tuple[Outcome, bytes]] = []

        def prepare(outcome: Outcome) -> None:
            prepared[:] = [(outcome, _encoded(call.call_id, outcome))]

        def answer(outcome: Outcome) -> None:
            connection.calls.pop(call.call_id, None)
            connection.awaited |= isinstance(call.request, Poll)
            if not prepared or prepared[0][0] is not outcome:
                prepare(outcome)
            self._queue(connection, prepared[0][1])

        pending = Pending(call.request, answer, prepare=prepare, resent=call.resent)
        connection.calls[call.call_id] = pending
        self._group.append(pending)
        if isinstance(call.request, Poll) and call.request.wait_seconds > 0:
            at = self._clock.monotonic() + call.request.wait_seconds
            heappush(self._alarms, (at, next(self._serial), connection, call.call_id))

    def _forget(self, connection: Connection, call_id: int) -> None:
        """Answer a withdrawn poll with nothing, unless its answer is already on the way."""
        pending = connection.calls.get(call_id)
        if pending is None:
            return
        if pending in self._group:
            self._group.remove(pending)
            pending.answer(nothing_for(pending.request))
        else:
            self._exchange.time_out(pending)

    def _ring(self) -> None:
        """Answer polls whose time is up."""
        now = self._clock.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            _, _, connection, call_id = heappop(self._alarms)
            pending = connection.calls.get(call_id)
            if pending is not None:
                self._exchange.time_out(pending)

    # --- writing

    def _queue(self, connection: Connection, encoded: bytes) -> None:
        if connection.closed:
            return
        connection.unsent += encoded
        if len(connection.unsent) > _UNSENT_BYTES_MAX:
            _log.warning("a %s does not read its replies; closed", connection.role)
            self._drop(connection)

    def _refuse(self, connection: Connection, why: str) -> None:
        self._end(connection, WireViolation(f"the ledger closed the connection: {why}"))

    def _end(self, connection: Connection, error: StokerError) -> None:
        _log.warning("a %s was refused: %s", connection.role, error)
        connection.unsent += frame(encode(Answer(CONNECTION, fault=error.record())))
        connection.closing = True

    def _send(self, connection: Connection) -> None:
        connection.awaited = False
        if connection.unsent and reach(REPLY_LOST):
            self._drop(connection)
            return
        if connection.unsent and tears(REPLY_SEND):
            del connection.unsent[len(connection.unsent) // 2 :]
        try:
            while connection.unsent:
                sent = connection.sock.send(connection.unsent)
                del connection.unsent[:sent]
            end(REPLY_SEND)
        except BlockingIOError:
            self._watch(connection, writing=True)
            return
        except OSError:
            self._drop(connection)
            return
        if connection.closing:
            self._drop(connection)
        else:
            self._watch(connection, writing=False)

    def _watch(self, connection: Connection, *, writing: bool) -> None:
        reading = 0 if connection.closing else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if writing else 0)
        if events != connection.events:
            self._selector.modify(connection.sock, events, connection)
            connection.events = events

    def _drop(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = connection.closing = True
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for pending in connection.calls.values():
            self._exchange.forget(pending)
        connection.calls.clear()


def _encoded(call_id: int, outcome: Outcome) -> bytes:
    if isinstance(outcome, StokerError):
        answer = Answer(call_id, fault=outcome.record())
    else:
        answer = Answer(call_id, reply=outcome)
    try:
        return frame(encode(answer))
    except WireViolation as error:  # a reply over the frame limit: ask for less
        return frame(encode(Answer(call_id, fault=error.record())))


def peer_uid(sock: socket.socket) -> int:
    """Return the user who opened the other end of a unix socket, by the kernel's word."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(raw)[1])
