"""File locks held for the life of a process and freed by the kernel whatever kills it.

``lock_is_held`` looks without touching: trying the lock to see whether it is free could make its
owner's own attempt fail. ``lock_is_refused`` tries, where the owner has its lock for good and a
wrong answer would remove what is alive.
"""

import fcntl
import os
from pathlib import Path

_LOCKS = Path("/proc/locks")
_INODE_FIELD = 5  # proc_locks(5): "1: FLOCK ADVISORY WRITE 123 fe:00:456 0 EOF"


def take_lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock ``path`` and return the descriptor that holds it, or ``None`` when somebody else does.

    ``shared``: together with others who hold it so, and with nobody who holds it alone.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def make_sole(descriptor: int) -> bool:
    """Turn a shared lock into an exclusive one; ``False``: others hold it, and we no longer do.

    Of several who try, one succeeds once the others have tried or died (flock(2): the old lock is
    given up before the new one is asked for).
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(path: Path) -> int:
    """Lock ``path``, waiting while somebody else does; return the descriptor that holds it.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def lock_is_held(path: Path) -> bool:
    """Return whether some process holds the lock on ``path``, without taking it."""
    try:
        found = path.stat()
        listed = _LOCKS.read_text(encoding="ascii")
    except OSError:
        return False
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for row in (line.split() for line in listed.splitlines()):
        if len(row) <= _INODE_FIELD or row[1] != "FLOCK":
            continue
        on, _, inode = row[_INODE_FIELD].rpartition(":")
        # Where devices are anonymous (btrfs, overlay), the list names another one than stat does.
        if inode == str(found.st_ino) and (on == device or not os.major(found.st_dev)):
            return True
    return False


def lock_is_refused(path: Path) -> bool:
    """Return whether some process holds the lock on ``path``, by trying to take it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_file(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` is still the file that ``descriptor`` holds the lock on."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
