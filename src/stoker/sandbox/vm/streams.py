"""What one order to a guest gathers: the streams of an action, or the files of an answer.

Everything here is bounded by what was asked for; whatever comes beyond is a ``ValueError``, by
which the link is broken.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

from stoker.sandbox.beneath import NAMES_BYTES_MAX
from stoker.sandbox.guest.wire import (
    BODY_BYTES_MAX,
    CONNECTIONS_MAX,
    DOOR_FIRST,
    STDIN,
    WINDOW_BYTES,
    frame,
)
from stoker.sandbox.vm import said

_FLUSH_SECONDS = 5.0

Send = Callable[[bytes], None]
Connect = Callable[[], int]
"""Gives a descriptor that is the receiver's to close, without waiting; OSError: there is none."""


class Relay:
    """Joins one end of a private channel on the host with the program's descriptor in a guest."""

    def __init__(self, send: Send, number: int, descriptor: int) -> None:
        self._send, self._number = send, number
        self._end = socket.socket(fileno=descriptor)
        self._end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._untaken = 0
        self._waiting = bytearray()
        self._ending = self._said_all = False
        self._flushed = asyncio.Event()
        self._flushed.set()

    def begin(self) -> None:
        """Pass on what the other end says."""
        self._loop.add_reader(self._end.fileno(), self._readable)

    def taken(self, count: int) -> None:
        """Hear that the program has taken so much."""
        if count > self._untaken:
            raise ValueError("more was taken than was sent")
        self._untaken -= count
        # A full window again: to read nothing would look like the end.
        room = self._untaken < WINDOW_BYTES
        if room and self._end.fileno() >= 0 and not self._said_all:
            self._loop.add_reader(self._end.fileno(), self._readable)

    def put(self, body: bytes) -> None:
        """Take what the program said; none: its end."""
        # Twice: at its end a runner sends what its kernel still held, window or not.
        if len(self._waiting) + len(body) > 2 * WINDOW_BYTES or self._ending:
            raise ValueError("a channel ran over its window or its end")
        self._waiting += body
        self._ending = not body
        if self._end.fileno() >= 0:
            self._flushed.clear()
            self._loop.add_writer(self._end.fileno(), self._writable)

    async def flushed(self) -> None:
        """Wait until the other end has taken all, or never will."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._flushed.wait()

    def _readable(self) -> None:
        try:
            data = self._end.recv(min(BODY_BYTES_MAX, WINDOW_BYTES - self._untaken))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._untaken += len(data)
        self._said_all = not data
        self._send(frame("input", data, stream=self._number))
        if not data or self._untaken >= WINDOW_BYTES:
            self._loop.remove_reader(self._end.fileno())

    def _writable(self) -> None:
        count = 0
        try:
            if self._waiting:
                count = self._end.send(self._waiting)
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            count = len(self._waiting)
        del self._waiting[:count]
        if count:
            self._send(frame("taken", stream=self._number, count=count))
        if not self._waiting:
            self._loop.remove_writer(self._end.fileno())
            self._flushed.set()
            if self._ending:
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_WR)

    @property
    def ended(self) -> bool:
        """Whether both have come to their end."""
        return self._said_all and self._ending

    @property
    def over(self) -> bool:
        """Whether they have, and the other end has taken all."""
        return self.ended and not self._waiting

    def close(self) -> None:
        """Let the other end see that nobody is here."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end.fileno())
            self._loop.remove_writer(self._end.fileno())
            self._end.close()


