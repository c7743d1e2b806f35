"""Rows as Parquet, through pyarrow (``stoker[export]``).

Rows are gathered into groups of bounded size, so that a run of any length needs the memory of one
group. Columns and their types are those of ``SCHEMA``; ``docs/guides/export.md`` says what each is.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import parquet

from stoker.export.rows import Row, message_fields, span_fields

FORMAT_VERSION = "1"
"""Of the columns, in the file's own metadata (``stoker.export``)."""
GROUP_BYTES = 16 * 1024 * 1024
GROUP_ROWS = 1024
_TOKEN_BYTES = 9
"""An id, a log-probability and a mask byte."""

_SPAN = pa.struct([("policy_version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_TOOL_CALL = pa.struct(
    [(name, pa.string()) for name in ("call_id", "name", "arguments", "error", "raw")]
)
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(_TOOL_CALL)),
        ("tool_call_id", pa.string()),
    ]
)
_DIGESTS = pa.map_(pa.string(), pa.string())
_SPECIAL: dict[str, pa.DataType] = {
    "token_ids": pa.list_(pa.int32()),
    "mask": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "spans": pa.list_(_SPAN),
    "messages": pa.list_(_MESSAGE),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "recovered": pa.list_(pa.string()),
    "isolation": pa.list_(pa.string()),
    "steps": pa.list_(pa.int32()),
    "policy_digests": _DIGESTS,
    "baseline_digests": _DIGESTS,
}
_FIELDS: dict[str, Callable[[Any], Any]] = {"spans": span_fields, "messages": message_fields}
_INTEGERS = {
    "index", "segment", "segments", "prompt_tokens", "sampled_tokens", "rollout_steps", "actions",
    "attempts", "parent_steps",
}  # fmt: skip
_NUMBERS = {
    "reward", "admitted_at", "finished_at", "seconds", "inference_seconds", "queue_seconds",
    "run_seconds",
}  # fmt: skip


def _type(name: str) -> pa.DataType:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _INTEGERS:
        return pa.int64()
    return pa.float64() if name in _NUMBERS else pa.string()


SCHEMA = pa.schema(
    [(name, _type(name)) for name in Row.__struct_fields__],
    metadata={"stoker.export": FORMAT_VERSION},
)


class Parquet:
    """Writes rows in groups."""

    def __init__(self, file: BinaryIO) -> None:
        self._writer = parquet.ParquetWriter(file, SCHEMA, compression="zstd")
        self._rows: list[Row] = []
        self._bytes = 0

    def write(self, row: Row) -> None:
        """Take one row; a full group goes to the file."""
        self._rows.append(row)
        self._bytes += _weight(row)
        if self._bytes >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is held back, and the footer: without it the file cannot be read."""
        try:
            if self._rows:
                self._flush()
            self._writer.close()
        finally:
            self._writer.is_open = False  # a second try when it is collected would only make noise

    def _flush(self) -> None:
        columns = [_column(name, self._rows) for name in Row.__struct_fields__]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._rows.clear()
        self._bytes = 0


def _weight(row: Row) -> int:
    texts = sum(len(message.content) for message in row.messages)
    return _TOKEN_BYTES * len(row.token_ids) + texts


def _column(name: str, rows: Sequence[Row]) -> pa.Array:
    values = [getattr(row, name) for row in rows]
    match name:
        case "token_ids":
            return _packed(values, pa.int32())
        case "mask":
            return _packed([array("B", mask) for mask in values], pa.uint8())
        case "logprobs":
            return _logprobs(values)
    return pa.array([_plain(name, value) for value in values], SCHEMA.field(name).type)


def _plain(name: str, value: Any) -> Any:  # noqa: ANN401 - any field of a row
    if name in _FIELDS:
        return [_FIELDS[name](one) for one in value]
    return list(value.items()) if isinstance(value, dict) else value


def _packed(values: "Sequence[array[Any]]", kind: pa.DataType) -> pa.Array:
    """Return lists of numbers without making an object of each."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    content = b"".join(value.tobytes() for value in values)
    flat = pa.Array.from_buffers(kind, offsets[-1], [None, pa.py_buffer(content)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def _logprobs(values: "Sequence[array[float]]") -> pa.Array:
    if all(math.isfinite(one) for value in values for one in value):
        return _packed(values, pa.float32())
    lists = [[one if math.isfinite(one) else None for one in value] for value in values]
    return pa.array(lists, pa.list_(pa.float32()))
