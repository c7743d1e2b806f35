"""The host's end of a guest: orders go in, frames come out, and none of them is believed.

A frame that is too large, of the wrong type, out of turn, or more than was asked for breaks the
link for good; so do an answer that does not come in time and a guest that goes away. Then the box
is lost: ``GuestLost`` says why. What the host holds of a guest is bounded by what was asked for.

File orders and a running action do not wait for each other; two of a kind take turns.

**Cancellation:** of an action: the guest stops it, and is waited for; the link goes on.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from stoker.model.tools import ExportResult, ReadResult
from stoker.sandbox.guest.wire import CHANNEL_FIRST, HEADER_BYTES_MAX, Frames, chunks, frame
from stoker.sandbox.vm import said
from stoker.sandbox.vm.streams import Answer, Connect, Relay, Running

_READ_BYTES = 256 * 1024
_SENDING_BYTES_MAX = 1024 * 1024
_UNREAD_BYTES_MAX = 48 * 1024 * 1024
"""Twice the windows of all streams, and an order: more waits only for a guest that speaks and does
not read, as each of its frames has an answer."""
_FILES_SECONDS = 60.0
_GRACE_SECONDS = 15.0
"""Past its timeout an action's end must be told by then; a busy host's guest may be late."""
_ENTRIES_MAX = 50_001

_T = TypeVar("_T")


class GuestLost(Exception):
    """The guest is gone or cannot be believed; with what an action had said until then."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.kept: tuple[bytes, bytes] = (b"", b"")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One action, as the runner is told of it."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    rlimits: Mapping[str, tuple[int, int]]
    timeout_seconds: float
    cpu_seconds: float
    output_bytes: int
    door: int = 0
    """Port of the guest's loopback on which its way out is found; 0: it has none."""
    authorities: Sequence[str] = ()
    """A file of the guest, and whom it is to trust beside those that are known; empty: none."""


class Carry(msgspec.Struct, frozen=True, kw_only=True):
    """The files of the box, to be given out or taken in through one channel."""

    outwards: bool
    bounds: tuple[int, int]
    """Bytes and names at most."""
    timeout_seconds: float
    output_bytes: int


class GuestRun(msgspec.Struct, frozen=True, kw_only=True):
    """How an action ended, and what it wrote."""

    ended: said.Ended
    stdout: bytes
    stderr: bytes


