"""Files beneath one directory, reached without ever following what is in it.

Every path is resolved beneath a descriptor of the directory, by openat2 with
``RESOLVE_BENEATH | NO_SYMLINKS | NO_MAGICLINKS``; where the kernel lacks it, component by
component with ``O_NOFOLLOW``. Only regular files with one link are read or written; sizes are
bounded by the bytes copied, never by what a file claims. What root writes belongs to the box.

Used on the host (``files``) and, by the guest runner, inside a virtual machine: imports nothing
that is not there.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from stoker.sandbox import kernel

_CHUNK_BYTES = 1024 * 1024
_DEPTH_MAX = 64
_ENTRIES_MAX = 50_000
NAMES_BYTES_MAX = 16 * 1024 * 1024
"""Most bytes of paths in one walk: many entries with long names are much, without any content."""
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755

_REASONS = {
    errno.ELOOP: "a symbolic link stands in the path",
    errno.EXDEV: "the path leaves the workspace",
    errno.ENOENT: "not found",
    errno.ENOTDIR: "a part of the path is no directory",
    errno.EISDIR: "a directory, not a file",
    errno.EACCES: "not readable",
    errno.ENXIO: "a pipe or socket, not a file",
    errno.ENODEV: "a device, not a file",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOSPC: "the disk limit of the box is reached",
    errno.EDQUOT: "the disk limit of the box is reached",
}


class Refused(Exception):
    """One path that is not touched, and why."""


class Beneath:
    """Opens files beneath one directory."""

    def __init__(self, directory: str, owner: int | None) -> None:
        self._root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._owner = owner
        self._strict = kernel.has_openat2()

    def close(self) -> None:
        """Let go of the workspace; safe to repeat."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def open_to_write(self, path: str) -> int:
        """Return a descriptor of an empty regular file, its parents made.

        Raises:
            Refused, OSError: the path cannot be used (``reason`` says it in words).
        """
        parts = path_parts(path)
        for depth in range(1, len(parts)):
            with self._parent(parts[:depth]) as parent:
                try:
                    os.mkdir(parts[depth - 1], _DIRECTORY_MODE, dir_fd=parent)
                except FileExistsError:
                    continue
                self._own(parts[depth - 1], parent)
        # Not O_TRUNC: what is there is looked at before it is changed.
        descriptor = self._open_file(parts, os.O_WRONLY | os.O_CREAT)
        try:
            regular_size(descriptor)
            os.ftruncate(descriptor, 0)
            if self._owner is not None:
                os.fchown(descriptor, self._owner, self._owner)
            else:
                os.fchmod(descriptor, _FILE_MODE)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_to_read(self, parts: list[bytes]) -> tuple[int, int]:
        """Return a descriptor of a regular file with one link, and its size.

        Raises:
            Refused, OSError: as for ``open_to_write``.
        """
        descriptor = self._open_file(parts, os.O_RDONLY)
        try:
            return descriptor, regular_size(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def found(self, paths: Sequence[str]) -> Iterator[tuple[list[bytes], str]]:
        """Yield the parts of every file at or beneath ``paths``, or why one is refused."""
        seen = names = 0
        for path in paths:
            for parts, problem in self._walk(path):
                seen += 1
                names += sum(len(part) + 1 for part in parts)
                if seen > _ENTRIES_MAX:
                    yield parts, f"more than {_ENTRIES_MAX} entries"
                    return
                if names > NAMES_BYTES_MAX:
                    yield parts, f"more than {NAMES_BYTES_MAX} bytes of names"
                    return
                yield parts, problem

    def _walk(self, path: str) -> Iterator[tuple[list[bytes], str]]:
        """Yield the parts of every file at or beneath ``path``, or a reason it is refused."""
        try:
            waiting = [path_parts(path, root=True)]
        except Refused as error:
            yield [os.fsencode(path)], str(error)
            return
        while waiting:
            parts = waiting.pop()
            try:
                kind = self._kind(parts)
                if not stat.S_ISDIR(kind):
                    yield parts, "" if stat.S_ISREG(kind) else _kind_reason(kind)
                    continue
                waiting += [[*parts, name] for name in sorted(self._list(parts), reverse=True)]
            except (Refused, OSError) as error:
                yield parts, reason(error)

    def _kind(self, parts: list[bytes]) -> int:
        if not parts:
            return stat.S_IFDIR
        with self._parent(parts) as parent:
            return os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode

    def _list(self, parts: list[bytes]) -> list[bytes]:
        if len(parts) > _DEPTH_MAX:
            raise Refused(f"more than {_DEPTH_MAX} directories deep")
        directory = self._open(parts, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(directory) as entries:
                names = []
                for entry in entries:
                    names.append(os.fsencode(entry.name))
                    if len(names) > _ENTRIES_MAX:
                        raise Refused(f"a directory of more than {_ENTRIES_MAX} entries")
                return names
        finally:
            os.close(directory)

    def _own(self, name: bytes, parent: int) -> None:
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)

    def _open_file(self, parts: list[bytes], flags: int) -> int:
        if not parts:
            raise Refused("a directory, not a file")
        # O_NONBLOCK: opening a pipe nobody holds must not hang us.
        return self._open(parts, flags | os.O_NONBLOCK | os.O_NOCTTY)

    @contextlib.contextmanager
    def _parent(self, parts: list[bytes]) -> Iterator[int]:
        parent = self._open(parts[:-1], os.O_PATH | os.O_DIRECTORY)
        try:
            yield parent
        finally:
            os.close(parent)

    def _open(self, parts: list[bytes], flags: int) -> int:
        mode = _FILE_MODE if flags & os.O_CREAT else 0
        if self._strict:
            path = b"/".join(parts) or b"."
            return kernel.openat2(self._root, path, flags, mode, resolve=kernel.RESOLVE_STRICT)
        return self._open_stepwise(parts, flags, mode)

    def _open_stepwise(self, parts: list[bytes], flags: int, mode: int) -> int:
        current = os.dup(self._root)
        for depth, name in enumerate(parts):
            last = depth == len(parts) - 1
            wanted = flags if last else os.O_PATH | os.O_DIRECTORY
            try:
                following = os.open(
                    name, wanted | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=current
                )
            finally:
                os.close(current)
            current = following
        if not parts and not flags & os.O_PATH:
            following = os.open(b".", flags | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = following
        return current


def path_parts(path: str, *, root: bool = False) -> list[bytes]:
    """Return the parts of a relative path; ``root``: it may name the directory itself."""
    if "\0" in path:
        raise Refused("it contains a NUL character")
    try:
        encoded = path.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise Refused("its name cannot be encoded") from error
    if encoded.startswith(b"/"):
        raise Refused("an absolute path; paths are relative to the workspace")
    parts = [part for part in encoded.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise Refused("the path leaves the workspace")
    if not parts and not root:
        raise Refused("it names no file")
    return parts


def regular_size(descriptor: int) -> int:
    """Return the size of a regular file with one link."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(_kind_reason(status.st_mode))
    if status.st_nlink > 1:
        raise Refused("a hard link: the file has other names")
    return status.st_size


def _kind_reason(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a directory, not a file"
    if stat.S_ISFIFO(mode):
        return "a pipe, not a file"
    if stat.S_ISSOCK(mode):
        return "a socket, not a file"
    return "a device, not a file"


def read_up_to(descriptor: int, bytes_max: int) -> bytes:
    """Return what a descriptor gives, cut at ``bytes_max``."""
    chunks = []
    left = bytes_max
    while left > 0:
        chunk = os.read(descriptor, min(left, _CHUNK_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def reason(error: Exception) -> str:
    """Say why a path was refused."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno, error.strerror or str(error))
    return str(error)


def text_of(parts: list[bytes]) -> str:
    """Return a path as text, refused where it is none."""
    try:
        return b"/".join(parts).decode()
    except UnicodeDecodeError as error:
        raise Refused("its name is not UTF-8") from error


def shown(parts: list[bytes]) -> str:
    """Return a path as it is shown, whatever bytes it is made of."""
    return (b"/".join(parts) or b".").decode(errors="backslashreplace")
