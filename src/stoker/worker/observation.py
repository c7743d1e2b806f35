"""Inputs and observations: validated when they come in, bounded and encoded when they go out.

Whatever a tool returned, what leaves here is a value of at most ``OBSERVATION_BYTES_MAX`` bytes
that the other side can decode, or a typed error (A25). Blocking file work is done off the loop.
"""

import asyncio
from typing import Protocol, TypeVar

import msgspec

from stoker.errors import ArtifactDamaged, ToolRefused
from stoker.model.value import (
    INLINE_BYTES_MAX,
    Value,
    canonical_bytes,
    content_digest,
    inline_value,
)

OBSERVATION_BYTES_MAX = 80 * 1024 * 1024
"""Largest encoded observation: an export at its default cap and its names."""

Record = TypeVar("Record")


class Artifacts(Protocol):
    """The part of the artifact store a worker needs (``journal.artifacts``). Both calls block."""

    def put(self, content: bytes) -> Value:
        """Keep ``content``; it is durable when this returns."""
        ...

    def get(self, value: Value) -> bytes:
        """Return the content of ``value``, checked."""
        ...


async def fetch(value: Value, artifacts: Artifacts) -> bytes:
    """Return the content of ``value``, checked against its digest.

    Raises:
        ArtifactDamaged: it is missing or is not what was submitted.
    """
    if value.inline is None:
        return await asyncio.to_thread(artifacts.get, value)
    if len(value.inline) != value.size_bytes or content_digest(value.inline) != value.digest:
        raise ArtifactDamaged(
            f"the input {value.digest[:16]} does not match its digest; nothing was run",
            digest=value.digest,
        )
    return value.inline


def decode(content: bytes, record: type[Record], tool: str) -> Record:
    """Return the request in ``content``.

    Raises:
        ToolRefused: it is not a request of this tool.
    """
    try:
        return msgspec.msgpack.decode(content, type=record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ToolRefused(f"the input of {tool} is not a {record.__name__}: {error}") from error


async def store(result: object, tool: str, artifacts: Artifacts) -> Value:
    """Return ``result`` encoded, inline when small.

    Raises:
        ToolRefused: it cannot be encoded, or is over the bound.
    """
    try:
        content = canonical_bytes(result)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolRefused(f"the result of {tool} cannot be encoded: {error}") from error
    if len(content) > OBSERVATION_BYTES_MAX:
        raise ToolRefused(
            f"the result of {tool} is {len(content)} bytes, over the bound of "
            f"{OBSERVATION_BYTES_MAX}; it was thrown away; read or export less at once"
        )
    if len(content) <= INLINE_BYTES_MAX:
        return inline_value(content)
    return await asyncio.to_thread(artifacts.put, content)
