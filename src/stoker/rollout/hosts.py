"""Starting and ending program hosts, from the coordinator's side.

A host gets one socket and its log; no other descriptor is inherited. It ends with the thread that
started it (the kernel sees to that), when its socket closes, or when it is killed; whoever starts
one reaps it with ``end``.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stoker.errors import HostLost, ProgramInvalid, WireViolation
from stoker.rollout.log import harmless
from stoker.rollout.messages import (
    Differed,
    FromHost,
    Loaded,
    LoadFailed,
    LoadProgram,
    LocalDone,
    StopHost,
    Stuck,
    Turn,
)
from stoker.wire.channel import Channel
from stoker.wire.frames import PROTOCOL_VERSION, Hello

_END_SECONDS = 2.0
_TAIL_BYTES = 4096
_Incoming = Hello | Loaded | LoadFailed | Turn | LocalDone | Differed | Stuck


class HostProcess:
    """One program host and the channel to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel[_Incoming], log: Path
    ) -> None:
        self._process = process
        self._channel = channel
        self._log = log

    @classmethod
    async def start(
        cls,
        program: Path,
        *,
        log: Path,
        name: str | None = None,
        hash_seed: int = 0,
        stuck_seconds: float = 5.0,
    ) -> Self:
        """Start a host and tell it to load ``program``; its first message is what came of it.

        What the program prints goes to ``log``. ``hash_seed`` pins the order of sets of strings
        and must be the same whenever a rollout is replayed. More messages may be sent at once.

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
        channel.send(_load(program, name))
        return cls(process, channel, log)

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
        self._channel.send(message)

    async def drain(self) -> None:
        """Wait until the host has taken enough of what was queued."""
        await self._channel.drain()

    async def messages(self) -> AsyncIterator[FromHost]:
        """Yield what it says until it ends; iterate once.

        Raises:
            WireViolation: it said something that is not of this protocol; end it.
        """
        async for message in self._channel.messages():
            if not isinstance(message, Hello):
                yield message
            elif message.protocol != PROTOCOL_VERSION:
                raise WireViolation(f"the host speaks protocol {message.protocol}; it is ended")

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


def _load(program: Path, name: str | None) -> LoadProgram:
    return LoadProgram(path=str(program.resolve()), name=name)


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
