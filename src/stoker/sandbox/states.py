"""The files of a box as one stream, for checkpoints, branches and baselines.

Packed and unpacked beneath descriptors of the box's folders, never following the box: every
directory is opened by strict rules, every file without following links. A stream holds regular
files (with their holes), directories, links and pipes, their modes and times; never an owner, an
attribute, a setuid bit or a device, so nothing in it can harm whoever unpacks it. Equal trees make
equal streams, so a stream has a content address.

Layout: ``MAGIC``, then for each entry its length (4 bytes), its record, and the bytes of its
extents. A directory stands before what is in it. How it is read: ``unpacking``.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import BinaryIO

import msgspec

from stoker.sandbox import kernel

MAGIC = b"stoker state 1\n"
CHUNK_BYTES = 1024 * 1024
RECORD_BYTES_MAX = 64 * 1024 * 1024
_LEFT_OUT_MAX = 20
LENGTH_BYTES = 4
_RECORD_BYTES_MEAN = 1024
"""Of each entry that is allowed; paths of a usual tree take a tenth of it."""
_HOLES_SHARE = 128
"""Between two holes lies a page of 4 KiB at least, and is written down in 20 bytes at most."""
KEPT_MODE = 0o777
_OPENED_MODE = 0o700
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Unkept(Exception):
    """A state that cannot be kept whole, and why."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One name in a stream."""

    folder: bytes
    """Which of the box's folders it lies in."""
    parts: tuple[bytes, ...]
    kind: str
    """``file``, ``directory``, ``link``, ``same`` (another name of ``target``) or ``pipe``."""
    mode: int
    changed_ns: int
    size_bytes: int = 0
    extents: tuple[tuple[int, int], ...] = ()
    """Offset and length of what is no hole; their bytes follow the record."""
    target: bytes = b""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    digest: str
    size_bytes: int
    left_out: tuple[str, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much a state may hold."""

    bytes_max: int
    """Content of its files."""
    entries_max: int

    @property
    def records_bytes_max(self) -> int:
        """Return how much its records may take: paths and targets of links, and lists of holes.

        Without it long names would be up to 4 KiB for every file that a limit allows.
        """
        return _RECORD_BYTES_MEAN * self.entries_max + self.bytes_max // _HOLES_SHARE


_encode = msgspec.msgpack.Encoder().encode


def open_beneath(root: int, parts: Sequence[bytes], flags: int) -> int:
    """Open what ``parts`` lead to beneath the directory ``root``, through no link on the way."""
    if _has_openat2():
        path = b"/".join(parts) or b"."
        return kernel.openat2(root, path, flags, resolve=kernel.RESOLVE_STRICT)
    current = os.open(b".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    for depth, name in enumerate(parts or (b".",), start=1):
        wanted = flags if depth >= len(parts) else os.O_PATH | os.O_DIRECTORY
        try:
            following = os.open(name, wanted | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


@cache
def _has_openat2() -> bool:
    return kernel.has_openat2()


# --- packing --------------------------------------------------------------------------------------


def pack(folders: Mapping[bytes, int], into: BinaryIO, bounds: Bounds) -> Packed:
    """Write what lies in ``folders`` (name → descriptor) to ``into``.

    Raises:
        Unkept: it cannot be kept whole: too much, too deep, or changed meanwhile.
        OSError: it cannot be read, or not be written.
    """
    packer = _Packer(into, bounds)
    try:
        for name in sorted(folders):
            packer.folder(name, folders[name])
    finally:
        packer.lock()
    return packer.packed()


_Below = tuple[bytes, os.stat_result]
"""A directory still to be packed (its path as one word), and what it was seen to be."""


class _Packer:
    def __init__(self, into: BinaryIO, bounds: Bounds) -> None:
        self._into = into
        self._bounds = bounds
        self._hash = blake2b(digest_size=32)
        self._size = 0
        self._bytes = 0
        self._entries = 0
        self._records = 0
        self._left_out: list[str] = []
        self._links: dict[tuple[int, int], bytes] = {}
        """Files with several names, by device and inode."""
        self._root = os.geteuid() == 0
        self._opened: list[tuple[int, tuple[bytes, ...], int]] = []
        """Directories whose owner had closed them, with the mode they had."""
        self._write(MAGIC)

    def packed(self) -> Packed:
        """Return what was written."""
        return Packed(
            digest=self._hash.hexdigest(), size_bytes=self._size, left_out=tuple(self._left_out)
        )

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
            elif len(self._left_out) < _LEFT_OUT_MAX:
                kind = "socket" if stat.S_ISSOCK(mode) else "device"
                shown = b"/".join((folder, *inside)).decode(errors="backslashreplace")
                self._left_out.append(f"{shown}: a {kind}")
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
            self._write(piece)
            offset += len(piece)
            length -= len(piece)

    def _add(self, entry: Entry) -> None:
        self._entries += 1
        if self._entries > self._bounds.entries_max:
            raise Unkept(f"it holds more than {self._bounds.entries_max} names")
        record = _encode(entry)
        if len(record) > RECORD_BYTES_MAX:
            raise Unkept("a file has too many holes")
        self._records += LENGTH_BYTES + len(record)
        if self._records > self._bounds.records_bytes_max:
            raise Unkept(f"its names take more than {self._bounds.records_bytes_max} bytes")
        self._write(len(record).to_bytes(LENGTH_BYTES) + record)

    def _write(self, content: bytes) -> None:
        self._hash.update(content)
        self._size += len(content)
        self._into.write(content)


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
