"""Rows as JSON lines: one object a line, UTF-8, readable by anything; not a number is null."""

from typing import BinaryIO

import msgspec

from stoker.export.rows import Row, as_json

_encoder = msgspec.json.Encoder()


class JsonLines:
    """Writes rows one by one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        """Append one line."""
        self._file.write(_encoder.encode(as_json(row)) + b"\n")

    def close(self) -> None:
        """Nothing is held back."""
