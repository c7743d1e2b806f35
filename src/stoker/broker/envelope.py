"""What travels in the ledger's frames: hello, then calls one way and answers the other.

A connection-level failure (not our protocol, a foreign version) is an ``Answer`` to call 0, and the
connection is closed.
"""

import msgspec

from stoker.broker.base import Request
from stoker.broker.service import Reply
from stoker.model.faults import FaultRecord
from stoker.wire.frames import Hello

CONNECTION = 0
"""Call id of answers that concern the whole connection."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """One request."""

    call_id: int
    """From 1, rising on a connection."""
    request: Request
    resent: bool = False
    """An earlier connection broke before this call was answered."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody waits for this call any more."""

    call_id: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """One reply, or the fault instead of it."""

    call_id: int
    reply: Reply | None = None
    fault: FaultRecord | None = None


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_incoming = msgspec.msgpack.Decoder(Call | Forget).decode
decode_answer = msgspec.msgpack.Decoder(Hello | Answer).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
