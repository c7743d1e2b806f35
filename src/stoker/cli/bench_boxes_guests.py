"""The part of ``stoker bench boxes`` about guests: what a fork of one takes, until it answers."""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import parts
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.seams.clock import SystemClock

_RUNS = 40
_POLICY = ExecutionPolicy(
    isolation=Isolation.QEMU,
    limits=Limits(memory_bytes=256 * MEBIBYTE, disk_bytes=64 * MEBIBYTE),
)

_clock = SystemClock()


async def guest_forks(host: SandboxHost) -> list[float]:
    """Return the milliseconds of each fork to its first reply; none where guests cannot be had."""
    try:
        parts.find()
    except IsolationUnavailable:
        return []
    backend = QemuBackend(host)
    times = []
    try:
        await (await backend.create("bench", Baseline(), _POLICY)).destroy()  # boots the guest
        for _ in range(_RUNS):
            began = _clock.monotonic()
            box = await backend.create("bench", Baseline(), _POLICY)
            times.append((_clock.monotonic() - began) * 1000)
            await box.destroy()
    finally:
        await backend.close()
    return times
