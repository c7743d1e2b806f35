"""A guest's frames are hostile: whatever it says, the host is bounded, typed, and never waits."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.model.tools import ExportResult
from stoker.sandbox.guest.wire import (
    BODY_BYTES_MAX,
    DOOR_FIRST,
    HEADER_BYTES_MAX,
    WINDOW_BYTES,
    Frames,
    frame,
)
from stoker.sandbox.vm import link as links
from stoker.sandbox.vm import streams
from stoker.sandbox.vm.link import GuestLink, GuestLost, Order
from support.guests import ENDED

ORDER = Order(
    argv=("true",), environment={}, directory=".", rlimits={}, timeout_seconds=60.0,
    cpu_seconds=1.0, output_bytes=100,
)  # fmt: skip
KINDS = (
    "ready", "adopted", "output", "channel", "connected", "taken", "ended", "written", "content",
    "file", "done", "run", "",
)  # fmt: skip
values = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 9), st.integers(), st.floats(), st.text(max_size=9),
    st.lists(st.integers(), max_size=3),
)  # fmt: skip
NAMES = (*ENDED, "stream", "count", "refused", "name", "size", "kind", "other")


def told(header: dict[str, Any], body: bytes) -> bytes:
    return frame(body=body, **header)


headers = st.builds(
    lambda kind, fields: {**fields, "kind": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
    | st.just(ENDED)
    | st.fixed_dictionaries({"stream": st.integers(0, 4)})
    | st.fixed_dictionaries({"stream": st.integers(0, 4), "count": st.integers(0, 2000)})
    | st.fixed_dictionaries(
        {"name": st.text(max_size=5), "size": st.integers(0, 9), "refused": st.none()}
    ),
)
said = st.lists(
    st.builds(told, headers, st.binary(max_size=120)) | st.binary(max_size=40),
    max_size=12,
).map(b"".join)


def spoken(said: bytes, work: Callable[[GuestLink], Awaitable[object]]) -> object:
    """Let a guest say ``said`` and end, while ``work`` is done with it; return what came of it."""

    async def body() -> object:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        link = GuestLink(ours)
        loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(work(link))
        await asyncio.sleep(0)
        try:
            await loop.sock_sendall(theirs, said)
            theirs.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(20):
                return await working
        except (GuestLost, ConnectionError) as lost:
            working.cancel()
            await asyncio.wait([working])
            return lost
        finally:
            link.close()
            theirs.close()

    return asyncio.run(body())


@settings(max_examples=150, deadline=None)
@given(said)
def test_an_action_ends_or_its_guest_is_lost(said: bytes) -> None:
    got = spoken(said, lambda link: link.run(ORDER, b"x" * 1000))
    if not isinstance(got, Exception):
        assert len(got.stdout) <= ORDER.output_bytes  # type: ignore[attr-defined]
        assert len(got.stderr) <= ORDER.output_bytes  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None)
@given(said)
def test_a_transfer_ends_or_its_guest_is_lost(said: bytes) -> None:
    got = spoken(said, lambda link: link.read("file", bytes_max=10))
    if not isinstance(got, Exception):
        assert len(got.content) <= 10  # type: ignore[attr-defined]


def lost(said: bytes, work: Callable[[GuestLink], Awaitable[object]]) -> str:
    got = spoken(said, work)
    assert isinstance(got, GuestLost), got
    return str(got)


def action(link: GuestLink) -> Awaitable[object]:
    return link.run(ORDER, b"")


LIES = {
    "more output than was asked for": frame("output", bytes(101), stream=1),
    "another count than was sent": frame("ended", **{**ENDED, "stdout": 5}),
    "a stream that is none": frame("output", b"x", stream=7),
    "a channel nobody opened": frame("channel", b"x", stream=3),
    "a connection where there is no door": frame("connected", stream=DOOR_FIRST),
    "input taken that was not sent": frame("taken", stream=0, count=5),
    "a reason that is none": frame("ended", **{**ENDED, "reason": "tired"}),
    "a negative time": frame("ended", **{**ENDED, "cpu_seconds": -1.0}),
    "a field too many": frame("ended", **{**ENDED, "verdict": "passed"}),
    "a file nobody asked for": frame("file", name="x", size=1, refused=None),
    "an order": frame("run", argv=["sh"]),
    "no kind": struct.pack(">II", 2, 0) + b"{}",
    "no JSON": struct.pack(">II", 2, 0) + b"{]",
    "a header beyond all bounds": struct.pack(">II", HEADER_BYTES_MAX + 1, 0),
    "a body beyond all bounds": struct.pack(">II", 2, BODY_BYTES_MAX + 1),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_loses_the_guest(name: str) -> None:
    # What follows it would end the action well, were the lie let pass.
    assert "protocol" in lost(LIES[name] + frame("ended", **ENDED), action)


def test_an_export_that_answers_with_names_alone_loses_the_guest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "WORDS_BYTES_MAX", 1000)
    files = [frame("file", name="n" * 90, size=0, refused="r" * 10) for _ in range(11)]

    def exporting(link: GuestLink) -> Awaitable[object]:
        return link.export((".",), bytes_max=0)

    assert "more names than any walk gives" in lost(b"".join(files), exporting)
    allowed = spoken(b"".join([*files[:10], frame("done")]), exporting)
    assert isinstance(allowed, ExportResult)


def test_silence_is_bounded() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        link = GuestLink(ours)
        with theirs, pytest.raises(GuestLost, match="did not begin"):
            await link.ready(0.01)
        with pytest.raises(GuestLost):
            await link.read("file", bytes_max=1)

    asyncio.run(body())


@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=50)), max_size=8), st.data())
def test_frames_come_as_they_were_sent_however_they_are_cut(
    sent: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    whole = b"".join(frame("x", body, text=text) for text, body in sent)
    frames = Frames(HEADER_BYTES_MAX)
    got = []
    while whole:
        cut = data.draw(st.integers(1, len(whole)))
        got += [(json.loads(h)["text"], body) for h, body in frames.feed(whole[:cut])]
        whole = whole[cut:]
    assert got == sent


def test_a_guest_that_speaks_and_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told that it was heard would be kept for it without end."""
    monkeypatch.setattr(links, "_UNREAD_BYTES_MAX", 64 * 1024)

    def ended() -> int:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours.detach()

    async def body() -> None:
        ours, theirs = socket.socketpair()
        link = GuestLink(ours)
        running = asyncio.ensure_future(link.run(ORDER, b"", connect=ended))
        await asyncio.sleep(0)
        with theirs:
            theirs.sendall(frame("connected", stream=DOOR_FIRST))
            for _ in range(20_000):
                if link.lost:
                    break
                theirs.sendall(frame("channel", b"x", stream=DOOR_FIRST))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            try:
                with pytest.raises(GuestLost, match="does not read"):
                    async with asyncio.timeout(1):
                        await running
            finally:
                link.close()

    asyncio.run(body())


def test_a_full_window_of_which_nothing_was_taken_is_no_end() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        sent: list[bytes] = []
        empty = len(frame("input", stream=DOOR_FIRST))
        relay = streams.Relay(sent.append, DOOR_FIRST, ours.detach())
        with theirs:
            theirs.setblocking(False)
            relay.begin()
            sending = asyncio.ensure_future(
                asyncio.get_running_loop().sock_sendall(theirs, bytes(WINDOW_BYTES + 1))
            )
            async with asyncio.timeout(20):
                while sum(len(one) - empty for one in sent) < WINDOW_BYTES:
                    await asyncio.sleep(0)
            before = len(sent)
            relay.taken(0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(sent) == before, sent[before:]
            relay.close()
            await asyncio.gather(sending, return_exceptions=True)

    asyncio.run(body())
