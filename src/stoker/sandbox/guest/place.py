"""Where the runner works: a guest that has just been forked, or a directory when it is tried.

A forked guest is the very state another was forked from: what the kernel would answer to a request
for randomness, its clock and its name are told anew before anything of the box runs.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from stoker.sandbox import kernel, seccomp
from stoker.sandbox.guest.counters import ControlGroup, Descendants, Group

_RNDADDENTROPY = 0x40085203
_RNDRESEEDCRNG = 0x5207
_GROUP = "/sys/fs/cgroup/box"
_WORKSPACE = "/workspace"
_SIZED = (_WORKSPACE, "/tmp", "/dev/shm")  # noqa: S108 - of the guest
_BOX_ID = 1000


class Limits(NamedTuple):
    """Those of the box that the guest's kernel keeps."""

    memory_bytes: int
    processes_max: int
    disk_bytes: int
    files_max: int


class Place(Protocol):
    """What a runner works with."""

    @property
    def workspace(self) -> str:
        """Where programs start and files go."""
        ...

    @property
    def identity(self) -> int | None:
        """Uid and gid of programs; ``None``: the runner's own."""
        ...

    @property
    def folders(self) -> Mapping[bytes, str]:
        """What the box keeps between actions, and where it lies."""
        ...

    @property
    def system_calls(self) -> bytes:
        """The filter that programs get; empty: none."""
        ...

    def renew(self, *, name: str, wall_ns: int, entropy: bytes) -> None:
        """Be another than the guest this one was forked from."""
        ...

    def furnish(self, limits: Limits) -> Group:
        """Make the box of this guest."""
        ...

    def refurnish(self, group: Group, limits: Limits) -> None:
        """Hold the box that was made here before to these limits; OSError: more is in it."""
        ...

    def full(self) -> bool:
        """Whether a sized file system has no room left."""
        ...


class Guest:
    """A guest of our own, in which the runner is process 1."""

    workspace = _WORKSPACE
    identity = _BOX_ID
    folders: Mapping[bytes, str] = dict(zip((b"workspace", b"tmp", b"shm"), _SIZED, strict=True))
    system_calls = b""

    def renew(self, *, name: str, wall_ns: int, entropy: bytes) -> None:
        """Tell randomness, clock and name anew."""
        _reseed(entropy)
        time.clock_settime_ns(time.CLOCK_REALTIME, wall_ns)
        socket.sethostname(name)

    def furnish(self, limits: Limits) -> Group:
        """Mount what is sized and make the control group."""
        for target in _SIZED:
            kernel.mount_tmpfs(
                target,
                f"size={limits.disk_bytes},nr_inodes={limits.files_max},"
                f"uid={_BOX_ID},gid={_BOX_ID},mode=0700",
            )
        return ControlGroup(
            _GROUP, memory_bytes=limits.memory_bytes, processes_max=limits.processes_max
        )

    def refurnish(self, group: Group, limits: Limits) -> None:
        """Size them anew, and the control group."""
        for target in _SIZED:
            sizes = f"size={limits.disk_bytes},nr_inodes={limits.files_max}"
            kernel.resize_tmpfs(target, sizes)
        group.limit(memory_bytes=limits.memory_bytes, processes_max=limits.processes_max)

    def full(self) -> bool:
        """Ask each of them."""
        found = [os.statvfs(target) for target in _SIZED]
        return any(not one.f_bavail or not one.f_ffree for one in found)


class SharedGuest(Guest):
    """A guest in which another's agent is process 1, and obeys whoever comes by the virtual socket.

    Programs are let have no socket of that kind, and no other way to make one: the filter of boxes
    on the host's kernel is theirs.
    """

    def __init__(self) -> None:
        self.system_calls = seccomp.filter_program(kernel.machine())


class Directory:
    """A directory of this machine, to try the runner without a guest."""

    identity = None
    system_calls = b""

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace
        self.folders: Mapping[bytes, str] = {b"workspace": workspace}

    def renew(self, *, name: str, wall_ns: int, entropy: bytes) -> None:
        """Change nothing of this machine."""

    def furnish(self, limits: Limits) -> Group:
        """Change nothing of this machine."""
        del limits
        return Descendants()

    def refurnish(self, group: Group, limits: Limits) -> None:
        """Change nothing of this machine."""

    def full(self) -> bool:
        """Say no: nothing here is sized."""
        return False


def _reseed(entropy: bytes) -> None:
    with open("/dev/urandom", "wb") as device:  # noqa: PTH123 - a device
        request = struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy
        fcntl.ioctl(device, _RNDADDENTROPY, request)
        with contextlib.suppress(OSError):  # kernels before 4.14 mix it in by themselves
            fcntl.ioctl(device, _RNDRESEEDCRNG)
