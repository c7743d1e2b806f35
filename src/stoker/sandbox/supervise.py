"""Running one action: start it, feed it, drain it, watch its limits, and leave no process behind.

One order for every backend: the main process ends or is ended → everything else of the action is
killed → the pipes are drained → the verdict is read from the counters. So a background child never
holds the result, and what was written before a timeout is kept. The *first* reason to stop wins.

**Cancellation:** the processes are dead when ``CancelledError`` leaves ``supervise``.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from stoker.errors import BoxFailed
from stoker.model.completion import Usage
from stoker.model.execution import Limits
from stoker.model.tools import LimitKind, RunResult, Stream
from stoker.sandbox.cgroups import Counters, Group, kill_all
from stoker.sandbox.maker_client import Started
from stoker.sandbox.making import Exited, WorkOrder
from stoker.sandbox.undoing import seen_out

_READ_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
_TICK_LEAST_SECONDS = 0.02
_TICK_MOST_SECONDS = 0.1
_DRAIN_SECONDS = 0.5
_FLOOD_FACTOR = 2
_CORES = os.cpu_count() or 1
_SIGNAL_OFFSET = 128

Watcher = Callable[[], LimitKind | None]


class Starter(Protocol):
    """What starts processes: the maker, or the warm server of a box."""

    dead: bool
    """It is gone, and what it ran with it."""

    async def spawn(
        self, order: WorkOrder, standard: Sequence[int], passed: Sequence[int] = ()
    ) -> Started:
        """Start a process."""
        ...

    async def kill(self, started: Started) -> None:
        """Ask for its end."""
        ...


class Work(msgspec.Struct, kw_only=True):
    """One action, ready to start."""

    order: WorkOrder
    stdin: bytes
    limits: Limits
    timeout_seconds: float
    group: Group | None = None
    passed: Sequence[int] = ()
    """Descriptors for ``order.place`` and ``order.targets``; the caller owns and closes them."""
    watchers: Sequence[Watcher] = ()
    """Further limits, asked at every tick (disk, memory without cgroup)."""
    cpu_seconds: Callable[[int], float | None] | None = None
    """CPU time so far of the action with this main pid, where there is no cgroup."""
    joins: bool = True
    """Whether it joins the group; what a warm server forks is in it."""
    spared: Callable[[], frozenset[int]] = frozenset
    """Processes of the group that are no action's: those of the box's warm server."""
    wrapped: bool = False
    """The main process is a launcher that reports a signal as 128 + number."""
    started: Callable[[], None] | None = None
    """Called when the process exists (to close what was passed to it)."""


class Ended(msgspec.Struct, kw_only=True):
    """How it went."""

    result: RunResult
    usage: Usage
    stopped: bool
    """We ended it: timeout, limit or flood."""
    error: str = ""
    """Why the program was never reached."""
    errno: int = 0


class _Drain:
    """Reads one output pipe to its end, keeping the first ``cap`` bytes."""

    def __init__(self, cap: int, on_flood: Callable[[], None]) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(OSError):  # beyond the user's pipe quota the default size does
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._cap = cap
        self._on_flood = on_flood
        self._kept = bytearray()
        self._total = 0
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        self._loop.add_reader(self.read_end, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self.read_end, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._finish()
            return
        self._total += len(data)
        room = self._cap - len(self._kept)
        if room > 0:
            self._kept += data[:room]
        if self._total > _FLOOD_FACTOR * self._cap:
            self._on_flood()

    def _finish(self) -> None:
        self._loop.remove_reader(self.read_end)
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> Stream:
        self._finish()
        os.close(self.read_end)
        return Stream(kept=bytes(self._kept), total_bytes=self._total)


class _Feed:
    """Writes stdin as fast as it is taken; a program that never reads holds nobody up."""

    def __init__(self, content: bytes) -> None:
        self.read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_end, False)
        self._left = memoryview(content)
        self._loop = asyncio.get_running_loop()
        self._loop.add_writer(self._write_end, self._writable)

    def _writable(self) -> None:
        try:
            self._left = self._left[os.write(self._write_end, self._left) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = memoryview(b"")
        if not self._left:
            self.close()

    def close(self) -> None:
        if self._write_end >= 0:
            self._loop.remove_writer(self._write_end)
            os.close(self._write_end)
            self._write_end = -1


class _Supervision:
    def __init__(self, maker: Starter, work: Work) -> None:
        self._maker = maker
        self._work = work
        self._before = work.group.counters() if work.group else None
        self._stopping: asyncio.Task[None] | None = None
        self._timed_out = False
        self._limit: LimitKind | None = None
        self._started: Started | None = None
        self._feed: _Feed | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._cpu_seen = 0.0
        self._blind: Exception | None = None
        """Why a limit could not be looked at; the action was ended for it."""
        cap = work.limits.output_bytes
        self._out = _Drain(cap, lambda: self._stop(LimitKind.OUTPUT))
        self._err = _Drain(cap, lambda: self._stop(LimitKind.OUTPUT))

    async def run(self) -> Ended:
        loop = asyncio.get_running_loop()
        exited = None
        try:
            started = await self._start()
            timer = loop.call_later(self._work.timeout_seconds, self._stop, None)
            self._look_in(self._work.limits.cpu_seconds)
            try:
                exited = await asyncio.shield(started.exited)
            finally:
                timer.cancel()
                if self._next_look is not None:
                    self._next_look.cancel()
        finally:
            await _uncancelled(self._clear())
        return self._judged(exited)

    async def _start(self) -> Started:
        work = self._work
        feed = _Feed(work.stdin) if work.stdin else None
        stdin = feed.read_end if feed else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        joins = work.group.join_descriptors() if work.group and work.joins else []
        self._feed = feed
        try:
            self._started = await self._maker.spawn(
                work.order,
                [stdin, self._out.write_end, self._err.write_end],
                [*joins, *work.passed],
            )
        finally:
            for descriptor in (stdin, self._out.write_end, self._err.write_end, *joins):
                os.close(descriptor)
            if work.started is not None:
                work.started()
        if self._stopping is not None:
            await self._maker.kill(self._started)
        return self._started

    def _stop(self, limit: LimitKind | None) -> None:
        """End the action for ``limit`` (``None``: its time is up); the first reason counts."""
        if self._stopping is None:
            self._limit = limit
            self._timed_out = limit is None
            self._stopping = asyncio.get_running_loop().create_task(self._kill())

    async def _kill(self) -> None:
        if self._started is not None:
            await self._maker.kill(self._started)
        await self._kill_group()

    async def _kill_group(self) -> None:
        if self._work.group is not None:
            await kill_all(self._work.group.directories, self._work.spared)

    async def _clear(self) -> None:
        """Kill what is left of the action, then empty the pipes."""
        if self._started is not None and not self._started.exited.done():
            await self._maker.kill(self._started)
        await self._kill_group()
        if self._stopping is not None:
            await self._stopping
        if self._started is not None and not self._started.exited.done():
            await asyncio.wait([self._started.exited])
        if self._maker.dead:  # a server that died meanwhile spares nobody any more
            await self._kill_group()
        if self._feed is not None:
            self._feed.close()
        # Mostly both have: nothing but the program wrote to them.
        if unended := [pipe.ended for pipe in (self._out, self._err) if not pipe.ended.done()]:
            await asyncio.wait(unended, timeout=_DRAIN_SECONDS)
        self._stdout, self._stderr = self._out.close(), self._err.close()

    def _look_in(self, left: float) -> None:
        """Look at the limits in a while, with so much CPU time left."""
        most = _TICK_MOST_SECONDS if self._work.group else _TICK_LEAST_SECONDS
        pause = max(_TICK_LEAST_SECONDS, min(most, left / _CORES * 0.9))
        self._next_look = asyncio.get_running_loop().call_later(pause, self._watch)

    def _watch(self) -> None:
        assert self._started is not None, "nothing is watched before it is started"
        try:
            left = self._look(self._started.pid.result())
        except Exception as error:  # noqa: BLE001 - raised again once nothing of the action is left
            if self._stopping is None:  # else it ends already, for a reason that was seen
                self._blind = error
                self._stop(None)
        else:
            self._look_in(left)

    def _look(self, pid: int) -> float:
        """Check every limit; return how much CPU time is left."""
        work = self._work
        used = 0.0
        if work.group is not None and self._before is not None:
            now = work.group.counters()
            used = now.cpu_seconds - self._before.cpu_seconds
            kind = _from_counters(self._before, now)
            if kind is not None:
                self._stop(kind)
        elif work.cpu_seconds is not None:
            used = self._cpu_seen = max(self._cpu_seen, work.cpu_seconds(pid) or 0.0)
        if used >= work.limits.cpu_seconds:
            self._stop(LimitKind.CPU)
        for watcher in work.watchers:
            kind = watcher()
            if kind is not None:
                self._stop(kind)
        return work.limits.cpu_seconds - used

    def _judged(self, exited: Exited) -> Ended:
        """Return the verdict; a limit that cannot be looked at is our failure, never a result."""
        error = self._blind
        if error is None:
            try:
                return self._verdict(exited)
            except Exception as raised:  # noqa: BLE001 - raised again as what it is to the caller
                error = raised
        if isinstance(error, BoxFailed):
            raise error
        raise BoxFailed(
            f"a limit of an action could not be looked at ({type(error).__name__}: {error}); "
            "it was ended; its program may have run in part"
        ) from error

    def _verdict(self, exited: Exited) -> Ended:
        work = self._work
        # A launcher that is killed has waited for nobody: what was seen meanwhile says more.
        cpu, peak = max(exited.cpu_seconds, self._cpu_seen), exited.memory_peak_bytes
        if work.group is not None and self._before is not None:
            now = work.group.counters()
            cpu = now.cpu_seconds - self._before.cpu_seconds
            peak = now.memory_peak_bytes or peak
            if _killed_from_outside(self._before, now):
                raise BoxFailed(
                    "the kernel killed programs of a box that had not met its memory limit: this "
                    "machine, or the group the worker is in, is out of memory; run fewer boxes at "
                    "once or with smaller limits"
                )
            if self._stopping is None:
                self._limit = _from_counters(self._before, now)
        code, number = ending(exited.status, wrapped=work.wrapped)
        if self._stopping is None and self._limit is None:
            if cpu >= work.limits.cpu_seconds or number == signal.SIGXCPU:
                self._limit = LimitKind.CPU
            elif number == signal.SIGXFSZ:
                self._limit = LimitKind.DISK
            else:
                self._limit = next((k for w in work.watchers if (k := w()) is not None), None)
        total = self._stdout.total_bytes + self._stderr.total_bytes
        return Ended(
            result=RunResult(
                exit_code=code,
                signal=number,
                stdout=self._stdout,
                stderr=self._stderr,
                timed_out=self._timed_out,
                limit=self._limit,
            ),
            usage=Usage(cpu_seconds=cpu, memory_peak_bytes=peak, output_bytes=total),
            stopped=self._stopping is not None,
            error=exited.error,
            errno=exited.errno,
        )


async def supervise(maker: Starter, work: Work) -> Ended:
    """Run ``work`` to its end; afterwards none of its processes is alive.

    Raises:
        BoxFailed: the maker died, a limit could not be looked at, or a process not be killed.
    """
    return await _Supervision(maker, work).run()


async def _uncancelled(work: Awaitable[None]) -> None:
    """Finish ``work`` even if we are cancelled meanwhile; the cancellation follows it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await seen_out(task)
        raise


def _killed_from_outside(before: Counters, now: Counters) -> bool:
    """Whether programs of the box died of somebody else's want of memory."""
    return now.memory_kills > before.memory_kills and now.memory_met == before.memory_met


def _from_counters(before: Counters, now: Counters) -> LimitKind | None:
    if now.memory_kills > before.memory_kills:
        return LimitKind.MEMORY
    if now.refused_forks > before.refused_forks:
        return LimitKind.PROCESSES
    return None


def ending(status: int, *, wrapped: bool) -> tuple[int | None, int | None]:
    """Return exit code and signal of a wait status."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    if wrapped and code > _SIGNAL_OFFSET and code - _SIGNAL_OFFSET in _SIGNALS:
        return None, code - _SIGNAL_OFFSET
    return code, None


_SIGNALS = {int(s) for s in signal.valid_signals()}
