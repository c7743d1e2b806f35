"""The worker's side of the maker: spawn, kill, and the end of each process as an event.

Everything is event-driven on one packet socket; nothing here forks. A maker that died fails what
it ran (``BoxFailed``); the next spawn starts another.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import stoker
from stoker.errors import BoxFailed
from stoker.sandbox import kernel
from stoker.sandbox.making import (
    PACKET_BYTES_MAX,
    Exited,
    FromMaker,
    Kill,
    Spawn,
    Spawned,
    ToMaker,
    WorkOrder,
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromMaker] = msgspec.msgpack.Decoder(FromMaker)
_CLOSE_SECONDS = 10.0
NEVER_FORKED = 0
"""Stands for the pid of a process that the kernel refused to make."""


class Started:
    """A process the maker started."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.pid: asyncio.Future[int] = loop.create_future()
        self.exited: asyncio.Future[Exited] = loop.create_future()
        # A caller that was cancelled looks at neither; that is no forgotten error.
        for future in (self.pid, self.exited):
            future.add_done_callback(lambda f: f.cancelled() or f.exception())


class MakerClient:
    """One maker process and what it runs.

    **Cancellation:** a cancelled ``spawn`` may have started its process; it is killed.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._running: dict[int, Started] = {}
        self._sending = asyncio.Lock()
        self.dead = False
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    def start(cls) -> "MakerClient":
        """Start the helper; call it on the event loop's thread, which it dies with."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # What we can import it can, wherever we were installed; nothing else of our environment.
        found = [str(Path(stoker.__file__).parent.parent), *filter(None, sys.path)]
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-m", "stoker.sandbox.maker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(dict.fromkeys(found))},
                cwd="/",
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    async def spawn(
        self, order: WorkOrder, standard: Sequence[int], passed: Sequence[int] = ()
    ) -> Started:
        """Start a process; ``passed``: descriptors of cgroups, of mounts, of ``order.targets``.

        Raises:
            BoxFailed: the maker is gone.
        """
        mounts = len(order.place.targets) if order.place else 0
        fits = len(passed) == order.cgroups + mounts + len(order.targets)
        assert fits, "descriptors do not fit the order"
        started = Started(next(self._numbers), self._loop)
        self._running[started.number] = started
        spec = kernel.memory_file("order", _encoder.encode(order))
        try:
            await self._send(Spawn(started.number), [spec, *standard, *passed])
            await asyncio.shield(started.pid)
        except asyncio.CancelledError:
            self._loop.create_task(self._end(started))
            raise
        finally:
            os.close(spec)
        return started

    async def _end(self, started: Started) -> None:
        with contextlib.suppress(BoxFailed):
            await self.kill(started)

    async def kill(self, started: Started) -> None:
        """Ask for the end of one process; ``exited`` tells when it is over."""
        if not started.exited.done() and not self.dead:
            await self._send(Kill(started.number), [])

    async def _send(self, message: ToMaker, descriptors: list[int]) -> None:
        packet = _encoder.encode(message)
        async with self._sending:
            while True:
                if self.dead:
                    raise self._gone()
                try:
                    socket.send_fds(self._control, [packet], descriptors)
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    raise self._gone() from error
                else:
                    return

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._control, lambda: _set(ready))
        try:
            await ready
        finally:
            self._loop.remove_writer(self._control)

    def _receive(self) -> None:
        while not self.dead:
            try:
                packet = self._control.recv(PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self._fail()
                return
            self._deliver(_decoder.decode(packet))

    def _deliver(self, message: FromMaker) -> None:
        started = self._running.get(message.number)
        if started is None:
            return
        if isinstance(message, Spawned):
            if not started.pid.done():
                started.pid.set_result(message.pid)
            return
        del self._running[message.number]
        if not started.pid.done():
            started.pid.set_result(NEVER_FORKED)
        if not started.exited.done():
            started.exited.set_result(message)

    def _fail(self) -> None:
        self.dead = True
        self._loop.remove_reader(self._control.fileno())
        for started in self._running.values():
            for future in (started.pid, started.exited):
                if not future.done():
                    future.set_exception(self._gone())
        self._running.clear()

    def _gone(self) -> BoxFailed:
        return BoxFailed(
            f"the box maker (pid {self._process.pid}) is gone; what it ran was killed with it; "
            "the next box starts another one"
        )

    async def close(self) -> None:
        """End the helper and everything it still runs."""
        if not self.dead:
            self._fail()
        self._control.close()
        await asyncio.to_thread(self._process.wait, _CLOSE_SECONDS)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
