"""What a process did to its disk and its sockets, in order, written to a file as it happens.

``watch`` puts itself between a real process and what it calls: SQLite through a VFS of its own,
our code through ``os`` and ``io``, replies through ``socket``. A write is recorded before it is
made, a sync after it returned, bytes of a reply before they leave: the order that promises the
least. Nothing of the code under test knows of it.
"""

import io
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

import apsw
import msgspec

_LENGTH = struct.Struct(">I")


class Write(msgspec.Struct, frozen=True, tag=True):
    path: str
    offset: int
    data: bytes


class Truncate(msgspec.Struct, frozen=True, tag=True):
    path: str
    size: int


class Sync(msgspec.Struct, frozen=True, tag=True):
    """A file or a directory is on disk now."""

    path: str


class Create(msgspec.Struct, frozen=True, tag=True):
    path: str
    directory: bool = False


class Delete(msgspec.Struct, frozen=True, tag=True):
    path: str


class Rename(msgspec.Struct, frozen=True, tag=True):
    old: str
    new: str


class Receive(msgspec.Struct, frozen=True, tag=True):
    connection: int
    data: bytes


class Send(msgspec.Struct, frozen=True, tag=True):
    connection: int
    data: bytes


class Mark(msgspec.Struct, frozen=True, tag=True):
    """The process believes that everything ``what`` stands for is on disk."""

    what: str


Event = Write | Truncate | Sync | Create | Delete | Rename | Receive | Send | Mark
_decode = msgspec.msgpack.Decoder(Event).decode


