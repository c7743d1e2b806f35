"""Putting the stream of a state (``states``) into the empty folders of a box.

What comes is believed in nothing: names stay beneath the folders, no link is followed, no owner,
setuid bit or device is made, and no more than the limits of the box is written.

Used inside a virtual machine too: imports nothing that is not there.
"""

import errno
import os
import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, Self

from stoker.sandbox.entries import (
    CHUNK_BYTES,
    KEPT_MODE,
    LENGTH_BYTES,
    MAGIC,
    OPEN_DIRECTORY,
    RECORD_BYTES_MAX,
    Bounds,
    Entry,
    Forged,
    check_names,
    decode,
    open_beneath,
)

_FORGED = (ValueError, TypeError, EOFError, KeyError, OverflowError)
_IMPOSSIBLE = frozenset(
    {
        errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
        errno.ENOTDIR, errno.EXDEV,
    }
)  # fmt: skip
"""What a kernel answers to entries that no tree can hold."""


class Reads(Protocol):
    """Where a stream comes from."""

    def read(self, length: int, /) -> bytes:
        """Return so many bytes, fewer only at the end."""
        ...


class EndsEarly(Forged):
    """A stream of which the rest did not come."""


class TooMuch(OSError):
    """It holds more than its bounds allow."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ENOSPC, f"{what} more than the limits of the box allow")


def place(
    source: Reads,
    folders: Mapping[bytes, int],
    owner: int | None,
    bounds: Bounds,
    *,
    public: bool = False,
) -> None:
    """Put what ``source`` holds into empty ``folders``; all of it belongs to ``owner`` (or us).

    ``public``: everybody can read it and run what its owner could, and only we can change it.

    Raises:
        Forged: it is no such stream; what is in the folders then is nothing to be used.
        OSError: it cannot be written, or is more than ``bounds`` allow (``TooMuch``).
    """
    try:
        reader = Reader(source, bounds.records_bytes_max)
        with _Placer(folders, owner, bounds, public=public) as placer:
            while (entry := reader.entry()) is not None:
                placer.place(entry, reader.read)
    except (*_FORGED, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _IMPOSSIBLE:
            raise
        raise Forged(str(error)) from error


class Reader:
    """Cuts a stream into entries; their content is read in between."""

    def __init__(self, source: Reads, records_bytes_max: int) -> None:
        self._source = source
        self._records_left = records_bytes_max
        if self.read(len(MAGIC)) != MAGIC:
            raise Forged("it does not begin like one")

    def read(self, length: int) -> bytes:
        """Return exactly so many bytes."""
        content = self._source.read(length)
        if len(content) != length:
            raise EndsEarly("it ends early")
        return content

    def entry(self) -> Entry | None:
        """Return the next entry; ``None`` at the end."""
        record = self.record()
        return None if record is None else decode(record)

    def record(self) -> bytes | None:
        """Return the next record; ``None`` at the end."""
        head = self._source.read(LENGTH_BYTES)
        if not head:
            return None
        length = int.from_bytes(head)
        if len(head) != LENGTH_BYTES or length > RECORD_BYTES_MAX:
            raise Forged("a record has no usable length")
        self._records_left -= LENGTH_BYTES + length
        if self._records_left < 0:
            raise TooMuch("its names take")
        return self.read(length)


class _Directory(NamedTuple):
    """A directory that was made; its path as one word, since a deep tree has many long ones."""

    folder: bytes
    path: bytes
    mode: int
    changed_ns: int


class _Placer:
    """Makes entries beneath the folders; times and modes of directories come last."""

    def __init__(
        self, folders: Mapping[bytes, int], owner: int | None, bounds: Bounds, *, public: bool
    ) -> None:
        self._public = public
        self._folders = folders
        self._owner = owner
        self._bytes_left = bounds.bytes_max
        self._entries_left = bounds.entries_max
        self._directories: list[_Directory] = []
        self._at: tuple[bytes, tuple[bytes, ...]] | None = None
        self._parent = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._leave()
        if kind is None:
            while self._directories:
                self._settle(self._directories.pop())

    def place(self, entry: Entry, read: Callable[[int], bytes]) -> None:
        """Make one entry."""
        parts = entry.parts
        check_names(parts)
        self._entries_left -= 1
        self._bytes_left -= sum(length for _, length in entry.extents)
        if self._entries_left < 0 or self._bytes_left < 0:
            raise TooMuch("it holds")
        parent, name = self._enter(entry.folder, parts[:-1]), parts[-1]
        if entry.kind == "file":
            self._file(entry, parent, read)
        elif entry.kind == "directory":
            os.mkdir(name, 0o700, dir_fd=parent)
            self._own(name, parent)
            self._directories.append(
                _Directory(entry.folder, b"/".join(parts), entry.mode, entry.changed_ns)
            )
        elif entry.kind == "link":
            os.symlink(entry.target, name, dir_fd=parent)
            self._own(name, parent)
            self._date(entry, parent)
        elif entry.kind == "same":
            self._same(entry, parent)
        elif entry.kind == "pipe":
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._own(name, parent)
            # Just made, and nobody else is here; mkfifo itself would heed our umask.
            os.chmod(name, self._file_mode(entry.mode), dir_fd=parent)
            self._date(entry, parent)
        else:
            raise Forged(f"{entry.kind!r} is no kind of entry")

    def _file(self, entry: Entry, parent: int, read: Callable[[int], bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(entry.parts[-1], flags, 0o600, dir_fd=parent)
        try:
            end = 0
            for offset, length in entry.extents:
                if offset < end or length <= 0:
                    raise Forged("the extents of a file are not in order")
                end = offset + length
                _write_extent(file, read, offset=offset, length=length)
            if entry.size_bytes != end:
                os.ftruncate(file, entry.size_bytes)
            if self._owner is not None:
                os.fchown(file, self._owner, self._owner)
            os.fchmod(file, self._file_mode(entry.mode))
            os.utime(file, ns=(entry.changed_ns, entry.changed_ns))
        finally:
            os.close(file)

    def _same(self, entry: Entry, parent: int) -> None:
        *above, name = entry.target.split(b"/")
        check_names((*above, name))
        origin = open_beneath(self._folders[entry.folder], above, os.O_PATH | os.O_DIRECTORY)
        try:
            os.link(
                name,
                entry.parts[-1],
                src_dir_fd=origin,
                dst_dir_fd=parent,
                follow_symlinks=False,
            )
        finally:
            os.close(origin)

    def _file_mode(self, mode: int) -> int:
        if self._public:
            return 0o755 if mode & stat.S_IXUSR else 0o644
        return mode & KEPT_MODE

    def _settle(self, made: _Directory) -> None:
        root, parts = self._folders[made.folder], made.path.split(b"/")
        directory = open_beneath(root, parts, OPEN_DIRECTORY)
        try:
            os.fchmod(directory, 0o755 if self._public else made.mode & KEPT_MODE)
            os.utime(directory, ns=(made.changed_ns, made.changed_ns))
        finally:
            os.close(directory)

    def _own(self, name: bytes, parent: int) -> None:
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)

    def _date(self, entry: Entry, parent: int) -> None:
        times = (entry.changed_ns, entry.changed_ns)
        os.utime(entry.parts[-1], ns=times, dir_fd=parent, follow_symlinks=False)

    def _enter(self, folder: bytes, parts: tuple[bytes, ...]) -> int:
        """Return the directory that entries go into; the last one is kept open."""
        if self._at != (folder, parts):
            self._leave()
            self._parent = open_beneath(self._folders[folder], parts, os.O_PATH | os.O_DIRECTORY)
            self._at = (folder, parts)
        return self._parent

    def _leave(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._parent, self._at = -1, None


def _write_extent(file: int, read: Callable[[int], bytes], *, offset: int, length: int) -> None:
    while length:
        piece = memoryview(read(min(length, CHUNK_BYTES)))
        length -= len(piece)
        while piece:
            written = os.pwrite(file, piece, offset)
            offset += written
            piece = piece[written:]
