"""Carries TLS connections of one box to the destinations its policy names, and nothing else.

A client says ``CONNECT host:port``; the pair must be listed. The name is resolved once, the address
judged (``addresses``) and that address connected to. The client's first message must be a TLS
ClientHello for the same name (``hello``); only then is a byte of it sent on. Every decision is
told.

What it does not do: look inside TLS, save for a destination that gets a credential (``inject``).
Whoever serves several names at one listed address may be asked for another of them inside.
"""

import asyncio
import contextlib
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from stoker.sandbox.egress.addresses import refusal
from stoker.sandbox.egress.hello import BYTES_MAX, NotTls, server_name
from stoker.sandbox.egress.inject import (
    Injection,
    Mask,
    Unfit,
    check_response,
    read_head,
    request_head,
)

_CONNECT = re.compile(
    rb"CONNECT ([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5}) HTTP/1\.[01]\r\n"
)
_HEAD_BYTES_MAX = 8 * 1024
_PATIENCE_SECONDS = 15.0
"""For the client's request, the look-up, the connection and the first message each."""
_CONNECTIONS_MAX = 64
"""Of one box at once."""
_DECISIONS_MAX = 1000
"""Told of one gate; later ones are counted."""
_CHUNK_BYTES = 64 * 1024
_ADDRESSES_MAX = 4
_PIECES_MAX = 64
"""Reads of the first message, each of which looks at all of it again."""
_T = TypeVar("_T")


class Rule(NamedTuple):
    """One destination a policy names."""

    host: str
    port: int
    private: bool


class Decision(NamedTuple):
    """What became of one request."""

    allowed: bool
    host: str
    port: int
    address: str
    why: str
    """Why it was refused or failed; empty where it was carried."""
    credential: str = ""
    """Variable of the credential that was put in place, if one was."""


class _Client:
    """One connection from the box, and how far it came."""

    def __init__(self, ends: "_Ends") -> None:
        self.ends = ends
        self.outside: asyncio.StreamWriter | None = None
        self.host = self.address = ""
        self.port = 0
        self.hears_words = True
        """An answer in HTTP would be understood."""

    def writers(self) -> list[asyncio.StreamWriter]:
        """Return the ends there are."""
        return [self.ends[1], *([self.outside] if self.outside else [])]


class _Refused(Exception):
    """A request that is not carried; says why."""

    def __init__(self, why: str, status: str = "403 Forbidden") -> None:
        super().__init__(why)
        self.status = status


Resolve = Callable[[str, int], Awaitable[list[str]]]
_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[_Ends]]
"""Of an address and a port, and for TLS of ours what ``asyncio.open_connection`` takes."""


