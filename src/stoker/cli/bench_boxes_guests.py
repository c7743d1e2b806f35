"""The part of ``stoker bench boxes`` about guests: what a fork of one takes, until it answers.

Machines of Smol Machines are branched off a box while it lives, and timed to the end of a command.
"""

from pathlib import Path

from stoker.errors import IsolationUnavailable
from stoker.model.execution import (
    MEBIBYTE,
    Baseline,
    BaselineBuild,
    ExecutionPolicy,
    Isolation,
    Limits,
)
from stoker.model.tools import RunRequest
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import parts
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.smol.backend import SmolBackend, installed
from stoker.seams.clock import SystemClock

_RUNS = 40
_FILES, _FILE_BYTES = 100, 40_000
_LIMITS = Limits(memory_bytes=256 * MEBIBYTE, disk_bytes=64 * MEBIBYTE)
_POLICY = ExecutionPolicy(isolation=Isolation.QEMU, limits=_LIMITS)
_OF_MACHINES = ExecutionPolicy(isolation=Isolation.MICROVM, limits=_LIMITS)
_TRUE = RunRequest(argv=("true",))
_PATIENCE_SECONDS = 120.0

_clock = SystemClock()


async def guest_forks(host: SandboxHost, place: Path) -> tuple[list[float], list[float]]:
    """Return the milliseconds of forks to their first reply, without and with files, in turn.

    None where guests cannot be had. The files lie in ``place``, and so does what is built of them.
    """
    try:
        parts.find()
    except IsolationUnavailable:
        return [], []
    source = place / "files"
    source.mkdir()
    for number in range(_FILES):
        (source / str(number)).write_bytes(bytes(_FILE_BYTES))
    (place / "kept").mkdir()
    usual, host.baselines = host.baselines, Baselines(place / "kept")
    built = Baseline(name="bench", build=BaselineBuild(files=str(source)))
    backend = QemuBackend(host)
    try:
        for baseline in (Baseline(), built):  # boots the guest, and derives one with files
            await _fork(backend, baseline)
        pairs = [
            (await _fork(backend, Baseline()), await _fork(backend, built)) for _ in range(_RUNS)
        ]
    finally:
        await backend.close()
        host.baselines = usual
    return [plain for plain, _ in pairs], [full for _, full in pairs]


async def _fork(backend: QemuBackend, baseline: Baseline) -> float:
    began = _clock.monotonic()
    box = await backend.create("bench", baseline, _POLICY)
    took = (_clock.monotonic() - began) * 1000
    await box.destroy()
    return took


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
