"""One framed connection on asyncio: typed messages out, typed messages in.

Used between coordinator and program hosts, and by the ledger's clients. A channel validates every
incoming message against the union it was given; the first invalid one closes it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from stoker.errors import WireViolation
from stoker.wire.frames import FrameDecoder, frame

In = TypeVar("In")

_READ_BYTES = 256 * 1024
_encoder = msgspec.msgpack.Encoder()


class Channel(Generic[In]):
    """A connection that receives messages of one type (usually a tagged union)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: Any,  # noqa: ANN401 - a type form
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._frames = FrameDecoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue ``message``; never blocks. Order is kept. A closed peer is noticed by receiving."""
        if not self._writer.is_closing():
            self._writer.write(frame(_encoder.encode(message)))

    async def drain(self) -> None:
        """Wait until the peer has taken enough of what was queued."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[In]:
        """Yield messages until the peer closes.

        Raises:
            WireViolation: the peer sent something that is not of this protocol.
        """
        while data := await self._read():
            for document in self._frames.feed(data):
                try:
                    yield self._decoder.decode(document)
                except msgspec.MsgspecError as error:
                    raise WireViolation(f"not a message of this protocol: {error}") from error

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Close both directions; safe to call twice."""
        self._writer.close()
