"""The guest that all boxes of one size are forked from: booted once, then sealed.

It is booted with nothing of any box in it; once its runner is ready its state is taken and the
emulator ended. The memory is a file without a name that is then sealed: the kernel refuses every
later write, by whomever, so no box can reach another through what they share. Forks are told new
randomness, clock and name before anything of a box runs (``guest.place``).
"""

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

import msgspec

from stoker.errors import BoxFailed
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.qemu.image import GuestFiles
from stoker.sandbox.qemu.machine import Machine, migrating, start
from stoker.sandbox.qemu.parts import Parts
from stoker.sandbox.vm.link import GuestLost
from stoker.seams.entropy import fresh_id

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_STATE_BYTES_MAX = 16 * 1024 * 1024
_STATE_SECONDS = 30.0
_SEAL_ROUNDS_MAX = 1000
_SEAL_PAUSE_SECONDS = 0.01


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
    memory = os.memfd_create("guest", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    record = host.record(fresh_id("origin_"), "guest")
    host.alive.add(record.box_id)
    machine = None
    try:
        os.ftruncate(memory, memory_bytes)
        if host.uids is not None:
            record = _leased(record, host)
        host.ledger.write(record)
        machine = await start(host, parts, files, memory, booting=True, uid=record.uid, group=None)
        await machine.link.ready(seconds)
        state = await _taken(machine)
        await machine.end()
        await _sealed(memory)
    except BaseException as error:
        os.close(memory)
        if isinstance(error, GuestLost | OSError):
            said = machine.complaint() if machine is not None else ""
            raise BoxFailed(f"a guest could not be booted: {error} ({said})") from error
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
