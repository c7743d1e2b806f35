"""The guest that all boxes of one size are forked from: booted once, then sealed.

It is booted with nothing of any box in it; once its runner is ready its state is taken and the
emulator ended. The memory is a file without a name that is then sealed: the kernel refuses every
later write, by whomever, so no box can reach another through what they share. Forks are told new
randomness, clock and name before anything of a box runs (``guest.place``).

One whose boxes begin with files is not booted: it is a fork of the former with a copy of its memory
to write to, in which the files are put before it is sealed alike. No program ever ran in either.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from stoker.errors import BoxFailed
from stoker.model.execution import Limits
from stoker.sandbox.branching import Beginning, whole
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.qemu.image import GuestFiles
from stoker.sandbox.qemu.machine import Machine, Start, migrating, start
from stoker.sandbox.qemu.parts import Parts
from stoker.sandbox.vm.keeping import begin_in
from stoker.sandbox.vm.link import GuestLost
from stoker.seams.clock import SystemClock
from stoker.seams.entropy import fresh_id

FORK_SECONDS = 30.0
_ENTROPY_BYTES = 64
_SEALABLE = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_STATE_BYTES_MAX = 16 * 1024 * 1024
_STATE_SECONDS = 30.0
_SEAL_ROUNDS_MAX = 1000
_SEAL_PAUSE_SECONDS = 0.01
_clock = SystemClock()


class Origin:
    """A sealed memory and the state of everything else."""

    def __init__(self, memory: int, state: int) -> None:
        self.memory = memory
        self._state = state

    @contextlib.contextmanager
    def state(self) -> Iterator[int]:
        """Give a descriptor to read the state from; forks made at once do not share an offset."""
        descriptor = os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def copied(self) -> int:
        """Return a descriptor of a copy of the memory, which can be written; blocking.

        Raises:
            OSError: there is no memory for it.
        """
        copy = os.memfd_create("guest", _SEALABLE)
        try:
            end = os.fstat(self.memory).st_size
            os.ftruncate(copy, end)
            at = 0
            while at < end:
                try:
                    at = os.lseek(self.memory, at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    break  # only holes follow
                os.lseek(copy, at, os.SEEK_SET)
                until = os.lseek(self.memory, at, os.SEEK_HOLE)
                while at < until:
                    at += os.sendfile(copy, self.memory, at, until - at)
        except BaseException:
            os.close(copy)
            raise
        return copy

    def close(self) -> None:
        """Let the memory go once its last fork has ended."""
        os.close(self.memory)
        os.close(self._state)


async def boot(
    host: SandboxHost, parts: Parts, files: GuestFiles, *, memory_bytes: int, seconds: float
) -> Origin:
    """Boot a guest and take its state.

    Raises:
        BoxFailed: it did not come up in ``seconds``; nothing of it is left.
    """
    memory = os.memfd_create("guest", _SEALABLE)
    os.ftruncate(memory, memory_bytes)

    async def booted(machine: Machine) -> None:
        await machine.link.ready(seconds)

    return await _made(host, parts, files, memory, Start.BOOT, booted)


async def derive(
    host: SandboxHost,
    parts: Parts,
    files: GuestFiles,
    plain: Origin,
    *,
    limits: Limits,
    begins: Beginning,
) -> Origin:
    """Make an origin whose boxes begin with files: a fork of ``plain`` in which they were put.

    Raises:
        ArtifactDamaged: they are not what their digest says.
        BoxFailed: they are more than ``limits`` allow, or could not be put there. Nothing is left.
    """
    memory = await whole(plain.copied, os.close)

    async def begun(machine: Machine) -> None:
        await awake(machine, plain, "origin", limits)
        await begin_in(machine.link, limits, begins)
        async with machine.link.quiet():
            pass  # else what it was told last would be half said in every fork

    return await _made(host, parts, files, memory, Start.CHANGE, begun)


async def awake(machine: Machine, origin: Origin, name: str, limits: Limits) -> None:
    """Have a machine that waits go on from ``origin``, as a box of its own.

    Raises:
        GuestLost: it does not answer.
    """
    with origin.state() as state:
        machine.tell(*migrating("migrate-incoming"), passing=state)
    await machine.link.adopt(
        name,
        int(_clock.now().wall * 1e9),
        {
            "memory_bytes": limits.memory_bytes,
            "processes_max": limits.processes_max,
            "disk_bytes": limits.disk_bytes,
            "files_max": limits.files_max,
        },
        entropy=os.urandom(_ENTROPY_BYTES),
        seconds=FORK_SECONDS,
    )


async def _made(
    host: SandboxHost,
    parts: Parts,
    files: GuestFiles,
    memory: int,
    how: Start,
    ready: Callable[[Machine], Awaitable[None]],
) -> Origin:
    """Have a machine write to ``memory``, which is ours, until it is ``ready``; take its state."""
    record = host.record(fresh_id("origin_"), "guest")
    host.alive.add(record.box_id)
    machine, state = None, -1
    try:
        if host.uids is not None:
            record = _leased(record, host)
        host.ledger.write(record)
        machine = await start(host, parts, files, memory, how=how, uid=record.uid, group=None)
        await ready(machine)
        state = await _taken(machine)
        await machine.end()
        await _sealed(memory)
    except BaseException as error:
        for descriptor in (memory, state):
            if descriptor >= 0:
                os.close(descriptor)
        if isinstance(error, GuestLost | OSError):
            said = machine.complaint() if machine is not None else ""
            raise BoxFailed(f"a guest to fork from could not be made: {error} ({said})") from error
        raise
    finally:
        if machine is not None:
            await machine.end()
        await host.remove(record)
    return Origin(memory, state)


def _leased(record: BoxRecord, host: SandboxHost) -> BoxRecord:
    assert host.uids is not None, "asked before"
    return msgspec.structs.replace(record, uid=host.uids.lease())


async def _taken(machine: Machine) -> int:
    """Return a descriptor of the state of everything but the memory."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    machine.tell(*migrating("migrate"), passing=write_end)
    os.close(write_end)
    state = os.memfd_create("state", os.MFD_CLOEXEC)
    try:
        async with asyncio.timeout(_STATE_SECONDS):
            while data := await _some(read_end):
                os.write(state, data)
                _check_size(state, least=0)
        _check_size(state, least=1)
    except BaseException as error:
        os.close(state)
        if isinstance(error, TimeoutError):
            raise GuestLost("it did not give its state in time") from None
        raise
    finally:
        os.close(read_end)
    return state


async def _sealed(memory: int) -> None:
    """Refuse every later write, once nobody can write any more."""
    for _ in range(_SEAL_ROUNDS_MAX):
        try:
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            return
        await asyncio.sleep(_SEAL_PAUSE_SECONDS)  # its launcher is dead; it follows
    raise GuestLost("its emulator does not end")


def _check_size(state: int, *, least: int) -> None:
    size = os.fstat(state).st_size
    if not least <= size <= _STATE_BYTES_MAX:
        raise GuestLost(f"its state has {size} bytes")


async def _some(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, 1 << 20)
