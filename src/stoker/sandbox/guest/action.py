"""One action in a guest: start it, feed it, drain it, watch its limits, leave no process behind.

The order is the host's (``supervise``): the main process ends or is ended → everything else is
killed → the pipes are drained → the verdict is read from the counters. The *first* reason to stop
wins. Output is sent as it comes, so what was said before a guest died is not lost.
"""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from stoker.sandbox.guest.counters import Counters, Group
from stoker.sandbox.guest.program import ERROR_BYTES_MAX
from stoker.sandbox.guest.wire import BODY_BYTES_MAX, CHANNEL_FIRST, STDIN, WINDOW_BYTES

if TYPE_CHECKING:
    from stoker.sandbox.guest.door import Door

_TICK_LEAST_SECONDS = 0.02
_TICK_MOST_SECONDS = 0.1
_FLOOD_FACTOR = 2
_CLEAR_SECONDS = 20.0
_PIPE_BYTES = 1024 * 1024


class Bounds(NamedTuple):
    """How long and how much."""

    timeout_seconds: float
    cpu_seconds: float
    output_bytes: int


Start = Callable[[list[int], int], NoReturn]
"""Makes a forked child what it is to be: these become its 0, 1, 2 …, the last takes its errors."""


class Watch(Protocol):
    """The runner's loop: who is told when a descriptor has something, or has room."""

    def reads(self, descriptor: int, ready: Callable[[], object] | None) -> None:
        """Call ``ready`` while it can be read; ``None``: no more."""
        ...

    def writes(self, descriptor: int, ready: Callable[[], object] | None) -> None:
        """Call ``ready`` while it can be written; ``None``: no more."""
        ...

    def forget(self, descriptor: int) -> None:
        """Watch it no more."""
        ...

    def send(self, kind: str, body: bytes = b"", **fields: object) -> None:
        """Send a frame to the host."""
        ...


class _Output:
    """One output pipe; sends the first ``cap`` bytes on and counts all."""

    def __init__(self, watch: Watch, stream: int, cap: int, on_flood: Callable[[], None]) -> None:
        self.descriptor, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.descriptor, False)
        with contextlib.suppress(OSError):  # beyond the quota the default size does
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.total = 0
        self._watch, self._stream, self._cap, self._on_flood = watch, stream, cap, on_flood
        watch.reads(self.descriptor, self.readable)

    def readable(self) -> bool:
        """Take what is there; return whether there may be more."""
        try:
            data = os.read(self.descriptor, BODY_BYTES_MAX)
        except BlockingIOError:
            return False
        if not data:
            self._watch.forget(self.descriptor)
            return False
        room = max(0, self._cap - self.total)
        if room:
            self._watch.send("output", data[:room], stream=self._stream)
        self.total += len(data)
        if self.total > _FLOOD_FACTOR * self._cap:
            self._on_flood()
        return True

    def close(self) -> None:
        """Take what is left, which nobody adds to any more."""
        while self.readable():
            pass
        self._watch.forget(self.descriptor)
        os.close(self.descriptor)


