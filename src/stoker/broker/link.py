"""One connection of a ledger's client: what comes in is heard in the loop turn that reads it.

A protocol and not a stream: an answer that first wakes a reading task, which then wakes its caller,
costs a turn of the loop more, and every step of a rollout waits for several answers.
"""

import asyncio
from collections.abc import Callable

import msgspec

from stoker.broker.envelope import Answer, decode_answer
from stoker.errors import WireViolation
from stoker.wire.frames import FrameDecoder, Hello


class Link(asyncio.Protocol):
    """Calls ``heard`` with every message; ``over`` is done when the connection is."""

    def __init__(self, heard: Callable[[Hello | Answer], None]) -> None:
        self._heard = heard
        self._frames = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[WireViolation | None] = asyncio.get_running_loop().create_future()
        """Its result is what was wrong with the peer's bytes, if that is why."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport), "a stream socket"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hear every message that ``data`` completes."""
        try:
            for document in self._frames.feed(data):
                self._heard(decode_answer(document))
        except (WireViolation, msgspec.MsgspecError) as error:
            self._end(WireViolation(f"the ledger's answer cannot be read: {error}"))

    def connection_lost(self, _error: Exception | None) -> None:
        """Note that nothing more will come."""
        self._end(None)

    def write(self, document: bytes) -> None:
        """Send; what cannot be sent any more is dropped."""
        if self._transport is not None:
            self._transport.write(document)

    def close(self) -> None:
        """Hang up once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, why: WireViolation | None) -> None:
        if self._transport is not None:
            self._transport.abort()
        if not self.over.done():
            self.over.set_result(why)
