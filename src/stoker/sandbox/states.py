"""The files of a box as one stream, for checkpoints, branches and baselines.

Packed and unpacked beneath descriptors of the box's folders, never following the box: every
directory is opened by strict rules, every file without following links. A stream holds regular
files (with their holes), directories, links and pipes, their modes and times; never an owner, an
attribute, a setuid bit or a device, so nothing in it can harm whoever unpacks it. Equal trees make
equal streams, so a stream has a content address.

Layout: ``MAGIC``, then for each entry its length (4 bytes), its record (``entries``), and the bytes
of its extents. A directory stands before what is in it. How it is read: ``placing``.

Used inside a virtual machine too: imports nothing that is not there.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from stoker.sandbox.entries import (
    CHUNK_BYTES,
    KEPT_MODE,
    LENGTH_BYTES,
    MAGIC,
    OPEN_DIRECTORY,
    RECORD_BYTES_MAX,
    Bounds,
    Entry,
    Unkept,
    encode,
    open_beneath,
)

_LEFT_OUT_MAX = 20
_OPENED_MODE = 0o700
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Packed(NamedTuple):
    """What was written."""

    digest: str
    size_bytes: int
    left_out: tuple[str, ...]


class Writes(Protocol):
    """Where a stream goes."""

    def write(self, content: bytes, /) -> object:
        """Take all of it."""
        ...


def pack(folders: Mapping[bytes, int], into: BinaryIO, bounds: Bounds) -> Packed:
    """Write what lies in ``folders`` (name → descriptor) to ``into``.

    Raises:
        Unkept: it cannot be kept whole: too much, too deep, or changed meanwhile.
        OSError: it cannot be read, or not be written.
    """
    hashing = Hashing(into)
    left_out = write_state(folders, hashing, bounds)
    return Packed(hashing.digest(), hashing.size_bytes, left_out)


class Hashing:
    """Passes a stream on and names it."""

    def __init__(self, into: Writes) -> None:
        from hashlib import blake2b  # noqa: PLC0415 - a guest names nothing and is spared it

        self._into = into
        self._hash = blake2b(digest_size=32)
        self.size_bytes = 0

    def write(self, content: bytes, /) -> None:
        """Take all of it."""
        self._hash.update(content)
        self.size_bytes += len(content)
        self._into.write(content)

    def digest(self) -> str:
        """Return the content address of what was written."""
        return self._hash.hexdigest()


def write_state(folders: Mapping[bytes, int], into: Writes, bounds: Bounds) -> tuple[str, ...]:
    """Write what lies in ``folders``; return what was left out. Raises what ``pack`` raises."""
    packer = _Packer(into, bounds)
    try:
        for name in sorted(folders):
            packer.folder(name, folders[name])
    finally:
        packer.lock()
    return tuple(packer.left_out)


_Below = tuple[bytes, os.stat_result]
"""A directory still to be packed (its path as one word), and what it was seen to be."""


class _Packer:
    def __init__(self, into: Writes, bounds: Bounds) -> None:
        self._into = into
        self._bounds = bounds
        self._bytes = 0
        self._entries = 0
        self._records = 0
        self.left_out: list[str] = []
        self._links: dict[tuple[int, int], bytes] = {}
        """Files with several names, by device and inode."""
        self._root = os.geteuid() == 0
        self._opened: list[tuple[int, tuple[bytes, ...], int]] = []
        """Directories whose owner had closed them, with the mode they had."""
        into.write(MAGIC)

    def folder(self, name: bytes, root: int) -> None:
        """Add one folder."""
        self._links.clear()  # a link never reaches from one folder into another
        waiting: list[_Below] = [(b"", os.fstat(root))]
        while waiting:
            path, status = waiting.pop()
            parts = tuple(path.split(b"/")) if path else ()
            if parts:
                self._add(_entry(name, parts, "directory", status))
            if self._closed(status):
                self._opened.append((root, parts, _set_mode(root, parts, _OPENED_MODE)))
            directory = _open_directory(root, parts)
            try:
                waiting += reversed(self._directory(name, parts, directory))
            finally:
                os.close(directory)

    def lock(self) -> None:
        """Give directories that were opened for a moment their modes back."""
        while self._opened:
            root, parts, mode = self._opened.pop()  # what is below comes before what is above
            _set_mode(root, parts, mode)

    def _closed(self, status: os.stat_result) -> bool:
        """Whether its owner closed a directory to himself, and so to us where we are he."""
        return not self._root and status.st_mode & _OPENED_MODE != _OPENED_MODE

    def _directory(self, folder: bytes, parts: tuple[bytes, ...], directory: int) -> list["_Below"]:
        """Add what lies in ``directory``; return the directories in it."""
        names = sorted(os.fsencode(name) for name in os.listdir(directory))
        below: list[_Below] = []
        for name in names:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            inside = (*parts, name)
            mode = status.st_mode
            if stat.S_ISDIR(mode):
                below.append((b"/".join(inside), status))
            elif stat.S_ISREG(mode):
                self._file(folder, inside, directory, status)
            elif stat.S_ISLNK(mode):
                target = os.fsencode(os.readlink(name, dir_fd=directory))
                self._add(_entry(folder, inside, "link", status, target=target))
            elif stat.S_ISFIFO(mode):
                self._add(_entry(folder, inside, "pipe", status))
            elif len(self.left_out) < _LEFT_OUT_MAX:
                kind = "socket" if stat.S_ISSOCK(mode) else "device"
                shown = b"/".join((folder, *inside)).decode(errors="backslashreplace")
                self.left_out.append(f"{shown}: a {kind}")
        return below

    def _file(
        self, folder: bytes, parts: tuple[bytes, ...], directory: int, status: os.stat_result
    ) -> None:
        if status.st_nlink > 1:
            key = (status.st_dev, status.st_ino)
            known = self._links.setdefault(key, b"/".join(parts))
            if known != b"/".join(parts):
                self._add(_entry(folder, parts, "same", status, target=known))
                return
        with _readable(parts[-1], directory) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise Unkept("a file changed its kind while it was read")
            extents = tuple(_extents(file, status))
            entry = _entry(folder, parts, "file", status, extents=extents)
            self._bytes += sum(length for _, length in extents)
            if self._bytes > self._bounds.bytes_max:
                raise Unkept(f"it holds more than {self._bounds.bytes_max} bytes")
            self._add(entry)
            for offset, length in extents:
                self._copy(file, offset=offset, length=length)

    def _copy(self, file: int, *, offset: int, length: int) -> None:
        while length:
            piece = os.pread(file, min(length, CHUNK_BYTES), offset)
            if not piece:
                raise Unkept("a file became shorter while it was read")
            self._into.write(piece)
            offset += len(piece)
            length -= len(piece)

    def _add(self, entry: Entry) -> None:
        self._entries += 1
        if self._entries > self._bounds.entries_max:
            raise Unkept(f"it holds more than {self._bounds.entries_max} names")
        record = encode(entry)
        if len(record) > RECORD_BYTES_MAX:
            raise Unkept("a file has too many holes")
        self._records += LENGTH_BYTES + len(record)
        if self._records > self._bounds.records_bytes_max:
            raise Unkept(f"its names take more than {self._bounds.records_bytes_max} bytes")
        self._into.write(len(record).to_bytes(LENGTH_BYTES) + record)


def _entry(
    folder: bytes,
    parts: tuple[bytes, ...],
    kind: str,
    status: os.stat_result,
    *,
    extents: tuple[tuple[int, int], ...] = (),
    target: bytes = b"",
) -> Entry:
    return Entry(
        folder=folder,
        parts=parts,
        kind=kind,
        mode=status.st_mode & KEPT_MODE,
        changed_ns=status.st_mtime_ns,
        size_bytes=status.st_size if kind == "file" else 0,
        extents=extents,
        target=target,
    )


def _extents(file: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is no hole."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        if size:
            yield 0, size
        return
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(file, start, os.SEEK_HOLE), size)
        yield start, end - start


def _open_directory(root: int, parts: tuple[bytes, ...]) -> int:
    try:
        return open_beneath(root, parts, OPEN_DIRECTORY)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise Unkept("a directory lies too deep: its path is over 4,095 bytes") from error
        raise


@contextlib.contextmanager
def _readable(name: bytes, directory: int) -> Iterator[int]:
    """Open a file; one that its owner closed to himself is opened for a moment."""
    try:
        file = os.open(name, _OPEN_FILE, dir_fd=directory)
    except PermissionError:
        mode = _set_mode(directory, (name,), 0o400)
        try:
            file = os.open(name, _OPEN_FILE, dir_fd=directory)
        finally:
            _set_mode(directory, (name,), mode)
    try:
        yield file
    finally:
        os.close(file)


def _set_mode(root: int, parts: Sequence[bytes], mode: int) -> int:
    """Set the mode of a file or directory of ours; return the one it had."""
    found = open_beneath(root, parts, os.O_PATH)
    try:
        before = os.fstat(found).st_mode
        # This very file, whatever has its name by now; of a link it is the link itself, and fails.
        os.chmod(f"/proc/self/fd/{found}", mode)  # noqa: PTH101 - a path of the kernel's
        return stat.S_IMODE(before)
    finally:
        os.close(found)