class Running:
    """The streams of one action; ``connect`` gives a connection to its way out."""

    def __init__(
        self,
        send: Send,
        output_bytes: int,
        relays: Mapping[int, Relay],
        connect: Connect | None = None,
    ) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self.ended: asyncio.Future[said.Ended] = asyncio.get_running_loop().create_future()
        self.relays = relays
        self._connect = connect
        self._connections: dict[int, Relay] = {}
        self._next = DOOR_FIRST
        self._send = send
        self._cap = output_bytes
        self._untaken = 0
        self._room = asyncio.Event()

    async def feed(self, stdin: bytes) -> None:
        """Give the program its input, as fast as it takes it."""
        view = memoryview(stdin)
        while view:
            room = WINDOW_BYTES - self._untaken
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            body, view = view[: min(room, BODY_BYTES_MAX)], view[min(room, BODY_BYTES_MAX) :]
            self._untaken += len(body)
            self._send(frame("input", body, stream=STDIN))
        self._send(frame("input", stream=STDIN))

    def hear(
        self,
        message: said.Output | said.Channel | said.Connected | said.Taken | said.Ended,
        body: bytes,
    ) -> None:
        """Take one frame in."""
        if isinstance(message, said.Output):
            if len(self.kept[message.stream]) + len(body) > self._cap:
                raise ValueError("more output than is kept")
            self.kept[message.stream] += body
        elif isinstance(message, said.Connected):
            self._connected(message.stream)
        elif isinstance(message, said.Channel):
            self._relay(message.stream).put(body)
        elif isinstance(message, said.Taken):
            self._taken(message)
        else:
            for stream, total in ((1, message.stdout), (2, message.stderr)):
                if len(self.kept[stream]) != min(total, self._cap):
                    raise ValueError("its count of output is not what it sent")
            self.ended.set_result(message)

    def _taken(self, message: said.Taken) -> None:
        number = message.stream
        if number == STDIN:
            if message.count > self._untaken:
                raise ValueError("more was taken than was sent")
            self._untaken -= message.count
            self._room.set()
        elif not DOOR_FIRST <= number < self._next or number in self._connections:
            self._relay(number).taken(message.count)

    def _connected(self, number: int) -> None:
        if self._connect is None or number != self._next:
            raise ValueError(f"a connection {number} where there is no door, or out of turn")
        self._next += 1
        for ended in [n for n, relay in self._connections.items() if relay.over]:
            self._connections.pop(ended).close()
        if len(self._connections) >= CONNECTIONS_MAX:
            # The proxy is slow to take what a program left when it ended its connection.
            left = [n for n, relay in self._connections.items() if relay.ended]
            if not left:
                raise ValueError(f"more than {CONNECTIONS_MAX} connections")
            self._connections.pop(left[0]).close()
        try:
            end = self._connect()
        except OSError as error:
            raise ValueError(f"nor could we connect it: {error.strerror}") from error
        relay = self._connections[number] = Relay(self._send, number, end)
        relay.begin()

    def _relay(self, number: int) -> Relay:
        relay = self.relays.get(number) or self._connections.get(number)
        if relay is None:
            raise ValueError(f"there is no channel {number}")
        return relay

    def close(self) -> None:
        """Let go of what its programs connected to."""
        while self._connections:
            self._connections.popitem()[1].close()


WORDS_BYTES_MAX = 4 * NAMES_BYTES_MAX + 16 * 1024 * 1024
"""Names and reasons of one answer: a byte of a name is shown as four at most; reasons are short."""


class Answer:
    """The files of one answer."""

    def __init__(self, *, bytes_max: int, files_max: int) -> None:
        self.done: asyncio.Future[said.Done | said.Written] = (
            asyncio.get_running_loop().create_future()
        )
        self.files: list[tuple[said.File, bytes]] = []
        self._left = bytes_max
        self._files_max = files_max
        self._words_left = WORDS_BYTES_MAX
        self._content = bytearray()

    def hear(
        self, message: said.Written | said.Content | said.File | said.Done, body: bytes
    ) -> None:
        """Take one frame in."""
        if self.done.done():
            raise ValueError("an answer after its end")
        if isinstance(message, said.Content):
            self._left -= len(body)
            if self._left < 0:
                raise ValueError("more content than was asked for")
            self._content += body
        elif isinstance(message, said.File):
            if len(self.files) >= self._files_max:
                raise ValueError("more files than were asked for")
            self._words_left -= len(message.name) + len(message.refused or "")
            if self._words_left < 0:
                raise ValueError("more names than any walk gives")
            self.files.append((message, bytes(self._content)))
            self._content.clear()
        else:
            self.done.set_result(message)
