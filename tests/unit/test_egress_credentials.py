"""A credential's value goes out in one header and does not come back."""

import datetime as dt
import ssl
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BoxFailed
from stoker.model.execution import Credential
from stoker.sandbox.egress.authority import Authority
from stoker.sandbox.egress.gate import _value
from stoker.sandbox.egress.inject import Injection, Mask, Unfit, check_response, request_head

FOUND = Injection(
    "TOKEN",
    b"authorization",
    b"stoker-placeholder",
    b"the-real-value",
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
)
HEAD = b"GET /v1 HTTP/1.1\r\nHost: api.example\r\n"


def sent(*headers: bytes, head: bytes = HEAD) -> tuple[bytes, bool]:
    whole = head + b"".join(header + b"\r\n" for header in headers) + b"\r\n"
    return request_head(whole, "api.example", 443, FOUND)


def test_the_value_goes_out_in_the_named_header_only() -> None:
    head, put = sent(b"aUTHorization:  Bearer stoker-placeholder ", b"X-Other: stoker-placeholder")
    assert put
    assert b"aUTHorization: Bearer the-real-value\r\n" in head
    assert b"X-Other: stoker-placeholder\r\n" in head
    assert head.count(b"the-real-value") == 1
    assert not sent(b"Cookie: stoker-placeholder")[1]


def test_what_would_keep_the_connection_or_hide_the_answer_is_left_out() -> None:
    head, _ = sent(b"Connection: keep-alive", b"Accept-Encoding: gzip", b"Expect: 100-continue",
                   b"Upgrade: websocket", b"Proxy-Authorization: x")  # fmt: skip
    assert head == HEAD + b"Connection: close\r\nAccept-Encoding: identity\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        (b"GET /v1 HTTP/1.1\r\nHost: evil.example\r\n", ()),
        (b"GET /v1 HTTP/1.1\r\n", ()),
        (HEAD, (b"Host: api.example",)),
        (HEAD, (b"Content-Length: 3", b"Transfer-Encoding: chunked")),
        (HEAD, (b"Content-Length: 3", b"Content-Length: 4")),
        (HEAD, (b"X: a\nAuthorization: b",)),
        (HEAD, (b" folded: line",)),
        (HEAD, (b"Authorization : stoker-placeholder",)),
        (HEAD, (b"nameless",)),
        (b"GET /v1\r\nHost: api.example\r\n", ()),
        (b"GET /v1 HTTP/1.0\r\nHost: api.example\r\n", ()),
        (b"GET  /v1 HTTP/1.1\r\nHost: api.example\r\n", ()),
        # A target with a host of its own counts for more than Host does (RFC 9112, 3.2.2).
        (b"GET https://evil.example/v1 HTTP/1.1\r\nHost: api.example\r\n", ()),
        (b"GET https://api.example/v1 HTTP/1.1\r\nHost: api.example\r\n", ()),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: api.example\r\n", ()),
        (b"GET @evil.example/ HTTP/1.1\r\nHost: api.example\r\n", ()),
    ],
)
def test_a_request_that_could_be_read_two_ways_is_not_sent(
    head: bytes, headers: tuple[bytes, ...]
) -> None:
    with pytest.raises(Unfit):
        sent(*headers, head=head)


def test_a_response_that_could_hide_the_value_is_not_passed_on() -> None:
    assert check_response(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\n\r\n")
    assert not check_response(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    assert check_response(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for head in (
        b"HTTP/1.1 200 OK\r\ncontent-ENCODING : gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"nonsense\r\n\r\n",
    ):
        with pytest.raises(Unfit):
            check_response(head)


@given(
    st.lists(st.sampled_from([b"abcabd", b"abcab", b"abc", b"ab", b"d", b"x"]), max_size=30),
    st.sampled_from([b"abcabd", b"aab", b"ababab"]),
)
def test_the_value_is_masked_however_it_is_cut(parts: list[bytes], value: bytes) -> None:
    mask = Mask(value)
    out = b"".join(map(mask.through, parts)) + mask.rest()
    assert out == b"".join(parts).replace(value, b"*" * len(value))


def test_only_what_may_begin_the_value_is_held_back() -> None:
    mask = Mask(b"secret-value")
    assert mask.through(b"data: hello\n\n") == b"data: hello\n\n"
    assert mask.through(b"a sec") == b"a "
    assert mask.through(b"ond") == b"second"


def test_an_authority_vouches_for_its_hosts_only() -> None:
    authority = Authority(dt.datetime.now(dt.UTC))
    for host, name, works in (
        ("api.example", "api.example", True),
        ("api.example", "evil.example", False),
        ("93.184.216.34", "93.184.216.34", True),
    ):
        assert _shakes_hands(authority, host, name) is works


def _shakes_hands(authority: Authority, host: str, name: str) -> bool:
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(authority.issue(host))
        file.flush()
        server_context.load_cert_chain(file.name)
    client_context = ssl.create_default_context(cadata=authority.certificate.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname=name)
    server = server_context.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return client.version() is not None


@pytest.mark.parametrize(
    "content",
    ["", "short", "two words of it", "one line\nand another", "ünicode-value", "x" * 9000],
)
def test_a_value_that_cannot_be_a_header_is_refused_without_being_told(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    credential = Credential(variable="TOKEN", host="api.example", file=str(file))
    with pytest.raises(BoxFailed) as caught:
        _value(credential)
    assert "TOKEN" in caught.value.message
    assert not content or content not in caught.value.message


def test_a_value_may_end_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-real-value\n")
    credential = Credential(variable="T", host="h", file=str(tmp_path / "token"))
    assert _value(credential) == "the-real-value"