class GuestLink:
    """Speaks with one runner over a connected socket, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(HEADER_BYTES_MAX)
        self._sending = bytearray()
        self._room = asyncio.Event()
        self._room.set()
        self.lost: GuestLost | None = None
        self._plain: asyncio.Future[said.Ready | said.Adopted] | None = None
        self._ready: asyncio.Future[said.Ready | said.Adopted] = self._loop.create_future()
        self._ready.add_done_callback(_looked_at)
        self._run: Running | None = None
        self._answer: Answer | None = None
        self._running = asyncio.Lock()
        self._filing = asyncio.Lock()
        self._transfers: set[asyncio.Task[Any]] = set()
        self._loop.add_reader(end.fileno(), self._readable)

    async def ready(self, seconds: float) -> None:
        """Wait until the runner has begun."""
        await self._within(self._ready, seconds, "it did not begin")

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Have nothing begin and nothing on its way: what began is waited for.

        Raises:
            GuestLost: the guest is gone.
        """
        async with self._running:
            # An answer to this says that the runner has taken whatever was told before.
            await self.read(".", bytes_max=1)
            async with self._filing:
                self._check()
                yield

    async def adopt(
        self,
        name: str,
        wall_ns: int,
        limits: Mapping[str, int],
        *,
        entropy: bytes,
        seconds: float,
    ) -> None:
        """Let a forked guest become a box of its own."""
        self._plain = self._loop.create_future()
        self._plain.add_done_callback(_looked_at)
        self._send(frame("adopt", entropy, name=name, wall_ns=wall_ns, **limits))
        await self._within(self._plain, seconds, "it did not answer")

    async def run(
        self,
        order: Order | Carry,
        stdin: bytes,
        channels: Sequence[int] = (),
        connect: Connect | None = None,
    ) -> GuestRun:
        """Run a program to its end; ``channels`` are ours to close.

        ``connect`` gives a connection for each that it makes to its door.

        Raises:
            GuestLost: the guest did not survive it, or lied.
        """
        relays = {
            CHANNEL_FIRST + at: Relay(self._send, CHANNEL_FIRST + at, fd)
            for at, fd in enumerate(channels)
        }
        try:
            async with self._running:
                run = self._run = Running(self._send, order.output_bytes, relays, connect)
                try:
                    return await self._ran(run, order, stdin)
                except GuestLost as lost:
                    lost.kept = (bytes(run.kept[1]), bytes(run.kept[2]))
                    raise
                finally:
                    self._run = None
                    run.close()
        finally:
            for relay in relays.values():
                relay.close()

    async def _ran(self, run: Running, order: Order | Carry, stdin: bytes) -> GuestRun:
        self._check()
        kind = "run" if isinstance(order, Order) else "carry"
        self._send(frame(kind, channels=len(run.relays), **msgspec.to_builtins(order)))
        for relay in run.relays.values():
            relay.begin()
        feeding = self._loop.create_task(run.feed(stdin))
        try:
            seconds = order.timeout_seconds + _GRACE_SECONDS
            ended = await self._within(run.ended, seconds, "an action did not end in time")
        except asyncio.CancelledError:
            if self.lost is None:
                self._send(frame("stop"))
                with contextlib.suppress(GuestLost):
                    await self._within(run.ended, _GRACE_SECONDS, "it did not stop an action")
            raise
        finally:
            feeding.cancel()
            if not run.ended.done():
                self._break("an action was left while it ran")
        await asyncio.wait([feeding])
        for relay in run.relays.values():
            await relay.flushed()
        return GuestRun(ended=ended, stdout=bytes(run.kept[1]), stderr=bytes(run.kept[2]))

    async def carry(self, order: Carry, channel: int) -> GuestRun:
        """Give out or take in the files of the box, while no other of them is touched.

        Raises:
            GuestLost: as for ``run``.
        """
        try:
            await self._filing.acquire()
        except BaseException:
            os.close(channel)
            raise
        try:
            return await self.run(order, b"", (channel,))
        finally:
            self._filing.release()

    def distrust(self, why: str) -> GuestLost:
        """End the link with a guest that lied in what only its receiver can check."""
        return self._break(f"it broke the protocol: {why}")

    async def write(self, path: str, content: bytes) -> str | None:
        """Write one file; return why it was refused."""
        return await self._to_its_end(self._write(path, content))

    async def _write(self, path: str, content: bytes) -> str | None:
        async with self._files(Answer(bytes_max=0, files_max=0)) as answer:
            bodies = list(chunks(content)) or [memoryview(b"")]
            for at, body in enumerate(bodies):
                await self._sent(frame("write", body, path=path, more=at + 1 < len(bodies)))
            done = await answer.done
            assert isinstance(done, said.Written)
            return done.refused

    async def read(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one file."""
        return await self._to_its_end(self._read(path, bytes_max))

    async def _read(self, path: str, bytes_max: int) -> ReadResult:
        async with self._files(Answer(bytes_max=bytes_max, files_max=1)) as answer:
            await self._sent(frame("read", path=path, bytes_max=bytes_max))
            await answer.done
            if len(answer.files) != 1:
                raise self._break("an answer without its file")
            file, content = answer.files[0]
            if file.refused is not None:
                return ReadResult(refused=file.refused)
            return ReadResult(content=content, total_bytes=max(file.size, len(content)))

    async def export(self, paths: Sequence[str], *, bytes_max: int) -> ExportResult:
        """Copy files out."""
        return await self._to_its_end(self._export(paths, bytes_max))

    async def _export(self, paths: Sequence[str], bytes_max: int) -> ExportResult:
        async with self._files(Answer(bytes_max=bytes_max, files_max=_ENTRIES_MAX)) as answer:
            await self._sent(frame("export", paths=list(paths), bytes_max=bytes_max))
            await answer.done
            return ExportResult(
                files={f.name: content for f, content in answer.files if f.refused is None},
                refused={f.name: f.refused for f, _ in answer.files if f.refused is not None},
            )

    async def _to_its_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Finish a transfer though its caller was cancelled: the next one's answer follows it."""
        task = self._loop.create_task(work)
        task.add_done_callback(_looked_at)
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def _files(self, answer: Answer) -> AsyncIterator[Answer]:
        async with self._filing:
            self._check()
            self._answer = answer
            try:
                async with asyncio.timeout(_FILES_SECONDS):
                    yield answer
            except TimeoutError:
                raise self._break("a file was not answered for in time") from None
            finally:
                self._answer = None

    async def _within(self, future: "asyncio.Future[_T]", seconds: float, why: str) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            raise self._break(why) from None

    def _check(self) -> None:
        if self.lost is not None:
            raise GuestLost(str(self.lost))

    # --- bytes ----------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if self.lost is not None:
            return
        self._sending += data
        self._writable()
        if len(self._sending) > _UNREAD_BYTES_MAX:
            self._break("it does not read what it is told")

    async def _sent(self, data: bytes) -> None:
        self._send(data)
        await self._room.wait()
        self._check()

    def _writable(self) -> None:
        try:
            while self._sending:
                del self._sending[: self._end.send(self._sending)]
        except BlockingIOError:
            self._loop.add_writer(self._end.fileno(), self._writable)
        except OSError as error:
            self._break(f"it is gone ({error.strerror})")
        else:
            self._loop.remove_writer(self._end.fileno())
        if len(self._sending) < _SENDING_BYTES_MAX:
            self._room.set()
        else:
            self._room.clear()

    def _readable(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._break("it is gone")
            return
        try:
            for header, body in self._frames.feed(data):
                self._hear(said.decoder.decode(header), body)
                if self.lost is not None:
                    return
        except (ValueError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._break(f"it broke the protocol: {error}")

    def _hear(self, message: said.Said, body: bytes) -> None:
        """Take one frame in; ValueError: it has no business coming now."""
        run, answer = self._run, self._answer
        if isinstance(message, said.Ready):
            _settle(self._ready, message)
        elif isinstance(message, said.Adopted) and self._plain is not None:
            _settle(self._plain, message)
        elif isinstance(
            message, said.Output | said.Channel | said.Connected | said.Taken | said.Ended
        ):
            if run is None or run.ended.done():
                raise ValueError(f"{type(message).__name__} without an action")
            run.hear(message, body)
        elif isinstance(message, said.Written | said.Content | said.File | said.Done):
            if answer is None:
                raise ValueError(f"{type(message).__name__} without an order")
            answer.hear(message, body)
        else:
            raise ValueError("Adopted without an order")

    def _break(self, why: str) -> GuestLost:
        """End the link; what waits for the guest hears why."""
        if self.lost is None:
            self.lost = GuestLost(why)
            self._loop.remove_reader(self._end.fileno())
            self._loop.remove_writer(self._end.fileno())
            self._end.close()
            self._sending.clear()
            self._room.set()
            waiting: list[asyncio.Future[Any] | None] = [
                self._ready,
                self._plain,
                self._run.ended if self._run else None,
                self._answer.done if self._answer else None,
            ]
            for future in waiting:
                if future is not None and not future.done():
                    future.set_exception(GuestLost(why))
                    future.add_done_callback(_looked_at)
        return GuestLost(str(self.lost))

    def close(self) -> None:
        """Let go of the guest."""
        self._break("its box was removed")


def _settle(future: "asyncio.Future[Any]", message: object) -> None:
    if future.done():
        raise ValueError("an answer twice")
    future.set_result(message)


def _looked_at(future: "asyncio.Future[Any]") -> None:
    """A caller that was cancelled does not look at it; that is no forgotten error."""
    if not future.cancelled():
        future.exception()
