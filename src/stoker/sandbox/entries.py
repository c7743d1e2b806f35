"""The records of a state (``states``) and what both sides of a stream rely on.

Packing and placing run on the host and, by the guest runner, inside a virtual machine: nothing that
is not there is imported. A record is an array of MessagePack; where there is msgspec it is read by
it, which also checks every type.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from stoker.sandbox import kernel

MAGIC = b"stoker state 1\n"
FOLDERS = ("workspace", "tmp", "shm")
"""What a box keeps between actions."""
CHUNK_BYTES = 1024 * 1024
RECORD_BYTES_MAX = 64 * 1024 * 1024
LENGTH_BYTES = 4
KEPT_MODE = 0o777
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_RECORD_BYTES_MEAN = 1024
"""Of each entry that is allowed; paths of a usual tree take a tenth of it."""
_HOLES_SHARE = 128
"""Between two holes lies a page of 4 KiB at least, and is written down in 20 bytes at most."""


class Unkept(Exception):
    """A state that cannot be kept whole, and why."""


class Forged(Exception):
    """A stream that no box wrote, and why."""


class Entry(NamedTuple):
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


class Bounds(NamedTuple):
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


def _records() -> tuple[Callable[[Entry], bytes], Callable[[bytes], Entry]]:
    """Return how records are written and read here."""
    try:
        import msgspec  # noqa: PLC0415 - a guest has none
    except ImportError:
        from stoker.sandbox.guest import records  # noqa: PLC0415 - only there

        return records.packed, lambda content: Entry(*records.unpacked(content))  # type: ignore[arg-type]
    read = msgspec.msgpack.Decoder(Entry).decode

    def checked(content: bytes) -> Entry:
        try:
            return read(content)
        except msgspec.MsgspecError as error:
            raise Forged(str(error)) from error

    return msgspec.msgpack.Encoder().encode, checked


encode, decode = _records()


def check_names(parts: Sequence[bytes]) -> None:
    """Refuse what is no path beneath a folder.

    Raises:
        Forged: it leaves its folder, or names nothing.
    """
    if not parts or any(part in (b"", b".", b"..") or b"/" in part for part in parts):
        raise Forged("a name leaves its folder")


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
