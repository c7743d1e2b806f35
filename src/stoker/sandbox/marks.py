"""Which state directories are in use on this machine: one locked file per directory.

Boxes of root lie outside the state directory and bear its *mark*, a short digest of its path. The
file of a mark holds the path; whoever makes boxes for it holds a shared lock on the file, which
ends with the process however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from stoker.sandbox.removal import remove_tree
from stoker.sandbox.runtime import make_public
from stoker.seams.locks import is_file, lock_is_refused

HOSTS = Path("/run/stoker/hosts")
MACHINES = Path("/var/lib/stoker/smol")
"""Where Smol Machines of root's state directories have their homes, under their marks: paths of
sockets are short."""


def mark_of(state_directory: Path) -> str:
    """Return the mark of a state directory."""
    return blake2b(os.fsencode(state_directory.resolve()), digest_size=4).hexdigest()


class HeldMark:
    """A mark that is in use until ``close`` or the end of this process."""

    def __init__(self, state_directory: Path) -> None:
        make_public(HOSTS)
        self._path = HOSTS / mark_of(state_directory)
        while True:
            self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if is_file(self._path, self._lock):
                break
            os.close(self._lock)  # removed between opening and locking
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, os.fsencode(state_directory.resolve()), 0)

    def close(self, *, everything_gone: bool) -> None:
        """Let go; the last one that leaves nothing takes the file along, and a home of machines."""
        if self._lock < 0:
            return
        if everything_gone:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(OSError):  # what stays is told as a leftover
                    remove_home(self._path.name)
                self._path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


def forget_dead(in_use: Callable[[str], bool]) -> None:
    """Remove the files of marks that nobody holds and, by ``in_use``, nothing bears any more."""
    for path in HOSTS.iterdir() if HOSTS.is_dir() else ():
        # Asked under the lock: whoever makes boxes holds it, so nothing new can come meanwhile.
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_file(path, lock) and not in_use(path.name):
                    path.unlink(missing_ok=True)
        finally:
            os.close(lock)


def remove_home(mark: str) -> None:
    """Remove the home of the machines of a mark that nobody else holds: they ended before."""
    if (MACHINES / mark).exists():
        remove_tree(MACHINES / mark)


def is_held(mark: str) -> bool:
    """Whether a living process makes boxes under this mark."""
    return lock_is_refused(HOSTS / mark)
