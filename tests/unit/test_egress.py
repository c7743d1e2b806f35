"""The egress proxy: what is carried, and everything that is not."""

import asyncio
import contextlib
import datetime as dt
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sandbox.egress.addresses import refusal
from stoker.sandbox.egress.authority import Authority
from stoker.sandbox.egress.hello import NotTls, server_name
from stoker.sandbox.egress.main import _injection
from stoker.sandbox.egress.proxy import Decision, Gate, Rule, _first_message, _Refused

PUBLIC = "93.184.216.34"


def hello(name: str | None) -> bytes:
    """The first message of a real TLS client that asks for ``name``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = name is not None
    if name is None:
        context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def in_records(message: bytes, size: int) -> bytes:
    """The same message spread over records of ``size`` bytes."""
    body = message[5:]
    cut = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in cut)


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.10", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1",
        "169.254.169.254", "169.254.1.1", "fe80::1", "fe80::1%eth0", "168.63.129.16",
        "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "::ffff:169.254.169.254",
        "224.0.0.1", "ff02::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:1:2:3:4:5:6",
        "::127.0.0.1", "255.255.255.255", "100.64.0.1", "240.0.0.1",
    ],
)  # fmt: skip
def test_no_policy_reaches_the_host_its_links_or_metadata(address: str) -> None:
    assert refusal(address, private=False)
    assert refusal(address, private=True)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "172.16.3.4", "192.168.1.1", "fd12::1", "fec0::2", "::ffff:10.0.0.1"]
)
def test_private_addresses_are_reached_only_where_that_was_said(address: str) -> None:
    assert refusal(address, private=False) == "a private address"
    assert not refusal(address, private=True)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_reached(address: str) -> None:
    assert not refusal(address, private=False)


# --- the first message of TLS ----------------------------------------------------------------


def test_the_name_is_read_whatever_the_packets_and_records() -> None:
    whole = hello("PyPI.org")
    assert server_name(whole) == "pypi.org"
    assert all(server_name(whole[:end]) is None for end in range(len(whole)))
    for size in (1, 7, 100):
        assert server_name(in_records(whole, size)) == "pypi.org"
        assert server_name(in_records(whole, size)[:-1]) is None
    assert server_name(hello(None)) == ""


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"\x16\x02\x00", b"\x16\x03\x01\x00\x00",
             b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
             b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"],
)  # fmt: skip
def test_what_is_not_tls_is_refused(data: bytes) -> None:
    with pytest.raises(NotTls):
        server_name(data)


def test_a_first_message_in_crumbs_is_given_up() -> None:
    crumbs = in_records(hello("pypi.org") * 200, 1)
    fed = 0

    class Reader(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            nonlocal fed
            del n
            fed += 1
            return crumbs[fed - 1 : fed]

    async def work() -> None:
        with pytest.raises(_Refused, match="pieces"):
            await _first_message(Reader(), "pypi.org")

    asyncio.run(work())
    assert fed <= 100
    with pytest.raises(NotTls, match="too long"):
        server_name(b"\x16\x03\x01\x40\x00\x01\x00\x40\x01")


def test_a_hidden_name_is_refused() -> None:
    whole = hello("pypi.org")
    message = whole[5:]
    at = message.index(b"pypi.org") - 9  # the server_name extension
    cut = message[:at] + b"\xfe\x0d" + message[at + 2 :]
    with pytest.raises(NotTls, match="encrypted"):
        server_name(whole[:5] + cut)


@given(st.binary(max_size=300), st.integers(0, 400), st.binary(max_size=5))
def test_hostile_bytes_never_break_the_reader(noise: bytes, at: int, patch: bytes) -> None:
    whole = hello("pypi.org")
    broken = whole[:at] + patch + whole[at + len(patch) :]
    for data in (noise, broken, b"\x16\x03\x01" + noise):
        with contextlib.suppress(NotTls):
            assert server_name(data) is None or isinstance(server_name(data), str)


# --- the proxy -------------------------------------------------------------------------------


class Rig:
    """A gate behind a loopback socket; names resolve as told, addresses lead to ``server``."""

    def __init__(self, *rules: Rule, found: list[str] | None = None) -> None:
        self.decisions: list[Decision] = []
        self.found = [PUBLIC] if found is None else found
        self.lookups = 0
        self.connected: list[tuple[str, int]] = []
        self.outside: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.served = bytearray()
        self.gate = Gate(rules, self.decisions.append, resolve=self._resolve, connect=self._connect)
        self.port = self._outside = 0

    async def _resolve(self, host: str, port: int) -> list[str]:
        del host, port
        self.lookups += 1
        return self.found

    async def _connect(
        self, address: str, port: int, **how: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append((address, port))
        self.outside.append(await asyncio.open_connection("127.0.0.1", self._outside, **how))
        return self.outside[-1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.served += data
        writer.write(b"goodbye")
        writer.close()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        outside = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        inside = await asyncio.start_server(self.gate.accept, "127.0.0.1", 0, limit=65536)
        self._outside = outside.sockets[0].getsockname()[1]
        self.port = inside.sockets[0].getsockname()[1]
        async with outside, inside:
            yield
            await self.gate.close()

    async def ask(self, request: bytes, *then: bytes) -> bytes:
        """Send a request, ``then`` what follows its answer; return everything that came back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        got = b""
        if then:
            got = await reader.readuntil(b"\r\n\r\n")
            for part in then:
                writer.write(part)
                await writer.drain()
        writer.write_eof()
        got += await reader.read()
        writer.close()
        return got


