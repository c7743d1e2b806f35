"""Limits that are looked at from outside, asked at every tick of a supervision."""

import os
import resource
from collections.abc import Callable

from stoker.model.execution import Limits
from stoker.model.tools import LimitKind
from stoker.sandbox import procwatch
from stoker.sandbox.supervise import Watcher


def at_most(limit: int, value: int) -> tuple[int, int]:
    """Return ``value`` as soft and hard limit, or what the hard one leaves of it."""
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return value, value


def cpu_of(pid: list[int]) -> Callable[[int], float | None]:
    """Return what tells the CPU time of an action; it notes the main process in ``pid``."""

    def used(main: int) -> float | None:
        pid[:] = [main]
        return procwatch.cpu_seconds(main)

    return used


def mounts_full(mounts: tuple[str, ...]) -> LimitKind | None:
    """Return ``DISK`` when one of the sized mounts has no room left."""
    for mount in mounts:
        usage = os.statvfs(mount)
        if usage.f_bavail == 0 or usage.f_ffree == 0:
            return LimitKind.DISK
    return None


def disk_watcher(directory: str, limits: Limits) -> Watcher:
    """Return what looks at the size of a directory."""

    def full() -> LimitKind | None:
        used, entries = procwatch.directory_usage(directory, entries_max=limits.files_max)
        over = used > limits.disk_bytes or entries > limits.files_max
        return LimitKind.DISK if over else None

    return full


def tree_watcher(pid: list[int], limits: Limits) -> Watcher:
    """Return what looks at memory and processes of a tree, where there is no cgroup."""

    def over() -> LimitKind | None:
        if not pid:
            return None
        if procwatch.resident_bytes(pid[0]) > limits.memory_bytes:
            return LimitKind.MEMORY
        return LimitKind.PROCESSES if procwatch.tasks(pid[0]) >= limits.processes_max else None

    return over
