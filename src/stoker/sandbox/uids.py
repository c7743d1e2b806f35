"""Uids leased to boxes, one machine-wide lock per uid.

A uid is given out only when nobody on the machine holds its lock, no process has it, and neither
the name service nor the subordinate-id files know it. The lock is an ``flock`` and thus ends with
the process that held it, however it ends.
"""

import contextlib
import fcntl
import os
import pwd
from pathlib import Path

from stoker.errors import BoxFailed, ConfigInvalid
from stoker.sandbox.runtime import make_public
from stoker.seams.clock import SystemClock

LOCK_DIRECTORY = Path("/run/stoker/uids")
_LOOKED_UP_SECONDS = 60.0
_SUBORDINATE_FILES = (Path("/etc/subuid"), Path("/etc/subgid"))

_clock = SystemClock()


class UidLeases:
    """Hands out uids of one range to one process."""

    def __init__(self, base: int, count: int, lock_directory: Path = LOCK_DIRECTORY) -> None:
        self._base = base
        self._count = count
        self._directory = lock_directory
        self._held: dict[int, int] = {}
        self._next = os.getpid() % count
        self._looked_up = (-1, 0.0)
        """A uid that nobody knew, and until when that counts."""
        self._subordinate = _subordinate_ranges()
        make_public(lock_directory)

    def lease(self) -> int:
        """Return a uid that is ours until ``release``.

        Raises:
            BoxFailed: every uid of the range is taken.
            ConfigInvalid: the range belongs to somebody (a user, a subordinate range).
        """
        known = 0
        for offset in range(self._count):
            uid = self._base + (self._next + offset) % self._count
            if uid in self._held or has_processes(uid):
                continue
            if self._looked_up < (uid, _clock.monotonic()) and self._is_known(uid):
                known += 1
                continue
            if self._lock(uid):
                self._next = (uid - self._base + 1) % self._count
                return uid
        if known:
            raise ConfigInvalid(
                f"uids {self._base}-{self._base + self._count - 1} belong to users or to "
                "/etc/subuid; set sandbox.uid_base to a range nobody uses"
            )
        raise BoxFailed(f"all {self._count} uids from {self._base} are taken")

    def look_ahead(self) -> None:
        """Look the next uid up, so that leasing it within a minute takes no time for that."""
        uid = self._base + self._next
        if not self._is_known(uid):
            self._looked_up = (uid, _clock.monotonic() + _LOOKED_UP_SECONDS)

    def release(self, uid: int) -> None:
        """Give a uid back; safe to repeat."""
        lock = self._held.pop(uid, None)
        if lock is not None:
            os.close(lock)

    def try_hold(self, uid: int) -> bool:
        """Lock a particular uid (the sweep of a dead incarnation); false when somebody has it."""
        return uid in self._held or self._lock(uid)

    def close(self) -> None:
        """Give everything back."""
        for uid in list(self._held):
            self.release(uid)

    def _lock(self, uid: int) -> bool:
        lock = os.open(self._directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[uid] = lock
        return True

    def _is_known(self, uid: int) -> bool:
        if any(first <= uid < first + count for first, count in self._subordinate):
            return True
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            return True
        return False


def has_processes(uid: int) -> bool:
    """Whether a process in our sight has this real uid, zombies included.

    The kernel is asked for their priority: it knows at once of a uid that has none, while the list
    of processes takes a look at each of the host's.
    """
    try:
        os.getpriority(os.PRIO_USER, uid)
    except ProcessLookupError:
        return False
    return True


def pids_of_uid(uid: int) -> list[int]:
    """Return the processes a uid owns; whoever becomes a leased uid has it as real uid too."""
    found: list[int] = []
    if not has_processes(uid):
        return found
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    found.append(int(entry.name))
    return found


def _subordinate_ranges() -> list[tuple[int, int]]:
    ranges = []
    for file in _SUBORDINATE_FILES:
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                parts = line.split(":")
                if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():  # noqa: PLR2004 - name:first:count
                    ranges.append((int(parts[1]), int(parts[2])))
    return ranges
