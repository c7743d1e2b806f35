"""Reads the server name from the first message of a TLS connection.

Source: RFC 8446 §4.1.2 (ClientHello), RFC 6066 §3 (server_name). A message may be spread over
several records, and a record over several packets, so the caller gives what it has so far.
"""

BYTES_MAX = 16 * 1024
"""A first message longer than this, records and all, is no honest one."""
_HANDSHAKE = b"\x16\x03"
"""A record of the handshake, of any version of TLS."""
_CLIENT_HELLO = 1
_RECORD_HEADER = 5
_MESSAGE_HEADER = 4
_RECORD_BYTES_MAX = 16_384
_SERVER_NAME = 0
_ENCRYPTED_HELLO = 0xFE0D
_HOST_NAME = 0


class NotTls(Exception):
    """The bytes are no first message of TLS, or hide what they ask for."""


class _Reader:
    """Takes fields off the front of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        end = self._at + count
        if end > len(self._data):
            raise NotTls("the first message ends inside a field")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self, width: int) -> int:
        """Return the next big-endian number of ``width`` bytes."""
        return int.from_bytes(self.take(width), "big")

    def block(self, width: int) -> "_Reader":
        """Return the next field, which begins with its own length in ``width`` bytes."""
        return _Reader(self.take(self.number(width)))

    def rest(self) -> bytes:
        """Return everything that is left."""
        return self.take(len(self._data) - self._at)

    @property
    def empty(self) -> bool:
        """Whether all was taken."""
        return self._at == len(self._data)


def server_name(received: bytes) -> str | None:
    """Return the name the client asks for in lower case, empty where it asks for none.

    Args:
        received: everything the client has sent so far.

    Returns:
        ``None`` when more bytes are needed.

    Raises:
        NotTls: it is something else, malformed, or its true name is encrypted.
    """
    message = _message(received)
    if message is None:
        return None
    hello = _Reader(message)
    hello.take(2 + 32)  # version, random
    hello.block(1)  # session
    hello.block(2)  # cipher suites
    hello.block(1)  # compression
    if hello.empty:
        return ""
    extensions = hello.block(2)
    found: list[str] = []
    while not extensions.empty:
        kind = extensions.number(2)
        content = extensions.block(2)
        if kind == _ENCRYPTED_HELLO:
            raise NotTls("the name asked for is encrypted (ECH)")
        if kind == _SERVER_NAME:
            found += _names(content)
    if len(found) > 1:
        raise NotTls("it asks for several names")
    return found[0] if found else ""


def _message(received: bytes) -> bytes | None:
    """Return the whole handshake message without its header, or ``None`` while it is incomplete."""
    at, joined = 0, bytearray()
    while True:
        header = received[at : at + _RECORD_HEADER]
        if not _HANDSHAKE.startswith(header[:2]):
            raise NotTls("the first bytes are no TLS handshake")
        if len(header) < _RECORD_HEADER:
            return None
        length = int.from_bytes(header[3:], "big")
        if not 0 < length <= _RECORD_BYTES_MAX:
            raise NotTls("a record of an impossible length")
        at += _RECORD_HEADER
        joined += received[at : at + length]
        message = _whole(bytes(joined))
        if message is not None or len(received) < at + length:
            return message
        at += length


def _whole(joined: bytes) -> bytes | None:
    if joined and joined[0] != _CLIENT_HELLO:
        raise NotTls("the first message is no ClientHello")
    wanted = _MESSAGE_HEADER + int.from_bytes(joined[1:_MESSAGE_HEADER], "big")
    if len(joined) < _MESSAGE_HEADER or len(joined) < wanted <= BYTES_MAX:
        return None
    if wanted > BYTES_MAX:
        raise NotTls("the first message is too long")
    return joined[_MESSAGE_HEADER:wanted]


def _names(content: _Reader) -> list[str]:
    entries = content.block(2)
    names = []
    while not entries.empty:
        kind = entries.number(1)
        name = entries.block(2)
        if kind == _HOST_NAME:
            names.append(name.rest().decode("ascii", "replace").lower())
    return names
