"""The host's side of a workspace: files go in and out without ever following the box.

Every path is resolved beneath a descriptor of the workspace, by openat2 with
``RESOLVE_BENEATH | NO_SYMLINKS | NO_MAGICLINKS``; where the kernel lacks it, component by
component with ``O_NOFOLLOW``. Only regular files with one link are read or written; sizes are
bounded by the bytes copied, never by what a file claims. What root writes belongs to the box.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping

from stoker.errors import ToolRefused
from stoker.model.tools import ExportResult, ReadResult
from stoker.sandbox import kernel

_CHUNK_BYTES = 1024 * 1024
_DEPTH_MAX = 64
_ENTRIES_MAX = 50_000
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


class WorkspaceFiles:
    """Reads and writes beneath one directory."""

    def __init__(self, directory: str, owner: int | None) -> None:
        self._root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._owner = owner
        self._strict = kernel.has_openat2()

    def close(self) -> None:
        """Let go of the workspace; safe to repeat."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def write(self, files: Mapping[str, bytes], *, bytes_max: int) -> None:
        """Write regular files, making parents.

        Raises:
            ToolRefused: a path is unusable or the disk limit is reached; files written before it
                stay.
        """
        total = sum(len(content) for content in files.values())
        if total > bytes_max:
            raise ToolRefused(f"{total} bytes of files are over the disk limit of {bytes_max}")
        for path, content in files.items():
            try:
                self._write_one(_parts(path), content)
            except (Refused, OSError) as error:
                raise ToolRefused(f"file {path!r} was not written: {_reason(error)}") from error

    def read(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one regular file; more than ``bytes_max`` is cut, with the true size said."""
        try:
            descriptor = self._open_file(_parts(path), os.O_RDONLY)
        except (Refused, OSError) as error:
            return ReadResult(refused=_reason(error))
        try:
            size = _regular(descriptor)
            content = _read_up_to(descriptor, bytes_max)
            return ReadResult(content=content, total_bytes=max(size, len(content)))
        except (Refused, OSError) as error:
            return ReadResult(refused=_reason(error))
        finally:
            os.close(descriptor)

    def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Copy regular files; everything else is named with the reason it was refused."""
        copied: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        left = bytes_max
        seen = 0
        for path in paths:
            for parts, problem in self._walk(path):
                name = _display(parts)
                seen += 1
                if seen > _ENTRIES_MAX:
                    refused[name] = f"more than {_ENTRIES_MAX} entries"
                    return ExportResult(files=copied, refused=refused)
                if problem:
                    refused[name] = problem
                    continue
                try:
                    copied[_text(parts)] = content = self._copy(parts, left)
                    left -= len(content)
                except (Refused, OSError) as error:
                    refused[name] = _reason(error)
        return ExportResult(files=copied, refused=refused)

    def _copy(self, parts: list[bytes], bytes_max: int) -> bytes:
        descriptor = self._open_file(parts, os.O_RDONLY)
        try:
            if _regular(descriptor) > bytes_max:
                raise Refused("larger than what is left of the export's byte limit")
            content = _read_up_to(descriptor, bytes_max + 1)
            if len(content) > bytes_max:
                raise Refused("it grew past the export's byte limit while it was copied")
            return content
        finally:
            os.close(descriptor)

    def _walk(self, path: str) -> Iterator[tuple[list[bytes], str]]:
        """Yield the parts of every file at or beneath ``path``, or a reason it is refused."""
        try:
            waiting = [_parts(path, root=True)]
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
                yield parts, _reason(error)

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

    def _write_one(self, parts: list[bytes], content: bytes) -> None:
        if not parts:
            raise Refused("it names no file")
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
            _regular(descriptor)
            os.ftruncate(descriptor, 0)
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            if self._owner is not None:
                os.fchown(descriptor, self._owner, self._owner)
            else:
                os.fchmod(descriptor, _FILE_MODE)
        finally:
            os.close(descriptor)

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


def _parts(path: str, *, root: bool = False) -> list[bytes]:
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


def _regular(descriptor: int) -> int:
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


def _read_up_to(descriptor: int, bytes_max: int) -> bytes:
    chunks = []
    left = bytes_max
    while left > 0:
        chunk = os.read(descriptor, min(left, _CHUNK_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno, error.strerror or str(error))
    return str(error)


def _text(parts: list[bytes]) -> str:
    try:
        return b"/".join(parts).decode()
    except UnicodeDecodeError as error:
        raise Refused("its name is not UTF-8") from error


def _display(parts: list[bytes]) -> str:
    return (b"/".join(parts) or b".").decode(errors="backslashreplace")
