"""Which host paths may be shown in a box: absolute ones, and none that holds a socket.

A socket in a mount would be a way out of the box. A directory is walked once and again only when it
changed: a new name changes the time of the directory that holds it, so all of those are compared.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from stoker.errors import ConfigInvalid
from stoker.model.execution import Mount

_NAMES_MAX = 2000
"""Names looked at beneath one mount; a larger tree is taken on trust."""


class _Seen(NamedTuple):
    """One directory as it was when it was walked."""

    path: str
    device: int
    inode: int
    changed_ns: int


class MountCheck:
    """Checks mounts, remembering those that held no socket."""

    def __init__(self) -> None:
        self._clean: dict[str, list[_Seen]] = {}

    def check(self, mount: Mount) -> None:
        """Let a mount pass, or refuse it.

        Raises:
            ConfigInvalid: it is no absolute path, is not there, or holds a socket.
        """
        source = Path(mount.source)
        if not source.is_absolute() or not mount.target.startswith("/"):
            raise ConfigInvalid(
                f"mount {mount.source} → {mount.target}: both must be absolute paths"
            )
        try:
            mode = source.stat().st_mode
        except OSError as error:
            raise ConfigInvalid(f"mount {mount.source}: {error.strerror}") from error
        if stat.S_ISSOCK(mode) or (stat.S_ISDIR(mode) and self._holds_socket(mount.source)):
            raise ConfigInvalid(
                f"mount {mount.source} holds a socket, which would be a way out of the box; "
                "mount a directory without sockets"
            )

    def _holds_socket(self, directory: str) -> bool:
        known = self._clean.get(directory)
        if known is not None and all(_look(seen.path) == seen for seen in known):
            return False
        self._clean.pop(directory, None)
        walked = _walk(directory)
        if walked is None:
            return True
        self._clean[directory] = walked
        return False


def _walk(directory: str) -> list[_Seen] | None:
    """Return every directory beneath that was looked at, or ``None``: there is a socket."""
    walked: list[_Seen] = []
    waiting = [directory]
    names = 0
    while waiting:
        folder = waiting.pop()
        seen = _look(folder)  # before its names are read: what changes meanwhile shows next time
        if seen is None:
            continue
        walked.append(seen)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                names += 1
                if names > _NAMES_MAX:
                    return walked
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    return None
    return walked


def _look(path: str) -> _Seen | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a hot loop
    except OSError:
        return None
    return _Seen(path, found.st_dev, found.st_ino, found.st_mtime_ns)
