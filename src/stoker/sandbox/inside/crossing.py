"""Plain data between judge and solution: JSON with tags, rebuilt from nothing on the far side.

Only ``None``, booleans, numbers, strings, bytes, lists, tuples, dictionaries and sets cross, and
always as exactly those types: a subclass arrives as its base, so no ``__eq__`` of the solution's
ever takes part in a comparison. A message has a length in front and a bound; its nesting too.
"""

import json
import socket
import struct

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
DEPTH_MAX = 64
_LENGTH = struct.Struct(">I")
_EXACT_INTEGER = 1 << 53


class CannotCrossError(TypeError):
    """A value that is no plain data."""


def encode(value: object, depth: int = 0) -> object:  # noqa: PLR0911 - one return per kind
    """Return ``value`` as JSON with tags."""
    if depth > DEPTH_MAX:
        raise CannotCrossError(f"data nested more than {DEPTH_MAX} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _EXACT_INTEGER else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    return _encode_container(value, depth + 1)


def _encode_container(value: object, depth: int) -> object:
    if isinstance(value, list):
        return [encode(item, depth) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": [encode(item, depth) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(k, depth), encode(v, depth)] for k, v in dict.items(value)]}
    if isinstance(value, set):
        return {"s": [encode(item, depth) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"z": [encode(item, depth) for item in frozenset.__iter__(value)]}
    raise CannotCrossError(f"a {type(value).__name__} is not plain data")


def decode(value: object, depth: int = 0) -> object:
    """Rebuild what ``encode`` made; anything else is a ``ValueError``."""
    if depth > 2 * DEPTH_MAX:
        raise ValueError("nested too deep")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        return _decode_tagged(tag, content, depth + 1)
    raise ValueError("not plain data")


def _decode_tagged(tag: str, content: object, depth: int) -> object:
    if tag in ("i", "f", "b") and isinstance(content, str):
        if tag == "i":
            return int(content, 16)
        return float(content) if tag == "f" else bytes.fromhex(content)
    if not isinstance(content, list):
        raise ValueError("not plain data")  # noqa: TRY004 - one error for every malformed message
    if tag == "c":
        real, imaginary = content
        return complex(float(real), float(imaginary))
    if tag == "d":
        return {decode(k, depth): decode(v, depth) for k, v in content}
    kinds = {"t": tuple, "s": set, "z": frozenset}
    if tag not in kinds:
        raise ValueError("an unknown tag")
    return kinds[tag](decode(item, depth) for item in content)


def send(channel: socket.socket, message: dict[str, object]) -> None:
    """Send one message."""
    document = json.dumps(message).encode()
    if len(document) > MESSAGE_BYTES_MAX:
        raise CannotCrossError(f"more than {MESSAGE_BYTES_MAX} bytes of data")
    channel.sendall(_LENGTH.pack(len(document)) + document)


def receive(channel: socket.socket) -> dict[str, object]:
    """Receive one message; ``EOFError`` when the peer is gone, ``ValueError`` when it is broken."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes")
    try:
        message = json.loads(_exactly(channel, length))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("not a message")  # noqa: TRY004 - one error for every malformed message
    return message


def _exactly(channel: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        try:
            data = channel.recv(count - len(received))
        except ConnectionError as error:
            raise EOFError("the peer is gone") from error
        if not data:
            raise EOFError("the peer is gone")
        received += data
    return bytes(received)