def run(rig: Rig, work: Callable[[], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with rig.open():
            await asyncio.wait_for(work(), 60)

    asyncio.run(inside())


PYPI = Rule("pypi.org", 443, private=False)
CONNECT = b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org\r\n\r\n"


def test_a_listed_destination_is_carried_both_ways_and_counted() -> None:
    rig = Rig(PYPI)
    first = hello("pypi.org")

    async def work() -> None:
        got = await rig.ask(CONNECT, first[:9], first[9:], b"more")
        assert got.startswith(b"HTTP/1.1 200")
        assert got.endswith(b"goodbye")

    run(rig, work)
    assert bytes(rig.served) == first + b"more"
    assert rig.connected == [(PUBLIC, 443)]
    assert rig.lookups == 1
    assert rig.decisions == [Decision(True, "pypi.org", 443, PUBLIC, "")]
    assert (rig.gate.sent_bytes, rig.gate.received_bytes) == (len(first) + 4, 7)
    assert rig.gate.refused == 0


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        (b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n", b"403", "not among"),
        (b"CONNECT pypi.org:80 HTTP/1.1\r\n\r\n", b"403", "not among"),
        (b"CONNECT pypi.org.evil.example:443 HTTP/1.1\r\n\r\n", b"403", "not among"),
        (b"CONNECT 93.184.216.34:443 HTTP/1.1\r\n\r\n", b"403", "not among"),
        (b"GET http://pypi.org/ HTTP/1.1\r\nHost: pypi.org\r\n\r\n", b"405", "only TLS"),
        (b"CONNECT pypi.org:443 HTTP/1.1 x\r\n\r\n", b"405", "only TLS"),
        (b"CONNECT pypi.org\x00.evil.example:443 HTTP/1.1\r\n\r\n", b"405", "only TLS"),
        (b"CONNECT pypi.org:443 HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b"431", "too long"),
        (b"x" * 200_000, b"431", "too long"),
    ],
)
def test_everything_else_is_refused_before_a_packet_leaves(
    request_: bytes, status: bytes, why: str
) -> None:
    rig = Rig(PYPI)

    async def work() -> None:
        with contextlib.suppress(ConnectionError):
            got = await rig.ask(request_)
            assert got.startswith(b"HTTP/1.1 " + status) or not got

    run(rig, work)
    assert not rig.connected
    assert not rig.served
    assert [d.allowed for d in rig.decisions] == [False]
    assert why in rig.decisions[0].why
    assert rig.gate.refused == 1


@pytest.mark.parametrize("name", ["evil.example", "www.pypi.org", "pypi.org.evil.example", None])
def test_tls_for_another_name_is_not_carried(name: str | None) -> None:
    rig = Rig(PYPI)

    async def work() -> None:
        got = await rig.ask(CONNECT, hello(name))
        assert got.count(b"HTTP/1.1") == 1
        assert b"goodbye" not in got

    run(rig, work)
    assert not rig.served, "not a byte of it may be sent on"
    assert [d.allowed for d in rig.decisions] == [False]


def test_plain_text_after_connect_is_not_carried() -> None:
    rig = Rig(PYPI)

    async def work() -> None:
        await rig.ask(CONNECT, b"GET / HTTP/1.1\r\n\r\n")

    run(rig, work)
    assert not rig.served
    assert "no TLS" in rig.decisions[0].why


@pytest.mark.parametrize(
    ("rule", "found", "connected"),
    [
        (PYPI, ["10.1.2.3"], []),
        (PYPI, ["127.0.0.1", "169.254.169.254"], []),
        (PYPI, ["10.1.2.3", PUBLIC], [(PUBLIC, 443)]),
        (Rule("pypi.org", 443, private=True), ["10.1.2.3"], [("10.1.2.3", 443)]),
        (Rule("pypi.org", 443, private=True), ["169.254.169.254"], []),
        (PYPI, [], []),
    ],
)
def test_a_name_that_leads_inwards_is_not_followed(
    rule: Rule, found: list[str], connected: list[tuple[str, int]]
) -> None:
    rig = Rig(rule, found=found)

    async def work() -> None:
        got = await rig.ask(CONNECT, *([hello("pypi.org")] if connected else []))
        assert got.startswith(b"HTTP/1.1 200" if connected else b"HTTP/1.1 403")

    run(rig, work)
    assert rig.connected == connected
    assert rig.lookups == 1


def test_a_numeric_destination_needs_no_name() -> None:
    rig = Rig(Rule(PUBLIC, 443, private=False))

    async def work() -> None:
        got = await rig.ask(f"CONNECT {PUBLIC}:443 HTTP/1.1\r\n\r\n".encode(), hello(None))
        assert got.endswith(b"goodbye")

    run(rig, work)
    assert rig.decisions[0].allowed


def test_a_closed_gate_lets_go_of_a_destination_that_does_not_read() -> None:
    rig = Rig(PYPI)
    came = asyncio.Event()
    closed, over = asyncio.Event(), asyncio.Event()

    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        came.set()
        await closed.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        over.set()

    rig._serve = never_reads  # type: ignore[method-assign]

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(CONNECT)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(hello("pypi.org") + b"x" * (32 << 20))
        await came.wait()
        outside = rig.outside[0][1].transport
        while not outside.get_write_buffer_size():
            await asyncio.sleep(0.01)
        await rig.gate.close()
        assert outside.get_write_buffer_size() == 0, "nothing may follow a closed gate"
        closed.set()
        await over.wait()
        writer.transport.abort()

    run(rig, work)


def test_nothing_that_came_before_tls_is_taken_for_an_answer_of_the_destination() -> None:
    authority = Authority(dt.datetime.now(dt.UTC))
    certificate = authority.issue("pypi.org").decode()
    told = {"host": "pypi.org", "variable": "TOKEN", "header": "Authorization",
            "placeholder": "stoker-placeholder", "value": "the-real-value",
            "certificate": certificate}  # fmt: skip
    trust = ssl.create_default_context(cadata=authority.certificate.decode())
    found = _injection(told)
    rig = Rig(PYPI)
    rig.gate = Gate(
        (PYPI,), rig.decisions.append, injections={("pypi.org", 443): found}, trust=trust,
        resolve=rig._resolve, connect=rig._connect,
    )  # fmt: skip
    spoils = True

    async def outside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if spoils:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nforged on the way")
        with contextlib.suppress(OSError):
            await writer.start_tls(found.context)
            rig.served += await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\ntrue")
        writer.close()

    rig._serve = outside  # type: ignore[method-assign]

    async def asked() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(CONNECT)
        got = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " in got:
            await writer.start_tls(trust, server_hostname="pypi.org")
            writer.write(b"GET / HTTP/1.1\r\nHost: pypi.org\r\n"
                         b"Authorization: stoker-placeholder\r\n\r\n")  # fmt: skip
            got = await reader.read()
        writer.close()
        return got

    async def work() -> None:
        nonlocal spoils
        forged = await asked()
        assert b"forged" not in forged
        assert b" 502 " in forged
        spoils = False
        assert (await asked()).endswith(b"true")

    run(rig, work)
    assert b"the-real-value" in rig.served


def test_a_flood_of_connections_is_bounded_and_told_in_bounds() -> None:
    rig = Rig(PYPI)

    async def work() -> None:
        held = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(64)]
        late, last = await asyncio.open_connection("127.0.0.1", rig.port)
        with contextlib.suppress(ConnectionError):
            assert await late.read() == b""
        for _, writer in [*held, (late, last)]:
            writer.close()

    run(rig, work)
    assert "more than 64" in rig.decisions[0].why
