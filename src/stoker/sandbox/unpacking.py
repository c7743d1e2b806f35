"""Streams of states (``states``) from elsewhere: put into a box, or passed on to a guest.

Neither believes what is in one. ``unpack`` lets the kernel refuse what no tree can hold
(``placing``); ``passed`` sees only the stream, and so checks every record against those before it.
"""

from collections.abc import Mapping
from typing import BinaryIO, Final

from stoker.errors import ArtifactDamaged
from stoker.sandbox.entries import (
    CHUNK_BYTES,
    FOLDERS,
    KEPT_MODE,
    Bounds,
    Entry,
    Forged,
    check_names,
    decode,
    encode,
)
from stoker.sandbox.placing import Reader, Reads, TooMuch, place
from stoker.sandbox.states import Hashing, Packed, Writes

_FOLDER_NAMES: Final = frozenset(name.encode() for name in FOLDERS)
_NAME_BYTES_MAX: Final = 255
_PATH_BYTES_MAX: Final = 4095 + 1 + _NAME_BYTES_MAX
"""The longest that can be opened, and a name in it."""
_SIGNED: Final = 1 << 63


def unpack(
    source: BinaryIO,
    folders: Mapping[bytes, int],
    owner: int | None,
    digest: str,
    bounds: Bounds,
    *,
    public: bool = False,
) -> None:
    """Put what ``source`` holds into empty ``folders``; see ``placing.place``.

    Raises:
        ArtifactDamaged: it is no such stream, or not the one of ``digest``; what is in the folders
            then is nothing to be used.
        OSError: it cannot be written, or is more than ``bounds`` allow (``ENOSPC``).
    """
    reading = _Passing(source, Hashing(_Nowhere()))
    try:
        place(reading, folders, owner, bounds, public=public)
    except Forged as error:
        raise damaged(digest, error) from error
    check_digest(reading.digest(), digest)


def damaged(digest: str, why: object) -> ArtifactDamaged:
    """Return the error of a file that is no state."""
    return ArtifactDamaged(f"{digest} is no state of a box ({why}); it was not used", digest=digest)


def check_digest(found: str, digest: str) -> None:
    """Refuse a state that is another than ``digest`` names.

    Raises:
        ArtifactDamaged: it is.
    """
    if found != digest:
        raise ArtifactDamaged(f"{digest} holds something else; it was not used", digest=digest)


def passed(source: Reads, into: Writes, bounds: Bounds) -> Packed:
    """Pass a stream on to its end, if it is one that ``states`` could have written of some tree.

    Blocks as ``source`` and ``into`` do. What was passed on before a refusal is of no use.

    Raises:
        Forged: it is none.
        TooMuch: it holds more than ``bounds`` allow.
        OSError: it cannot be read or passed on.
    """
    passing = _Passing(source, Hashing(into))
    reader = Reader(passing, bounds.records_bytes_max)
    tree = _Tree(bounds)
    while (record := reader.record()) is not None:
        for length in tree.add(record):
            left = length
            while left:
                left -= len(reader.read(min(left, CHUNK_BYTES)))
    return Packed(passing.digest(), passing.size_bytes, ())


class _Nowhere:
    """Takes what is only to be named."""

    def write(self, content: bytes, /) -> None:
        """Let go of it."""


class _Passing:
    """Reads a stream; what was read goes on."""

    def __init__(self, source: Reads, into: Hashing) -> None:
        self._source, self._into = source, into

    def read(self, length: int, /) -> bytes:
        """Return so many bytes, fewer only at the end."""
        content = self._source.read(length)
        self._into.write(content)
        return content

    def digest(self) -> str:
        """Return the content address of what was read."""
        return self._into.digest()

    @property
    def size_bytes(self) -> int:
        """Return how much was read."""
        return self._into.size_bytes


class _Tree:
    """What a stream has named so far."""

    def __init__(self, bounds: Bounds) -> None:
        self._bytes_left = bounds.bytes_max
        self._entries_left = bounds.entries_max
        self._seen: dict[tuple[bytes, bytes], str] = {}
        """Kind of each name, by folder and path."""

    def add(self, record: bytes) -> list[int]:
        """Take one record in; return the lengths of what follows it.

        Raises:
            Forged, TooMuch: as for ``passed``.
        """
        entry = decode(record)
        if encode(entry) != record:
            raise Forged("a record is not written as records are")
        check_names(entry.parts)
        self._entries_left -= 1
        self._bytes_left -= sum(length for _, length in entry.extents)
        if self._entries_left < 0 or self._bytes_left < 0:
            raise TooMuch("it holds")
        path = b"/".join(entry.parts)
        self._check_place(entry, path)
        _check_kind(entry, path)
        if entry.kind == "same" and self._seen.get((entry.folder, entry.target)) != "file":
            raise Forged("another name of what is no file of it")
        self._seen[entry.folder, path] = entry.kind
        return [length for _, length in entry.extents]

    def _check_place(self, entry: Entry, path: bytes) -> None:
        if entry.folder not in _FOLDER_NAMES:
            raise Forged("a folder that boxes do not have")
        if len(path) > _PATH_BYTES_MAX or max(map(len, entry.parts)) > _NAME_BYTES_MAX:
            raise Forged("a name too long for any file system")
        above = (entry.folder, b"/".join(entry.parts[:-1]))
        if len(entry.parts) > 1 and self._seen.get(above) != "directory":
            raise Forged("a name beneath what is no directory")
        if (entry.folder, path) in self._seen:
            raise Forged("a name twice")


def _check_kind(entry: Entry, path: bytes) -> None:
    if entry.kind not in ("file", "directory", "link", "same", "pipe"):
        raise Forged(f"{entry.kind!r} is no kind of entry")
    if entry.mode & ~KEPT_MODE or not -_SIGNED <= entry.changed_ns < _SIGNED:
        raise Forged("a mode or time that is not kept")
    if b"\0" in path or b"\0" in entry.target or len(entry.target) > _PATH_BYTES_MAX:
        raise Forged("a name or target that no file system has")
    if bool(entry.target) != (entry.kind in ("link", "same")):
        raise Forged("a target without need, or none where there must be one")
    end = 0
    for offset, length in entry.extents:
        if offset < end or length <= 0:
            raise Forged("the extents of a file are not in order")
        end = offset + length
    if not end <= entry.size_bytes < _SIGNED or (entry.kind != "file" and entry.size_bytes):
        raise Forged("a size that is not the file's")
