"""Which OCI runtimes this host has: programs that run a container from a bundle.

Engines (docker, podman) are none of them: they fetch images and start one of these. Where one is
installed so is a runtime, and boxes are made by that, without a daemon in between.
"""

import os
import re
import shutil
import subprocess

import msgspec

from stoker.model.execution import Rung

_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:"
    "/usr/libexec/podman:/usr/libexec/crio:/usr/lib/cri-o-runc/sbin"
)
"""With the places where engines keep a runtime of their own."""
_ENGINES = ("docker", "podman", "nerdctl")
_RUNSC_LEAST = 2024
"""Its releases are dates; those before have no fast platform, or none that works without KVM."""
_SECONDS = 10.0


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """One program that runs containers."""

    rung: Rung
    path: str
    options: tuple[str, ...]
    """Before the command: leave control groups alone, ours are joined already."""
    shared_kernel: bool = True
    """Whether what runs in it calls the host's kernel. One with a kernel of its own needs a user
    namespace of its own too, and its program at a path."""
    problem: str = ""
    """Why it is not used, empty where it is."""

    def passing(self, count: int) -> list[str]:
        """Return the options that pass ``count`` descriptors from 3 on to the container."""
        if self.rung is Rung.RUNSC:
            return [f"--pass-fd={number}:{number}" for number in range(3, 3 + count)]
        return ["--preserve-fds", str(count)] if count else []


_KNOWN = {
    # gVisor serves system calls itself: what runs in it does not reach the host's kernel.
    Rung.RUNSC: ("--rootless", "--ignore-cgroups", "--network=none", "--platform=systrap"),
    Rung.CRUN: ("--cgroup-manager=disabled",),
    # Without a path for control groups it goes without where it may make none.
    Rung.RUNC: (),
}
"""In the order in which they are tried: runsc is the strongest, crun the quickest."""


def find(path: str = _PATH) -> list[Runtime]:
    """Return the runtimes of this host, the preferred first; blocking."""
    found = []
    for rung, options in _KNOWN.items():
        program = shutil.which(rung.value, path=path)
        if program is not None:
            runtime = Runtime(
                rung=rung,
                path=os.path.realpath(program),
                options=options,
                shared_kernel=rung is not Rung.RUNSC,
                problem=age_problem(_version(program)) if rung is Rung.RUNSC else "",
            )
            found.append(runtime)
    return found


def missing() -> tuple[str, str]:
    """Return the sentence for a host without runtime, and what would help."""
    engines = [name for name in _ENGINES if shutil.which(name, path=_PATH)]
    beside = ""
    if engines:
        beside = f" ({' and '.join(engines)} is here, but no runtime of its own: a client only)"
    return f"there is no OCI runtime on this host{beside}", "apt install runc (or crun, or gVisor)"


def _version(program: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a program of the system's directories
            [program, "--version"], capture_output=True, timeout=_SECONDS, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip()


def age_problem(version: str) -> str:
    """Return why a runsc that tells this ``version`` is not used; empty: it is."""
    date = re.search(r"20\d{6}", version)
    if date is None:
        return f"runsc told no date as its version ({version or 'nothing'})"
    if int(date[0][:4]) < _RUNSC_LEAST:
        return f"{version} is too old; a release from {_RUNSC_LEAST} on is needed"
    return ""
