"""Puts a credential's value in place of its placeholder, in one header of requests to one host.

For such a destination the proxy ends TLS itself, under a certificate the box was told to trust for
this action, and opens its own to the destination. A connection carries one request, so that each
has a head to be read. The value goes out in the named header alone; coming back it is masked,
wherever it stands, and a response that could hide it (compressed) is not passed on.

Source: RFC 9112 (HTTP/1.1 messages).
"""

import asyncio
import re
import ssl
from typing import NamedTuple

HEAD_BYTES_MAX = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ (?:/[!-~]*|\*) HTTP/1\.1")
"""A target may not name a host: that would count for more than Host, and get the value."""
_HEADER = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[\t\x20-\x7e\x80-\xff]*[!-~\x80-\xff])?)[ \t]*"
)
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")
_DROPPED = frozenset(
    {b"connection", b"keep-alive", b"accept-encoding", b"expect", b"upgrade", b"te"}
)
"""Of requests: what would keep the connection, compress the answer or precede it."""
_PLAIN = {b"content-encoding": b"identity", b"transfer-encoding": b"chunked"}
"""Of responses: the only value that leaves the body as it is."""
_INTERIM = range(100, 200)


class Unfit(Exception):
    """A message that is not passed on; says why."""


class Injection(NamedTuple):
    """One credential of one destination."""

    variable: str
    """Its name, told in decisions."""
    header: bytes
    """In lower case."""
    placeholder: bytes
    value: bytes
    context: ssl.SSLContext
    """Shows the destination's certificate to the box."""


def request_head(head: bytes, host: str, port: int, found: Injection) -> tuple[bytes, bool]:
    """Return the head as it goes out, and whether the value was put in.

    Raises:
        Unfit: it is malformed, or meant for another host.
    """
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if not _REQUEST_LINE.fullmatch(lines[0]):
        raise Unfit("the request's first line is malformed")
    out, put, names = [lines[0]], False, []
    for name, value in map(_header, lines[1:]):
        lower = name.lower()
        names.append(lower)
        if lower == b"host" and value.lower() not in _hosts(host, port):
            raise Unfit("the request's Host is another one")
        if lower in _DROPPED or lower.startswith(b"proxy-"):
            continue
        secret = lower == found.header and found.placeholder in value
        put = put or secret
        told = value.replace(found.placeholder, found.value) if secret else value
        out.append(name + b": " + told)
    if names.count(b"host") != 1:
        raise Unfit("the request has no Host, or several")
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise Unfit("the request's length is said twice")
    return b"\r\n".join([*out, b"Connection: close", b"Accept-Encoding: identity", b"", b""]), put


def _header(line: bytes) -> tuple[bytes, bytes]:
    found = _HEADER.fullmatch(line)
    if found is None:
        raise Unfit("a header of the request is malformed")
    return found[1], found[2]


def _hosts(host: str, port: int) -> tuple[bytes, ...]:
    shown = (f"[{host}]" if ":" in host else host).encode()
    return (shown, b"%s:%d" % (shown, port))


def check_response(head: bytes) -> bool:
    """Return whether this head is the last before the body.

    Raises:
        Unfit: it is malformed, or its body could hide what must not come back.
    """
    first, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise Unfit("the response's first line is malformed")
    for line in headers:
        name, _, value = line.partition(b":")
        plain = _PLAIN.get(name.strip().lower())
        if plain is not None and value.strip().lower() != plain:
            raise Unfit("the response is compressed although that was not agreed to")
    return int(status[1]) not in _INTERIM


class Mask:
    """Hides ``value`` in a stream, keeping its length; holds back what may be its beginning."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._held = b""

    def through(self, data: bytes) -> bytes:
        """Return what may be passed on now."""
        text = (self._held + data).replace(self._value, b"*" * len(self._value))
        keep = next(
            n for n in range(min(len(self._value) - 1, len(text)), -1, -1)
            if self._value.startswith(text[len(text) - n :])
        )  # fmt: skip
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held


async def read_head(reader: asyncio.StreamReader, whose: str) -> bytes:
    """Return a message's head with its empty line.

    Raises:
        Unfit: it ends early or is too long.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        raise Unfit(f"the {whose} ended before its head was whole") from None
    except asyncio.LimitOverrunError:
        raise Unfit(f"the {whose}'s head is too long") from None
    if len(head) > HEAD_BYTES_MAX:
        raise Unfit(f"the {whose}'s head is too long")
    return head
