"""Values: bytes that travel inline when small and by content address when large.

Invariant: ``digest`` and ``size_bytes`` always describe the full content, so a value can be
checked wherever it is read. Measured (facts): file + syncs beat a table row from 32 KiB on.
"""

from hashlib import blake2b
from typing import Any

import msgspec

INLINE_BYTES_MAX = 32 * 1024
"""Content up to this many bytes stays in the row; larger goes to the artifact store first."""


class Value(msgspec.Struct, frozen=True, gc=False):
    """Content by value or by address."""

    digest: str
    """blake2b-256 of the content, hex."""
    size_bytes: int
    """Length of the content."""
    inline: bytes | None = None
    """The content itself, or ``None``: it lies in the artifact store under ``digest``."""


def content_digest(content: bytes) -> str:
    """Return the content address of ``content``: blake2b-256, hex."""
    return blake2b(content, digest_size=32).hexdigest()


def inline_value(content: bytes) -> Value:
    """Return a value that carries ``content`` itself; the caller has checked its size."""
    assert len(content) <= INLINE_BYTES_MAX, "large content goes through the artifact store"
    return Value(digest=content_digest(content), size_bytes=len(content), inline=content)


_sorted_encoder = msgspec.msgpack.Encoder(order="sorted")


def canonical_bytes(value: Any) -> bytes:  # noqa: ANN401 - any encodable value, by purpose
    """Encode ``value`` so that equal values give equal bytes (msgpack, keys in sorted order)."""
    return _sorted_encoder.encode(value)


def canonical_digest(value: Any) -> str:  # noqa: ANN401 - any encodable value, by purpose
    """Return the blake2b-128 of the canonical encoding of ``value``, hex."""
    return blake2b(canonical_bytes(value), digest_size=16).hexdigest()
