"""Execution policies and baselines: how untrusted work is boxed, and from which state it starts.

Both are versioned by digest; the digest stands in every action and in the journal.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from stoker.model.value import canonical_digest

MEBIBYTE = 1024 * 1024


class Isolation(StrEnum):
    """The boundary round a box (DESIGN §5)."""

    AUTO = "auto"
    """The strongest backend whose canary passes on this host."""
    PROCESS = "process"
    """Limits, cgroup and process group; trusted tools only."""
    NAMESPACE = "namespace"
    """bubblewrap, own uid, seccomp, cgroup: a shared kernel."""
    CONTAINER = "container"
    """An OCI runtime."""
    MICROVM = "microvm"
    """Smol Machines: own guest kernel."""
    QEMU = "qemu"
    """QEMU microVM: own guest kernel."""


class Rung(StrEnum):
    """Which form of ``namespace`` (or other) isolation a host gave; recorded with every box."""

    PROCESS = "process"
    ROOT = "a"
    """Leased uid, cgroup, seccomp, namespaces."""
    DELEGATED = "b"
    """User with a delegated cgroup."""
    USER_NAMESPACE = "c"
    """User namespaces without cgroups: some limits are best effort."""
    LANDLOCK = "d"
    """Landlock and seccomp; trusted demos only."""
    RUNC = "runc"
    """A container of runc's, the runtime of docker."""
    CRUN = "crun"
    """A container of crun's, the runtime of podman."""
    RUNSC = "runsc"
    """A container of gVisor's: it reaches a kernel written for it, not the host's."""
    SMOL = "smol"
    """A machine of Smol Machines: a kernel of its own by KVM."""
    QEMU = "qemu"
    """A guest of QEMU's: a kernel of its own, by KVM or emulated."""


class Trust(StrEnum):
    """Whether the work may be hostile."""

    UNTRUSTED = "untrusted"
    TRUSTED = "trusted"


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One host path visible in a box."""

    source: str
    """Absolute host path, never one that holds sockets."""
    target: str
    """Absolute path in the box."""
    writable: bool = False


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """Where a box may connect to, by TLS through the egress proxy; nothing else."""

    host: str
    """DNS name in lower case without a final dot, or a numeric address."""
    port: int = 443
    private: bool = False
    """It may be an address of a private network; never the loopback, links or cloud metadata."""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A secret a box may use without having it: the egress proxy puts it into one header."""

    variable: str
    """Environment variable of the box that holds a placeholder, made anew for every action."""
    host: str
    """Which destination gets the value."""
    port: int = 443
    header: str = "Authorization"
    """In which header of requests to it the placeholder is replaced."""
    file: str
    """Absolute path on the worker's host; its one line is the value."""


class _Place(Protocol):
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


def credential_problem(destinations: Iterable[_Place], credentials: Iterable[_Place]) -> str:
    """Return why ``credentials`` do not fit ``destinations``, in a sentence; empty: they do.

    A value is put in by the proxy at the one destination it is for, so there must be that one, and
    no second value for it.
    """
    places = {(one.host, one.port) for one in destinations}
    used: set[tuple[str, int]] = set()
    for one in credentials:
        where = (one.host, one.port)
        if where not in places:
            return f"a credential is for {one.host}:{one.port}, which is none of the destinations"
        if where in used:
            return f"two credentials are for {one.host}:{one.port}; give each a class of its own"
        used.add(where)
    return ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Hard limits of one box."""

    cpu_seconds: float = 60.0
    """CPU time of all processes of one action together."""
    memory_bytes: int = 512 * MEBIBYTE
    processes_max: int = 512
    """Processes and threads together."""
    disk_bytes: int = 256 * MEBIBYTE
    """Workspace, /tmp and /dev/shm each."""
    files_max: int = 20_000
    """Inodes of each of those."""
    output_bytes: int = MEBIBYTE
    """Kept bytes of stdout and stderr each; beyond twice this the action is stopped."""


class ExecutionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a box is bounded."""

    isolation: Isolation = Isolation.AUTO
    trust: Trust = Trust.UNTRUSTED
    accept_shared_kernel: bool = False
    """Untrusted work on the host's kernel needs this said aloud; recorded with the run."""
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    network: tuple[Destination, ...] = ()
    """Where its boxes may connect to; empty: no network at all."""
    credentials: tuple[Credential, ...] = ()
    """Secrets its boxes may use at those destinations."""
    warm: bool = False
    """``python`` actions of a box are forked from an interpreter that waits in it (rung a)."""
    preload: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Modules that interpreter imports before it serves; unset: none."""
    cuda: Literal["torch", "jax"] | msgspec.UnsetType = msgspec.UNSET
    """Framework with which its boxes use the host's NVIDIA device (``microvm``); unset: none.
    No boundary between tenants."""

    def digest(self) -> str:
        """Return the version of this policy."""
        return canonical_digest(self)


class BaselineBuild(msgspec.Struct, frozen=True, kw_only=True):
    """What the workspace of a baseline's boxes begins with; built once per machine."""

    files: str = ""
    """Absolute path of a directory on the worker's host, copied; empty: none."""
    setup: tuple[str, ...] = ()
    """Shell lines, run in the workspace in order; without network unless the policy has one."""
    timeout_seconds: float = 600.0
    """Wall time of each."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The named, digest-pinned starting state of an environment."""

    name: str = "python"
    """``python`` is the interpreter and system libraries of the host, read-only."""
    environment: dict[str, str] = {}
    """Variables set in the box."""
    digest: str = ""
    """Digest over what the baseline is made of; filled in by the sandbox room."""
    build: BaselineBuild | msgspec.UnsetType = msgspec.UNSET
    """How its files are made; unset: boxes begin empty."""
    root: str | msgspec.UnsetType = msgspec.UNSET
    """Absolute path on the worker's host of an unpacked root file system or a saved container
    image; unset: the host's interpreter and system directories."""
    packages: str | msgspec.UnsetType = msgspec.UNSET
    """Absolute path on the worker's host of a directory of Python packages, or of a virtual
    environment: the site-packages of its boxes, read-only; unset: they have none."""