class Trace:
    """Appends events to a file; lives outside the traced directory."""

    def __init__(self, path: Path, root: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._root = str(root)

    def add(self, event: Event) -> None:
        document = msgspec.msgpack.encode(event)
        _write(self._file, _LENGTH.pack(len(document)) + document)

    def inside(self, path: str | os.PathLike[str]) -> str | None:
        """Return the path below the traced directory, ``None`` for what lies elsewhere."""
        whole = str(Path(path).absolute())
        if whole == self._root:
            return "."
        return whole[len(self._root) + 1 :] if whole.startswith(self._root + "/") else None


_write = os.write


def read_trace(path: Path) -> Iterator[Event]:
    content = path.read_bytes()
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + length > len(content):
            return  # the process was killed while it wrote this
        yield _decode(content[at : at + length])
        at += length


_watched: list[Trace] = []
_kept: list[object] = []
"""SQLite forgets a VFS that nobody holds."""


def mark(what: str) -> None:
    """Note that ``what`` is promised from now on."""
    _watched[0].add(Mark(what))


def replace(owner: object, name: str, by: object) -> None:
    """Put ``by`` in the place of a function that others look up when they call it."""
    setattr(owner, name, by)


def watch(trace: Trace) -> None:
    """Record everything this process does to files below the root, and to its sockets."""
    _watched.append(trace)
    _kept.append(Vfs(trace))
    _watch_syncs(trace)
    _watch_names(trace)
    _watch_files(trace)
    _watch_sockets(trace)


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _watch_syncs(trace: Trace) -> None:
    def wrapped(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(target: Any) -> None:
            original(target)
            descriptor = target if isinstance(target, int) else target.fileno()
            path = trace.inside(_path_of(descriptor))
            if path is not None:
                trace.add(Sync(path))

        return sync

    replace(os, "fsync", wrapped(os.fsync))
    replace(os, "fdatasync", wrapped(os.fdatasync))


def _watch_names(trace: Trace) -> None:
    mkdir, unlink = os.mkdir, os.unlink

    def make(path: Any, *rest: Any, **more: Any) -> None:
        mkdir(path, *rest, **more)
        if (name := trace.inside(path)) is not None:
            trace.add(Create(name, directory=True))

    def remove(path: Any, **more: Any) -> None:
        if (name := trace.inside(path)) is not None and Path(path).exists():
            trace.add(Delete(name))
        unlink(path, **more)

    def moved(original: Callable[..., None]) -> Callable[..., None]:
        def move(old: Any, new: Any, **more: Any) -> None:
            names = trace.inside(old), trace.inside(new)
            if names[0] is not None and names[1] is not None:
                trace.add(Rename(names[0], names[1]))
            original(old, new, **more)

        return move

    replace(os, "mkdir", make)
    replace(os, "unlink", remove)
    replace(os, "rename", moved(os.rename))
    replace(os, "replace", moved(os.replace))


class _File:
    """A file opened for writing: its bytes count as written when they leave our buffer."""

    def __init__(self, file: IO[Any], path: str, trace: Trace) -> None:
        self._file, self._path, self._trace = file, path, trace
        self._offset = 0
        self._buffer = b""

    def write(self, data: Any) -> int:
        self._buffer += data.encode() if isinstance(data, str) else bytes(data)
        return int(self._file.write(data))

    def flush(self) -> None:
        if self._buffer:
            self._trace.add(Write(self._path, self._offset, self._buffer))
        self._offset += len(self._buffer)
        self._buffer = b""
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _watch_files(trace: Trace) -> None:
    original = io.open

    def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        path = trace.inside(file) if isinstance(file, str | os.PathLike) else None
        fresh = path is not None and not os.path.lexists(file)
        found = original(file, mode, *rest, **more)
        if path is None or not set(mode) & set("wx"):
            return found
        trace.add(Create(path) if fresh else Truncate(path, 0))
        return _File(found, path, trace)

    replace(io, "open", opened)


def _watch_sockets(trace: Trace) -> None:
    serial = count()
    numbers: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()
    send, receive = socket.socket.send, socket.socket.recv

    def sending(self: socket.socket, data: Any, *rest: Any) -> int:
        number = numbers.setdefault(self, next(serial))
        before = bytes(data)
        trace.add(Send(number, before))
        sent = send(self, data, *rest)
        assert sent == len(before), "these replies fit into a socket's buffer"
        return sent

    def receiving(self: socket.socket, size: int, *rest: Any) -> bytes:
        data = receive(self, size, *rest)
        trace.add(Receive(numbers.setdefault(self, next(serial)), data))
        return data

    replace(socket.socket, "send", sending)
    replace(socket.socket, "recv", receiving)


def parent(path: str) -> str:
    """Return the directory of a path below the root."""
    return path.rpartition("/")[0] or "."


class Vfs(apsw.VFS):
    """SQLite's way to the disk, recorded; registered as the default."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        super().__init__("recorded", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> "VfsFile":  # noqa: N802 - SQLite's name
        return VfsFile(self.trace, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802, FBT001 - SQLite's
        path = self.trace.inside(filename)
        existed = Path(filename).exists()
        super().xDelete(filename, syncdir)
        if path is not None and existed:
            self.trace.add(Delete(path))
            if syncdir:
                self.trace.add(Sync(parent(path)))


class VfsFile(apsw.VFSFile):
    """One file of SQLite's."""

    def __init__(self, trace: Trace, name: Any, flags: list[int]) -> None:
        filename = name.filename() if isinstance(name, apsw.URIFilename) else name
        self.path = trace.inside(filename) if filename else None
        self.trace = trace
        fresh = self.path is not None and not Path(filename).exists()
        super().__init__("unix", name, flags)
        journal = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL
        self.new_journal = fresh and bool(flags[0] & journal)
        if self.path is not None and fresh:
            trace.add(Create(self.path))

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
        if self.path is not None:
            self.trace.add(Write(self.path, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802 - SQLite's name
        if self.path is not None:
            self.trace.add(Truncate(self.path, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
        super().xSync(flags)
        if self.path is None:
            return
        self.trace.add(Sync(self.path))
        if self.new_journal:  # SQLite syncs the directory with a new journal's first sync
            self.new_journal = False
            self.trace.add(Sync(parent(self.path)))
