"""The mount namespace an action is started in: a short table, with the mounts of its box alone.

A launcher reads the whole mount table again for each of its binds, and every living box adds three
mounts to the host's. So each action gets a copy of a namespace that holds only what boxes show, and
its own box's mounts come to it detached, as descriptors. The maker keeps the short one; where it
cannot be made (a root directory that is no mount, as in a chroot), the host's is copied instead.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.sandbox import kernel

ROOT = Path("/run/stoker/place")
"""Where the mounts of a box are attached in the namespace of its action; empty on the host."""
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/dev", "/proc", str(ROOT))
"""What a box may be made of, whatever its runtime files are."""


class Place(msgspec.Struct, kw_only=True):
    """Where an action is started."""

    targets: list[str]
    """Paths on which the passed detached mounts are attached, in order."""
    shown: list[str]
    """Host paths that must stay in sight, with everything mounted above and below them."""


class Namespaces:
    """The maker's short mount namespaces, one per list of what must stay in sight."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], int | None] = {}

    def short(self, place: Place) -> int | None:
        """Return a descriptor of the namespace for ``place``, or ``None``: copy our own."""
        key = tuple(place.shown)
        if key not in self._made:
            self._made[key] = _short_namespace(key)
        return self._made[key]


def enter(short: int | None, mounts: Sequence[int], targets: Sequence[str]) -> None:
    """Enter a fresh mount namespace and attach ``mounts`` in it."""
    if short is not None:
        kernel.enter_mount_namespace(short)
    kernel.own_mount_namespace()
    for mount, target in zip(mounts, targets, strict=True):
        kernel.attach_mount(mount, target)


def _short_namespace(shown: tuple[str, ...]) -> int | None:
    points = mount_points()
    if "/" not in points:
        return None
    needed = {os.path.realpath(path) for path in (*SHOWN, *shown)}
    host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.own_mount_namespace()
        for point in reversed(points):  # what lies beneath a mount is listed after it
            if not is_needed(point, needed):
                with contextlib.suppress(OSError):  # it went with the one above it
                    kernel.unmount(point)
        return os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        kernel.enter_mount_namespace(host)
        os.close(host)


def is_needed(point: str, needed: set[str]) -> bool:
    """Return whether a mount point lies above or below a path that must stay in sight."""
    return any(_beneath(path, point) or _beneath(point, path) for path in needed)


def _beneath(path: str, top: str) -> bool:
    return top in (path, "/") or path.startswith(f"{top}/")


def mount_points() -> list[str]:
    """Return the mount points of this process in the order of its table."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return [os.fsdecode(_unescaped(line.split(b" ", 5)[4])) for line in lines]


def _unescaped(field: bytes) -> bytes:
    # The kernel writes blanks, tabs, line feeds and backslashes as three octal digits.
    head, *rest = field.split(b"\\")
    return head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)
