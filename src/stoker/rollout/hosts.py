"""Starting and ending program hosts, from the coordinator's side.

A host gets one socket and its log; no other descriptor is inherited. It ends with the thread that
started it (the kernel sees to that), when its socket closes, or when it is killed; whoever starts
one reaps it with ``end``.
"""

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stoker.errors import HostLost, ProgramInvalid, WireViolation
from stoker.model.ids import RolloutId
from stoker.rollout.log import harmless
from stoker.rollout.messages import (
    Deliver,
    Differed,
    FromHost,
    Loaded,
    LoadFailed,
    LoadProgram,
    LocalDone,
    StartRollout,
    StopHost,
    Stuck,
    Turn,
)
from stoker.wire.channel import Channel
from stoker.wire.frames import PROTOCOL_VERSION, Hello

LOAD_SECONDS = 60.0
"""A program whose top level runs longer cannot be loaded."""
SILENCE_GRACE_SECONDS = 2.0
"""After the bound the watchdog speaks first; only when it cannot is silence taken for an answer."""
_LOOKS = 4
"""Looks within the bound."""
_END_SECONDS = 2.0
_TAIL_BYTES = 4096
_Incoming = Hello | Loaded | LoadFailed | Turn | LocalDone | Differed | Stuck


class HostProcess:
    """One program host and the channel to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel[_Incoming],
        program: Path,
        log: Path,
        stuck_seconds: float,
    ) -> None:
        self._process = process
        self._channel = channel
        self._program = program
        self._log = log
        self._stuck_seconds = stuck_seconds
        self._loaded = False
        self._unanswered: dict[RolloutId, None] = {}
        """Rollouts in a turn, oldest first; the host takes them in this order."""
        self._looks = 0
        """Looks at which it owed an answer and had said nothing since the one before."""

    @classmethod
    async def start(
        cls,
        program: Path,
        *,
        log: Path,
        name: str | None = None,
        hash_seed: int = 0,
        stuck_seconds: float = 5.0,
        stands_for: Path | None = None,
    ) -> Self:
        """Start a host and tell it to load ``program``; its first message is what came of it.

        What the program prints goes to ``log``. ``hash_seed`` pins the order of sets of strings
        and must be the same whenever a rollout is replayed. ``stands_for`` is the recorded path
        whose place ``program`` takes. More messages may be sent at once.

        Raises:
            OSError: the process could not be started.

        **Cancellation:** no process is left behind.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await _spawn(theirs, log, hash_seed, stuck_seconds)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            ours.close()
            raise
        channel: Channel[_Incoming] = Channel(reader, writer, _Incoming)
        channel.send(Hello(protocol=PROTOCOL_VERSION, role="coordinator"))
        channel.send(_load(program, name, stands_for))
        return cls(process, channel, program, log, stuck_seconds)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while it runs or is not reaped."""
        return self._process.returncode

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message (``ToHost``); never blocks."""
        self._channel.send(message)  # raises where it is too large: then no answer is owed
        if isinstance(message, StartRollout | Deliver):
            self._unanswered[message.rollout_id] = None

    async def drain(self) -> None:
        """Wait until the host has taken enough of what was queued."""
        await self._channel.drain()

    async def messages(self) -> AsyncIterator[FromHost]:
        """Yield what it says until it ends; iterate once.

        A host that owes an answer and is silent past ``stuck_seconds`` and its watchdog's grace (a
        program holds the interpreter, or the process was stopped) is told of here as ``Stuck``,
        once per silence; ending it is the reader's decision.

        Raises:
            WireViolation: it said something that is not of this protocol; end it.
        """
        source = self._channel.messages()
        while True:
            try:
                # Cancelling a read loses nothing: what came stays in the channel.
                async with asyncio.timeout(self._silence_bound() / _LOOKS):
                    message = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError:
                source = self._channel.messages()
                if (silence := self._look()) is not None:
                    yield silence
                continue
            self._looks = 0
            if isinstance(message, Hello):
                if message.protocol != PROTOCOL_VERSION:
                    raise WireViolation(f"the host speaks protocol {message.protocol}")
                continue
            if isinstance(message, Turn | Differed):
                self._unanswered.pop(message.rollout_id, None)
            self._loaded = self._loaded or isinstance(message, Loaded)
            yield message

    def _silence_bound(self) -> float:
        return self._stuck_seconds + (SILENCE_GRACE_SECONDS if self._loaded else LOAD_SECONDS)

    def _look(self) -> Stuck | LoadFailed | None:
        """Count one look at which it said nothing; return what that means when it is news.

        Looks are counted and not seconds: a coordinator that was itself stopped or busy has heard
        nobody, and must not take that for their silence.
        """
        if self._loaded and not self._unanswered:
            self._looks = 0
            return None
        self._looks += 1
        return self._silence(self._silence_bound()) if self._looks == _LOOKS + 1 else None

    def _silence(self, seconds: float) -> Stuck | LoadFailed:
        """Return what the silence means; the interpreter's own watchdog wrote stacks to the log."""
        name = self._program.name
        found = re.findall(rf'File ".*{re.escape(name)}", line (\d+) in (\S+)', self.log_tail())
        where = f"{name}:{found[0][0]} in {found[0][1]}" if found else f"{name}, line unknown"
        if not self._unanswered:
            return LoadFailed(message=f"loading took over {seconds:.0f} s, at {where}")
        rollout_id = next(iter(self._unanswered))
        return Stuck(rollout_id=rollout_id, seconds=seconds, where=where)

    def kill(self) -> None:
        """Send SIGKILL; no code of the program runs after it."""
        if self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> int:
        """Wait until the process is gone; return its exit status."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kill and reap it; nothing is left. Safe to repeat."""
        self.kill()
        self._channel.close()
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, kill it when it does not within two seconds, and reap it."""
        self.send(StopHost())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        await self.end()

    def log_tail(self) -> str:
        """Return the end of its log, without control characters."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
                return harmless(file.read().decode(errors="replace"))
        except OSError:
            return ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.end()


async def inspect_program(program: Path, *, log: Path, name: str | None = None) -> Loaded:
    """Load ``program`` in a process of its own and return what it declares.

    Raises:
        ProgramInvalid: it cannot be loaded.
        HostLost: loading it ended the process.
    """
    async with await HostProcess.start(program, log=log, name=name) as host:
        async for message in host.messages():
            if isinstance(message, Loaded):
                return message
            if isinstance(message, LoadFailed):
                raise ProgramInvalid(message.message)
        raise HostLost(
            f"loading {program} ended its process; what it printed last: {host.log_tail()}"
        )


def _load(program: Path, name: str | None, stands_for: Path | None) -> LoadProgram:
    recorded = str(stands_for) if stands_for is not None else None
    return LoadProgram(path=str(program.resolve()), name=name, stands_for=recorded)


async def _spawn(
    theirs: socket.socket, log: Path, hash_seed: int, stuck_seconds: float
) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "stoker.rollout.host"]
    command += ["--socket", str(theirs.fileno()), "--stuck", str(stuck_seconds)]
    command += ["--parent", str(os.getpid())]
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            start_new_session=True,  # the terminal's Ctrl-C is for the coordinator alone
        )
