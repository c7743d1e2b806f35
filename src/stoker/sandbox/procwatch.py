"""What a tree of processes uses, read from /proc: best effort, where there is no cgroup.

A process that exits between two looks is counted through its parent's total of waited children.
"""

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14
_THREADS = 17
_RESIDENT = 21


def tree(pid: int) -> list[int]:
    """Return ``pid`` and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = (thread / "children").read_bytes()
                found += [int(word) for word in children.split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Return user and system time of the tree, waited children included."""
    return sum(sum(f[_UTIME : _CSTIME + 1]) for f in _stats(pid)) / _TICKS


def resident_bytes(pid: int) -> int:
    """Return resident memory of the tree; shared pages count once per process."""
    return sum(f[_RESIDENT] for f in _stats(pid)) * _PAGE


def tasks(pid: int) -> int:
    """Return how many processes and threads the tree has."""
    return sum(f[_THREADS] for f in _stats(pid))


def _stats(pid: int) -> list[list[int]]:
    found = []
    for member in tree(pid):
        with contextlib.suppress(OSError, ValueError):
            # The name in parentheses may hold anything; fields are counted after its end.
            text = Path(f"/proc/{member}/stat").read_bytes().rpartition(b") ")[2]
            found.append([0, *(int(word) for word in text.split()[1:])])
    return found


def directory_usage(directory: str, *, entries_max: int) -> tuple[int, int]:
    """Return bytes on disk and entries beneath ``directory``; stops counting past the maximum."""
    total = entries = 0
    waiting = [directory]
    while waiting and entries <= entries_max:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return total, entries
