"""The part of ``stoker bench boxes`` about guests: what a fork of one takes, until it answers.

Machines of Smol Machines are branched off a box while it lives, and timed to the end of a command.
"""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits
from stoker.model.tools import RunRequest
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import parts
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.smol.backend import SmolBackend, installed
from stoker.seams.clock import SystemClock

_RUNS = 40
_LIMITS = Limits(memory_bytes=256 * MEBIBYTE, disk_bytes=64 * MEBIBYTE)
_POLICY = ExecutionPolicy(isolation=Isolation.QEMU, limits=_LIMITS)
_OF_MACHINES = ExecutionPolicy(isolation=Isolation.MICROVM, limits=_LIMITS)
_TRUE = RunRequest(argv=("true",))
_PATIENCE_SECONDS = 120.0

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


async def machine_branches(host: SandboxHost) -> list[float]:
    """Return the milliseconds of branches of a machine to their first command; none without KVM."""
    if not installed() or not parts.has_kvm():
        return []
    backend = SmolBackend(host)
    times = []
    try:
        if not (await backend.offer()).available:
            return []
        box = await backend.create("bench", Baseline(), _OF_MACHINES)
        for _ in range(_RUNS):
            began = _clock.monotonic()
            (branch,) = await box.branch(1)
            await branch.box.run(_TRUE, timeout_seconds=_PATIENCE_SECONDS)
            times.append((_clock.monotonic() - began) * 1000)
            await branch.box.destroy()
    finally:
        await backend.close()
    return times
