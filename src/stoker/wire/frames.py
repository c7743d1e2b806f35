"""Framing: four bytes of length, big-endian, then one msgpack document.

A peer that sends anything else is told so by closing: ``WireViolation`` on our side, and the
process lives. The first frame each way is a ``Hello`` with the protocol version.
"""

import struct
from collections.abc import Iterator

import msgspec

from stoker.errors import WireViolation

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A larger length is a broken or hostile peer; large values travel by content address."""

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a connection."""

    protocol: int
    role: str
    """Who speaks: ``coordinator``, ``worker``, ``ledger``, ``host``, ``cli``."""
    lineage: str = ""
    """Of a ledger: its identity. Of a peer: the ledger it has talked to before, or empty."""


def frame(document: bytes) -> bytes:
    """Return ``document`` with its length in front."""
    if len(document) > FRAME_BYTES_MAX:
        raise WireViolation(
            f"a message of {len(document)} bytes is over the limit of {FRAME_BYTES_MAX}; "
            "it was not sent; large values belong in the artifact store"
        )
    return _LENGTH.pack(len(document)) + document


class FrameDecoder:
    """Cuts a byte stream into documents; holds at most one incomplete frame."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every document that ``data`` completes.

        Raises:
            WireViolation: a length over the limit; the peer is at fault, close the connection.
        """
        self._buffer += data
        position, size = 0, len(self._buffer)
        while size - position >= LENGTH_BYTES:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > self._bytes_max:
                raise WireViolation(f"a frame of {length} bytes was announced; connection closed")
            end = position + LENGTH_BYTES + length
            if size < end:
                break
            with memoryview(self._buffer) as view:  # a slice of the buffer would be one copy more
                document = bytes(view[position + LENGTH_BYTES : end])
            yield document
            position = end
        del self._buffer[:position]

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._buffer)
