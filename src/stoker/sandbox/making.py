"""What the worker and its maker say to each other: one msgpack document per packet.

The work order itself travels as a memory file beside the packet, since programs may have long
arguments. Shared by both sides and importing nothing of the worker.
"""

import msgspec

from stoker.sandbox.places import Place

PACKET_BYTES_MAX = 64 * 1024
DESCRIPTORS_MAX = 32


class WorkOrder(msgspec.Struct, kw_only=True):
    """How one process is started."""

    argv: list[bytes]
    environment: dict[bytes, bytes] = {}
    directory: bytes = b"/"
    identity: int | None = None
    """Uid and gid to become; ``None``: stay who we are."""
    refuse_root: bool = False
    """Never start as kernel uid 0, whatever else was said."""
    user_namespace: int | None = None
    """Number among ``targets`` of a user namespace that it enters as ``identity``, its owner."""
    rlimits: dict[int, tuple[int, int]] = {}
    cgroups: int = 0
    """Passed descriptors by which the child joins its groups: it writes ``0`` to each."""
    place: Place | None = None
    """A mount namespace of its own; the detached mounts for it follow the cgroups'."""
    targets: list[int] = []
    """Number each further passed descriptor gets in the child."""
    keeper: bool = False
    """Put a subreaper above it that kills whatever it leaves behind (no cgroup)."""
    landlock: tuple[list[str], list[str]] | None = None
    """Paths that may be read, paths that may be changed."""
    seccomp: bytes = b""
    """Filter loaded just before exec, where the launcher does not do it."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a process. Descriptors: work order, stdin, stdout, stderr, cgroups, mounts, targets."""

    number: int


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the process of ``number`` and, with a keeper, all it left."""

    number: int


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """It has been forked."""

    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """It has been reaped; ``error`` says why it never reached its program."""

    number: int
    status: int
    cpu_seconds: float
    memory_peak_bytes: int
    error: str = ""
    errno: int = 0


ToMaker = Spawn | Kill
FromMaker = Spawned | Exited
