"""Disks as a power cut could leave them: what was synced, and any part of what was not.

The model is pessimistic: unsynced writes of a file may be missing, half there by sectors, or there
in any combination; changes of a directory may be missing from any one on, independently of the
files' contents and of other directories. Only a sync of the file, or of the directory, ends that.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.disk_trace import Create, Delete, Event, Rename, Send, Sync, Truncate, Write, parent

Op = Write | Truncate
Chosen = Callable[[list[Op]], list[Op]]
SECTORS = (512, 4096)
ALL_THERE = "all there"
Image = dict[str, bytes | None]
"""Path → content, ``None`` for a directory."""


class Entry(NamedTuple):
    """A change of one directory: ``name`` now means ``inode``, or nothing."""

    name: str
    inode: int | None


class Disk:
    """Files, names and what of both is not synced yet."""

    def __init__(self) -> None:
        self._serial = 0
        self._names: dict[str, int] = {}
        """As the process sees them."""
        self._directories: set[int] = set()
        self._data: dict[int, bytearray] = {}
        self._unsynced: dict[int, list[Op]] = {}
        self._kept_names: dict[str, int] = {}
        self._unsynced_names: dict[str, list[Entry]] = {}

    def feed(self, event: Event) -> None:
        """Do what the process did."""
        if isinstance(event, Create):
            self._serial += 1
            if event.directory:
                self._directories.add(self._serial)
            self._data[self._serial] = bytearray()
            self._name(event.path, self._serial)
        elif isinstance(event, Write | Truncate):
            inode = self._names[event.path]
            self._unsynced.setdefault(inode, []).append(event)
        elif isinstance(event, Delete):
            self._name(event.path, None)
        elif isinstance(event, Rename):
            inode = self._names[event.old]
            self._name(event.old, None)
            self._name(event.new, inode)
        elif isinstance(event, Sync):
            self._sync(event.path)

    def unsynced(self, path: str) -> int:
        """Count the unsynced writes of a file."""
        return len(self._unsynced.get(self._names.get(path, 0), ()))

    def _name(self, path: str, inode: int | None) -> None:
        if inode is None:
            self._names.pop(path, None)
        else:
            self._names[path] = inode
        self._unsynced_names.setdefault(parent(path), []).append(Entry(path, inode))

    def _sync(self, path: str) -> None:
        inode = self._names.get(path)
        if inode is not None and inode not in self._directories:
            for op in self._unsynced.pop(inode, []):
                _apply(self._data[inode], op)
            return
        for entry in self._unsynced_names.pop(path, []):
            _rename(self._kept_names, entry)

    def images(self, chance: random.Random, variants: int) -> Iterator[tuple[str, Image]]:
        """Yield what could be found after a power cut now: each with how it came about.

        Always: everything unsynced there, everything dropped, and only the newest write of each
        file there; then ``variants`` random ones, torn at sectors.
        """
        yield ALL_THERE, self._image(list, len)
        yield "all dropped", self._image(lambda _: [], lambda _: 0)
        yield "only the newest", self._image(lambda ops: ops[-1:], len)
        for number in range(variants):
            sector = SECTORS[number % len(SECTORS)]

            def some(ops: list[Op], sector: int = sector) -> list[Op]:
                kept = [op for op in ops if chance.random() < 0.6]
                return [part for op in kept for part in _torn(op, sector, chance)]

            yield (
                f"variant {number}, sectors of {sector}",
                self._image(some, lambda entries: chance.randint(0, len(entries))),
            )

    def _image(self, choose: Chosen, count: Callable[[list[Entry]], int]) -> Image:
        names = dict(self._kept_names)
        for entries in self._unsynced_names.values():
            for entry in entries[: count(entries)]:
                _rename(names, entry)
        image: Image = {}
        for path in sorted(names):
            if parent(path) != "." and image.get(parent(path), b"") is not None:
                continue  # its directory was lost
            inode = names[path]
            if inode in self._directories:
                image[path] = None
                continue
            content = bytearray(self._data[inode])
            for op in choose(self._unsynced.get(inode, [])):
                _apply(content, op)
            image[path] = bytes(content)
        return image


def boundary(event: Event) -> bool:
    """Whether the moment before ``event`` is worth a power cut: a sync, or a reply."""
    return isinstance(event, Sync | Send)


def put(image: Image, place: Path) -> None:
    """Write an image to a real, empty directory."""
    for path, content in image.items():
        if content is None:
            (place / path).mkdir()
        else:
            (place / path).write_bytes(content)


def _rename(names: dict[str, int], entry: Entry) -> None:
    if entry.inode is None:
        names.pop(entry.name, None)
    else:
        names[entry.name] = entry.inode


def _apply(content: bytearray, op: Write | Truncate) -> None:
    if isinstance(op, Truncate):
        del content[op.size :]
        content.extend(bytes(max(0, op.size - len(content))))
        return
    end = op.offset + len(op.data)
    content.extend(bytes(max(0, end - len(content))))
    content[op.offset : end] = op.data


def _torn(op: Write | Truncate, sector: int, chance: random.Random) -> list[Op]:
    """Return the sectors of a write that reached the disk; half of all writes are whole."""
    if isinstance(op, Truncate) or chance.random() < 0.5:
        return [op]
    parts: list[Op] = []
    at = op.offset
    end = op.offset + len(op.data)
    while at < end:
        upto = min(end, (at // sector + 1) * sector)
        if chance.random() < 0.5:
            parts.append(Write(op.path, at, op.data[at - op.offset : upto - op.offset]))
        at = upto
    return parts
