"""The layers of a saved image, one put on the other, as a tree that boxes see read-only.

The archive is hostile: a name stays in the tree whatever links it leads through (openat2 with the
tree as root), no owner, setuid bit, device, pipe or attribute is made, and no more than the bounds
is written. A layer takes away what lies below it first (whiteouts), then adds its own.

Everybody can read the tree, and run what its owner could: nothing in an image is a secret from the
box that is made of it, and boxes have a uid that no image knows.
"""

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from stoker.sandbox import kernel
from stoker.sandbox.entries import Bounds
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.saved_images import Unusable, members

_IN_TREE = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_OTHERS_MARKS = b".wh..wh."
_CHUNK_BYTES = 1024 * 1024
_LATEST = 1 << 33
"""Time of a file's last change at most, seconds since 1970."""
_IMPOSSIBLE = frozenset(
    {
        errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EXDEV,
    }
)  # fmt: skip
"""What a kernel answers to entries that no tree can hold."""

Name = tuple[bytes, ...]


class Tree:
    """A directory that becomes the root file system of an image."""

    def __init__(self, directory: Path, bounds: Bounds, stopped: Callable[[], bool]) -> None:
        self._root = os.open(directory, _DIRECTORY | os.O_CLOEXEC)
        self._entries_left = bounds.entries_max
        self._bytes_left = bounds.bytes_max
        self._bytes_max = bounds.bytes_max
        self._stopped = stopped
        self._at: Name | None = None
        self._parent = -1
        self.left_out = 0
        """Devices and pipes."""

    def close(self) -> None:
        """Let go of the directory."""
        self._leave()
        os.close(self._root)

    @property
    def written_bytes(self) -> int:
        """Return how much content was written."""
        return self._bytes_max - self._bytes_left

    def add(self, layer: BinaryIO) -> None:
        """Put one layer on what is there.

        Raises:
            Unusable: it holds what no tree can, or more than the bounds.
            OSError: it cannot be written.
            InterruptedError: it was stopped.
        """
        try:
            for member in members(layer):
                self._take_away(_name(member.name))
            for member in members(layer):
                self._place(member, layer)
        except OSError as error:
            if error.errno in _IMPOSSIBLE:
                raise Unusable(f"a layer holds what no tree can ({error})") from error
            raise
        finally:
            self._leave()

    def _take_away(self, name: Name) -> None:
        if not name or not name[-1].startswith(_WHITEOUT):
            return
        gone = name[-1].removeprefix(_WHITEOUT)
        opaque = name[-1] == _OPAQUE
        if not opaque and (name[-1].startswith(_OTHERS_MARKS) or gone in (b"", b".", b"..")):
            if gone in (b".", b".."):
                raise Unusable("a whiteout leaves its directory")
            return
        try:
            parent = self._open(name[:-1])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return  # nothing lies there
            raise
        try:
            for child in _children(parent) if opaque else [gone]:
                _remove(parent, child)
        finally:
            os.close(parent)

    def _place(self, member: tarfile.TarInfo, layer: BinaryIO) -> None:
        name = _name(member.name)
        if not name or name[-1].startswith(_WHITEOUT):
            return
        if self._stopped():
            raise InterruptedError
        self._count(1, 0)
        parent, last = self._enter(name[:-1]), name[-1]
        if member.isdir():
            if not _is_directory(parent, last):
                _remove(parent, last)
                _make_directory(parent, last)
        elif member.issym():
            _remove(parent, last)
            os.symlink(_encoded(member.linkname), last, dir_fd=parent)
        elif member.islnk():
            self._link(_name(member.linkname), parent, last)
        elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
            _remove(parent, last)
            self._file(member, layer, parent, last)
        elif member.ischr() or member.isblk() or member.isfifo():
            self.left_out += 1
        else:
            raise Unusable(f"{member.name[:80]!r} is of a kind that no image builder writes")

    def _file(self, member: tarfile.TarInfo, layer: BinaryIO, parent: int, last: bytes) -> None:
        self._count(0, member.size)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(last, flags, 0o600, dir_fd=parent)
        try:
            at, end = member.offset_data, member.offset_data + member.size
            while at < end:
                piece = os.pread(layer.fileno(), min(end - at, _CHUNK_BYTES), at)
                if not piece:
                    raise Unusable(f"the content of {member.name[:80]!r} is cut short")
                at += len(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(file, view) :]
            os.fchmod(file, 0o755 if member.mode & stat.S_IXUSR else 0o644)
            changed = min(max(0, int(member.mtime)), _LATEST)
            os.utime(file, (changed, changed))
        finally:
            os.close(file)

    def _link(self, target: Name, parent: int, last: bytes) -> None:
        if not target:
            raise Unusable("a hard link names no file")
        origin = self._open(target[:-1])
        try:
            if stat.S_ISDIR(os.stat(target[-1], dir_fd=origin, follow_symlinks=False).st_mode):
                raise Unusable("a hard link names a directory")
            _remove(parent, last)
            os.link(target[-1], last, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(origin)

    def _count(self, entries: int, content: int) -> None:
        self._entries_left -= entries
        self._bytes_left -= content
        if self._entries_left < 0 or self._bytes_left < 0 or content < 0:
            raise Unusable("it unpacks to more than fits: raise sandbox.baselines_max")

    def _enter(self, name: Name) -> int:
        """Return the directory that entries go into, made where it is missing; it is kept open."""
        if self._at != name:
            self._leave()
            try:
                self._parent = self._open(name)
            except FileNotFoundError:
                self._parent = self._made(name)
            self._at = name
        return self._parent

    def _made(self, name: Name) -> int:
        for depth in range(1, len(name) + 1):
            try:
                os.close(self._open(name[:depth]))
            except FileNotFoundError:
                self._count(1, 0)
                above = self._open(name[: depth - 1])
                try:
                    _make_directory(above, name[depth - 1])
                finally:
                    os.close(above)
        return self._open(name)

    def _open(self, name: Name) -> int:
        return kernel.openat2(self._root, b"/".join(name) or b".", _DIRECTORY, resolve=_IN_TREE)

    def _leave(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._parent, self._at = -1, None


def _name(text: str) -> Name:
    parts = tuple(part for part in _encoded(text).split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise Unusable(f"{text[:80]!r} leaves the tree")
    return parts


def _encoded(text: str) -> bytes:
    if "\0" in text:
        raise Unusable("a name holds a NUL character")
    try:
        return os.fsencode(text)
    except UnicodeEncodeError as error:
        raise Unusable("a name cannot be encoded") from error


def _make_directory(parent: int, name: bytes) -> None:
    os.mkdir(name, dir_fd=parent)
    os.chmod(name, 0o755, dir_fd=parent)  # noqa: S103 - for everybody, whatever our umask


def _children(parent: int) -> list[bytes]:
    return [os.fsencode(child.name) for child in Path(f"/proc/self/fd/{parent}").iterdir()]


def _is_directory(parent: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _remove(parent: int, name: bytes) -> None:
    """Remove what has this name, a tree or one entry; absent is fine."""
    if _is_directory(parent, name):
        remove_tree(Path(f"/proc/self/fd/{parent}") / os.fsdecode(name))
        return
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
