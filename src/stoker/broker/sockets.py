"""The socket of a directory's owner: bound in a private place, and forgotten when its owner died.

A killed owner leaves its socket's file behind. The next owner of the same directory takes it over;
where the directory is gone too nobody would, so whoever binds looks at its neighbours.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BACKLOG = 256


def listen(socket_file: Path) -> socket.socket:
    """Return a listening socket at a path whose directory's lock we hold.

    Sockets beside it that nobody listens at are removed.
    """
    with _alone(socket_file.parent):
        socket_file.unlink(missing_ok=True)  # we hold the lock: whoever bound it is dead
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(socket_file))
        socket_file.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        for neighbour in socket_file.parent.glob("*.sock"):
            if neighbour != socket_file and _deaf(neighbour):
                neighbour.unlink(missing_ok=True)
    return listener


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the place's lock: between its ``bind`` and its ``listen`` a socket looks deaf."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _deaf(path: Path) -> bool:
    """Tell whether no process listens at ``path``; whatever else is wrong with it, it stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a living owner with a full backlog answers EAGAIN
        with suppress(OSError):  # a name of somebody else's that no socket can have
            return path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return False
