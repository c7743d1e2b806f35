"""Whole columns as PostgreSQL's binary arrays: one parameter per column, whatever the row count.

psycopg adapts lists element by element in Python; these are packed at once.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from psycopg import Connection
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.numeric import OidBinaryLoader

_HEADER = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_NULL = _LENGTH.pack(-1)

_INT8, _FLOAT8, _TEXT, _BYTEA, _XID = 20, 701, 25, 17, 28


class Column:
    """One column on its way to the server."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


class Ints(Column):
    """``bigint[]``."""


class Floats(Column):
    """``double precision[]``."""


class Texts(Column):
    """``text[]``; ``None`` is NULL."""


class Xids(Column):
    """``xid[]``: which transactions wrote rows."""


class Blobs(Column):
    """``bytea[]``; ``None`` is NULL."""


KINDS: dict[str, type[Column]] = {"q": Ints, "d": Floats, "t": Texts, "b": Blobs, "x": Xids}


def columns(kinds: str, rows: Iterable[Sequence[Any]]) -> tuple[Column, ...]:
    """Return rows as columns; ``kinds`` has one letter for each."""
    made = list(zip(*rows, strict=True))
    if not made:
        return tuple(KINDS[kind](()) for kind in kinds)
    return tuple(KINDS[kind](values) for kind, values in zip(kinds, made, strict=True))


class _ArrayDumper(Dumper):
    format = Format.BINARY
    element = 0

    def dump(self, obj: Column) -> bytes:
        """Return the array as the server reads it."""
        values, count = obj.values, len(obj.values)
        if not count:
            return _HEADER.pack(0, 0, self.element, 0, 0)[:12]
        header = _HEADER.pack(1, 1, self.element, count, 1)
        if values[0] == values[-1] and values.count(values[0]) == count:
            return header + self._elements(values[:1]) * count  # most columns hold one value
        return header + self._elements(values)

    def _elements(self, values: Sequence[Any]) -> bytes:
        raise NotImplementedError


class _FixedDumper(_ArrayDumper):
    letter, size = "q", 8

    def _elements(self, values: Sequence[Any]) -> bytes:
        count = len(values)
        sizes = (self.size,) * count
        return struct.pack(
            "!" + f"i{self.letter}" * count,
            *chain.from_iterable(zip(sizes, values, strict=True)),
        )


class _IntDumper(_FixedDumper):
    oid = 1016
    element = _INT8


class _FloatDumper(_FixedDumper):
    oid = 1022
    element = _FLOAT8
    letter = "d"


class _XidDumper(_FixedDumper):
    oid = 1011
    element = _XID
    letter, size = "I", 4


class _BlobDumper(_ArrayDumper):
    oid = 1001
    element = _BYTEA

    def _elements(self, values: Sequence[Any]) -> bytes:
        return b"".join(
            _NULL if value is None else _LENGTH.pack(len(value)) + value for value in values
        )


class _TextDumper(_BlobDumper):
    oid = 1009
    element = _TEXT

    def _elements(self, values: Sequence[Any]) -> bytes:
        encoded = [None if value is None else value.encode() for value in values]
        return super()._elements(encoded)


_DUMPERS: dict[type[Column], type[_ArrayDumper]] = {
    Ints: _IntDumper,
    Floats: _FloatDumper,
    Texts: _TextDumper,
    Blobs: _BlobDumper,
    Xids: _XidDumper,
}
_DUMP = {column: dumper(column).dump for column, dumper in _DUMPERS.items()}


def packed(column: Column) -> bytes:
    """Return a column as the server reads it."""
    return _DUMP[type(column)](column)


def register(connection: "Connection[Any]") -> None:
    """Teach a connection to send columns, and to read which transaction wrote a row."""
    for column, dumper in _DUMPERS.items():
        connection.adapters.register_dumper(column, dumper)
    connection.adapters.register_loader("xid", OidBinaryLoader)
