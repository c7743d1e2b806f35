"""Frames between the host and the runner in a guest: a JSON header and a body of plain bytes.

``u32 header length, u32 body length, header, body``, big-endian. The header has a ``kind``. Both
sides bound what they take: the host believes nothing of a guest (``link`` decodes the headers into
types), and the runner needs no more than this.

Bytes of a stream are sent only within the receiver's *window*: it says how many it has taken.
Imported on both sides, so by nothing that a guest does not have.
"""

import json
import struct
from collections.abc import Iterator

HEADER_BYTES_MAX = 64 * 1024
"""Of a frame from a guest."""
ORDER_BYTES_MAX = 4 * 1024 * 1024
"""Of a header to a guest: arguments and variables may be long."""
BODY_BYTES_MAX = 128 * 1024
WINDOW_BYTES = 512 * 1024
"""How much of one stream may be on its way, untaken."""
STDIN = 0
CHANNEL_FIRST = 3
"""Streams have the numbers of the program's descriptors; private channels begin here."""
DOOR_FIRST = 32
"""Connections that programs make to the way out have numbers from here on, none of them twice."""
CONNECTIONS_MAX = 32
"""Of those at once; with their windows, what the host may have to hold of them."""

_LENGTHS = struct.Struct(">II")


def frame(kind: str, body: bytes | memoryview = b"", **fields: object) -> bytes:
    """Return one frame."""
    header = json.dumps({"kind": kind, **fields}).encode()
    return b"".join((_LENGTHS.pack(len(header), len(body)), header, body))


def chunks(content: bytes) -> Iterator[memoryview]:
    """Cut ``content`` into bodies."""
    view = memoryview(content)
    for at in range(0, len(view), BODY_BYTES_MAX):
        yield view[at : at + BODY_BYTES_MAX]


class Frames:
    """Cuts what comes in into frames; holds no more than one of the greatest size, and a read."""

    def __init__(self, header_bytes_max: int) -> None:
        self._header_bytes_max = header_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield header and body of each frame that is complete.

        Raises:
            ValueError: a frame says it is larger than any may be.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _LENGTHS.size:
                header, body = _LENGTHS.unpack_from(self._buffer, at)
                if header > self._header_bytes_max or body > BODY_BYTES_MAX:
                    raise ValueError(f"a frame of {header} and {body} bytes")
                middle = at + _LENGTHS.size + header
                if len(self._buffer) < middle + body:
                    return
                start, at = at + _LENGTHS.size, middle + body
                yield bytes(self._buffer[start:middle]), bytes(self._buffer[middle:at])
        finally:
            del self._buffer[:at]