class Gate:
    """The connections of one action of one box."""

    def __init__(
        self,
        rules: tuple[Rule, ...],
        tell: Callable[[Decision], None],
        *,
        injections: Mapping[tuple[str, int], Injection] | None = None,
        trust: ssl.SSLContext | None = None,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.sent_bytes = 0
        """Carried out of the box."""
        self.received_bytes = 0
        """Carried into it."""
        self.refused = 0
        """Requests that were not carried."""
        self._rules = {(rule.host, rule.port): rule for rule in rules}
        self._tell = tell
        self._injections = injections or {}
        self._trust = trust
        self._told = 0
        self._resolve = resolve or _resolved
        self._connect = connect or asyncio.open_connection
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client from now on."""
        if len(self._open) >= _CONNECTIONS_MAX:
            self._decide(Decision(False, "", 0, "", f"more than {_CONNECTIONS_MAX} connections"))
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """End every connection."""
        open_ = list(self._open)
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)

    def _decide(self, decision: Decision) -> None:
        self.refused += not decision.allowed
        self._told += 1
        if self._told <= _DECISIONS_MAX:
            self._tell(decision)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client((reader, writer))
        try:
            await self._answered(client)
            for end in client.writers():
                end.close()
            for end in client.writers():
                with contextlib.suppress(OSError):
                    await end.wait_closed()
        finally:
            for end in client.writers():
                # What a peer has not taken by the end of the gate is not to follow it.
                end.transport.abort()

    async def _answered(self, client: "_Client") -> None:
        writer = client.ends[1]
        try:
            await self._served(client)
        except _Refused as refused:
            told = Decision(False, client.host, client.port, client.address, str(refused))
            self._decide(told)
            if client.hears_words:
                with contextlib.suppress(OSError):
                    writer.write(_answer(refused))
                    await writer.drain()
        except OSError:
            pass  # one side went away; what was carried is counted

    async def _served(self, client: "_Client") -> None:
        reader, writer = client.ends
        host, port = client.host, client.port = await _patiently(_request(reader), "its request")
        injection = self._injections.get((host, port))
        outside, client.address = await self._reach(
            self._listed(host, port), encrypted=injection is not None
        )
        client.outside = outside[1]
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        client.hears_words = False  # it expects TLS
        if injection is not None:
            await self._inject(client, outside, injection)
            return
        first = await _patiently(_first_message(reader, host), "the first message of TLS")
        self._decide(Decision(True, host, port, client.address, ""))
        await self._carry(client.ends, outside, first)

    async def _inject(self, client: "_Client", outside: _Ends, found: Injection) -> None:
        reader, writer = client.ends
        host, port = client.host, client.port
        try:
            await _patiently(writer.start_tls(found.context), "TLS with the box")
            client.hears_words = True
            head = await _patiently(read_head(reader, "request"), "the request")
            first, put = request_head(head, host, port, found)
        except Unfit as unfit:
            raise _Refused(str(unfit)) from None
        except ssl.SSLError as error:
            raise _Refused(f"TLS failed ({error.reason or error})") from None
        used = found.variable if put else ""
        self._decide(Decision(True, host, port, client.address, "", used))
        outside[1].write(first)
        self.sent_bytes += len(first)
        sending = asyncio.ensure_future(self._pump(reader, outside[1], outward=True))
        try:
            await self._masked(outside[0], writer, Mask(found.value))
        except Unfit as unfit:
            raise _Refused(str(unfit), "502 Bad Gateway") from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _masked(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, mask: Mask
    ) -> None:
        last = False
        while not last:
            data = await read_head(source, "response")
            last = check_response(data)
            self.received_bytes += len(data)
            if last:
                sink.write(mask.through(data))
        while data := await source.read(_CHUNK_BYTES):
            self.received_bytes += len(data)
            sink.write(mask.through(data))
            await sink.drain()
        sink.write(mask.rest())
        await sink.drain()

    def _listed(self, host: str, port: int) -> Rule:
        rule = self._rules.get((host, port))
        if rule is None:
            raise _Refused(f"{host}:{port} is not among the policy's destinations")
        return rule

    async def _reach(self, rule: Rule, *, encrypted: bool) -> tuple[_Ends, str]:
        """Connect; ``encrypted``: by TLS of ours, from the first byte that is read."""
        try:
            found = await _patiently(self._resolve(rule.host, rule.port), "the name's address")
        except OSError as error:
            raise _Refused(f"{rule.host} cannot be resolved ({error})", "502 Bad Gateway") from None
        judged = [(address, refusal(address, private=rule.private)) for address in found]
        allowed = [address for address, why in judged if not why]
        if not allowed:
            told = (
                "; ".join(f"{address} is {why}" for address, why in judged) or "it has no address"
            )
            raise _Refused(f"{rule.host}: {told}")
        how: dict[str, Any] = {}
        if encrypted:
            self._trust = self._trust or ssl.create_default_context()  # takes tens of milliseconds
            how = {"ssl": self._trust, "server_hostname": rule.host}
        why = ""
        for address in allowed[:_ADDRESSES_MAX]:
            try:
                ends = await _patiently(self._connect(address, rule.port, **how), "the connection")
            except ssl.SSLError as error:
                why = f" (TLS failed: {error.reason or error})"
            except (OSError, _Refused):
                continue
            else:
                return ends, address
        raise _Refused(f"{rule.host}:{rule.port} cannot be reached{why}", "502 Bad Gateway")

    async def _carry(
        self,
        inside: _Ends,
        outside: _Ends,
        first: bytes,
    ) -> None:
        outside[1].write(first)
        self.sent_bytes += len(first)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pump(inside[0], outside[1], outward=True))
            both.create_task(self._pump(outside[0], inside[1], outward=False))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, outward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                if outward:
                    self.sent_bytes += len(data)
                else:
                    self.received_bytes += len(data)
                sink.write(data)
                await sink.drain()
        with contextlib.suppress(OSError):
            if sink.can_write_eof():
                sink.write_eof()


async def _patiently(work: Awaitable[_T], what: str) -> _T:
    try:
        return await asyncio.wait_for(work, _PATIENCE_SECONDS)
    except TimeoutError:
        raise _Refused(
            f"waited {_PATIENCE_SECONDS:g} s for {what}", "504 Gateway Timeout"
        ) from None


async def _request(reader: asyncio.StreamReader) -> tuple[str, int]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused("the request is too long", "431 Request Header Fields Too Large") from None
    except asyncio.IncompleteReadError:
        raise _Refused("the client left before its request was whole") from None
    if len(head) > _HEAD_BYTES_MAX:
        raise _Refused("the request is too long", "431 Request Header Fields Too Large")
    found = _CONNECT.match(head)
    if found is None:
        line = head.split(b"\r\n", 1)[0][:100].decode("ascii", "replace")
        raise _Refused(
            f"only TLS through CONNECT is carried, not {line!r}; use https",
            "405 Method Not Allowed",
        )
    host = found[1].decode().strip("[]").lower().removesuffix(".")
    return host, int(found[2])


async def _first_message(reader: asyncio.StreamReader, host: str) -> bytes:
    received = bytearray()
    for _ in range(_PIECES_MAX):
        data = await reader.read(_CHUNK_BYTES)
        if not data:
            raise _Refused("the client left before TLS began")
        received += data
        try:
            name = server_name(bytes(received))
        except NotTls as error:
            raise _Refused(str(error)) from None
        if name is None and len(received) > BYTES_MAX:
            raise _Refused("the first message is too long")
        if name is not None:
            break
    else:
        raise _Refused("the first message comes in too many pieces")
    if name != host and not (name == "" and _numeric(host)):
        raise _Refused(f"TLS asks for {name[:253]!r}, the request named {host!r}")
    return bytes(received)


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _answer(refused: _Refused) -> bytes:
    text = f"stoker: {refused}\n".encode()
    head = (
        f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


async def _resolved(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=1)  # streams
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