class Stream:
    """Carries bytes between the host and one descriptor: stdin, or a private channel."""

    def __init__(self, watch: Watch, number: int, descriptor: int, *, both_ways: bool) -> None:
        os.set_blocking(descriptor, False)
        self._watch, self.number, self._descriptor = watch, number, descriptor
        self._waiting = bytearray()
        self._ending = False
        self._said_all = not both_ways
        self._both_ways = both_ways
        self._window = WINDOW_BYTES
        if both_ways:
            watch.reads(descriptor, self._readable)

    def give(self, body: bytes) -> None:
        """Pass bytes on to the program; none: it has come to their end."""
        self._waiting += body
        self._ending = self._ending or not body
        if self._descriptor >= 0:
            self._watch.writes(self._descriptor, self._writable)

    def taken(self, count: int) -> None:
        """Hear that the host has taken so much."""
        self._window += count
        if not self._said_all and self._descriptor >= 0 and self._window > 0:
            self._watch.reads(self._descriptor, self._readable)

    def _readable(self, room: int | None = None) -> bool:
        """Pass on what the program said; return whether there may be more."""
        try:
            data = os.read(self._descriptor, min(BODY_BYTES_MAX, room or self._window))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._watch.send("channel", data, stream=self.number)
        self._window -= len(data)
        self._said_all = not data
        if not data or self._window <= 0:
            self._watch.reads(self._descriptor, None)
        return bool(data)

    def _writable(self) -> None:
        count = 0
        try:
            if self._waiting:
                count = os.write(self._descriptor, self._waiting)
        except BlockingIOError:
            return
        except OSError:  # the program reads no more
            count = len(self._waiting)
        del self._waiting[:count]
        if count:
            self._watch.send("taken", stream=self.number, count=count)
        if self._waiting:
            return
        self._watch.writes(self._descriptor, None)
        if self._ending and self._both_ways:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._descriptor)) as end,
            ):
                end.shutdown(socket.SHUT_WR)
        elif self._ending:
            self.close()

    @property
    def over(self) -> bool:
        """Whether both have come to their end, and the program has taken what there was."""
        return self._said_all and self._ending and not self._waiting

    def drop(self) -> None:
        """End, whatever is on its way."""
        if self._descriptor >= 0:
            self._watch.forget(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Send what the program still said, and end.

        That is no more than the kernel held for it, and may go beyond the window.
        """
        if self._descriptor < 0:
            return
        while not self._said_all and self._readable(BODY_BYTES_MAX):
            pass
        self.drop()


class Action:
    """One program and all it starts."""

    def __init__(
        self,
        watch: Watch,
        group: Group,
        start: Start,
        bounds: Bounds,
        *,
        channels: int,
        full: Callable[[], bool],
        door: "Door | None" = None,
    ) -> None:
        self._watch, self._group, self._bounds, self._full = watch, group, bounds, full
        self._door = door
        self._before = group.counters()
        self._reason: str | None = None
        self._outputs = [
            _Output(watch, stream, bounds.output_bytes, lambda: self.stop("output"))
            for stream in (1, 2)
        ]
        self._deadline = time.monotonic() + bounds.timeout_seconds
        self._look_at = 0.0
        self.pid = self._start(start, channels)

    def _start(self, start: Start, channels: int) -> int:
        stdin, stdin_write = os.pipe2(os.O_CLOEXEC)
        pairs = [socket.socketpair() for _ in range(channels)]
        self._errors, errors = os.pipe2(os.O_CLOEXEC)
        theirs = [stdin, *(o.write_end for o in self._outputs), *(p[1].fileno() for p in pairs)]
        self.streams = {STDIN: Stream(self._watch, STDIN, stdin_write, both_ways=False)}
        for at, (ours, _) in enumerate(pairs):
            number = CHANNEL_FIRST + at
            self.streams[number] = Stream(self._watch, number, ours.detach(), both_ways=True)
        pid = os.fork()
        if pid == 0:
            start(theirs, errors)
        for descriptor in (stdin, errors, *(o.write_end for o in self._outputs)):
            os.close(descriptor)
        for _, other in pairs:
            other.close()
        return pid

    def stream(self, number: int) -> Stream | None:
        """Return the stream of this number; ``None``: it was a connection that has ended."""
        if self._door is not None and number not in self.streams:
            return self._door.streams.get(number)
        return self.streams[number]

    def stop(self, reason: str) -> None:
        """End it: ``timeout``, a limit or ``stopped``; the first reason counts."""
        if self._reason is None:
            self._reason = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._group.kill()

    def tick(self) -> float:
        """Look at every limit where it is time to; return in how many seconds to look again."""
        wait = self._look_at - time.monotonic()
        if wait <= 0:  # else a stream of bytes would be a stream of looks, each as dear as a piece
            wait = self._looked()
            self._look_at = time.monotonic() + wait
        return wait

    def _looked(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.stop("timeout")
        now = self._group.counters()
        cpu_left = self._bounds.cpu_seconds - (now.cpu_seconds - self._before.cpu_seconds)
        if kind := self._counted(now):
            self.stop(kind)
        elif cpu_left <= 0:
            self.stop("cpu")
        elif self._full():
            self.stop("disk")
        if self._reason is not None:
            return _TICK_LEAST_SECONDS
        cores = os.cpu_count() or 1
        pause = min(_TICK_MOST_SECONDS, cpu_left / cores * 0.9)
        return min(max(0.0, left), max(_TICK_LEAST_SECONDS, pause))

    def finish(self, status: int, reap: Callable[[], None]) -> None:
        """Clear away what is left of it and tell how it went; its main process was reaped.

        Raises:
            RuntimeError: a process cannot be killed; the guest is of no use any more.
        """
        self.abandon(reap)
        for output in self._outputs:
            output.close()
        for stream in self.streams.values():
            stream.close()
        if self._door is not None:
            self._door.close()
        now = self._group.counters()
        cpu = now.cpu_seconds - self._before.cpu_seconds
        error = os.read(self._errors, ERROR_BYTES_MAX).decode(errors="replace")
        os.close(self._errors)
        code, _, text = error.partition(" ")
        self._watch.send(
            "ended",
            status=status,
            stdout=self._outputs[0].total,
            stderr=self._outputs[1].total,
            reason=self._reason or self._verdict(status, now, cpu),
            stopped=self._reason is not None,
            cpu_seconds=cpu,
            memory_peak_bytes=now.memory_peak_bytes,
            error=text,
            errno=int(code) if code.isdigit() else 0,
        )

    def abandon(self, reap: Callable[[], None]) -> None:
        """Kill everything of it; nobody wants to know more."""
        give_up = time.monotonic() + _CLEAR_SECONDS
        while True:
            self._group.kill()
            reap()
            if self._group.empty():
                return
            if time.monotonic() > give_up:
                raise RuntimeError("a process cannot be killed")
            time.sleep(0.001)

    def _verdict(self, status: int, now: Counters, cpu: float) -> str:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if kind := self._counted(now):
            return kind
        if cpu >= self._bounds.cpu_seconds or number == signal.SIGXCPU:
            return "cpu"
        return "disk" if number == signal.SIGXFSZ or self._full() else ""

    def _counted(self, now: Counters) -> str:
        if now.memory_kills > self._before.memory_kills:
            return "memory"
        return "pids" if now.refused_forks > self._before.refused_forks else ""
