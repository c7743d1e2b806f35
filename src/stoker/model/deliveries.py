"""The journal of one partition's deliveries: what a trainer was handed, and what it made of it.

Kept beside the journals of rollouts (design 0013). Order is the meaning: a state of training is a
prefix of these events, and ``Rewound`` makes an earlier prefix hold again.
"""

import msgspec

from stoker.model.ids import GroupId


class HandedOut(msgspec.Struct, frozen=True, kw_only=True, tag="handed_out"):
    """A complete group went to the trainer."""

    group_id: GroupId
    number: int
    """Which hand-out of this group, from 1."""


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """The trainer has used the group, or decided not to; it does not come again."""

    group_id: GroupId
    number: int
    """The hand-out it answers."""


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """Weights of this version were about to be given to the model."""

    version: int


class Rewound(msgspec.Struct, frozen=True, kw_only=True, tag="rewound"):
    """The trainer came back from an older checkpoint."""

    position: int
    """How many events its state covers; those after it no longer hold."""


DeliveryEvent = HandedOut | Committed | Published | Rewound

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DeliveryEvent] = msgspec.msgpack.Decoder(DeliveryEvent)


def encode_delivery(event: DeliveryEvent) -> bytes:
    """Return the stored form of ``event``."""
    return _encoder.encode(event)


def decode_delivery(stored: bytes) -> DeliveryEvent:
    """Return the event stored as ``stored``; ``msgspec.ValidationError`` when it is none."""
    return _decoder.decode(stored)
