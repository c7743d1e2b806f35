"""Guests that lie about their state, hang or never end it (CASES A3, A7, A14).

There is no guest: its end of the link is written here, so that each lie is told exactly. Each
attack is first shown to get what it wants where its defence is off.
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from stoker.model.value import content_digest
from stoker.sandbox import entries, unpacking
from stoker.sandbox.entries import Bounds, Forged
from stoker.sandbox.guest.wire import (
    BODY_BYTES_MAX,
    ORDER_BYTES_MAX,
    WINDOW_BYTES,
    Frames,
    frame,
)
from stoker.sandbox.placing import EndsEarly, Reader, TooMuch
from stoker.sandbox.states import Packed
from stoker.sandbox.vm import keeping, link
from stoker.sandbox.vm.link import GuestLink, GuestLost
from support import sandbox
from support.guests import BOUNDS, SMALL, filled, of_host
from support.states import (
    FORGED,
    crafted,
    entry,
    names_in,
)

NOT_YET_SECONDS = 0.3
"""How long something that hangs is watched hanging."""


class Liar:
    """The other end of a link; what it sends stays within the window, so that only lies count."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._room = WINDOW_BYTES
        self._taken = threading.Condition()

    def say(self, content: bytes) -> None:
        """Send frames that are not of the state."""
        self.end.sendall(content)

    def give(self, content: bytes) -> None:
        """Send so much of the state; none: its end."""
        for at in range(0, max(1, len(content)), BODY_BYTES_MAX):
            piece = content[at : at + BODY_BYTES_MAX]
            with self._taken:
                if not self._taken.wait_for(lambda: self._room >= len(piece), sandbox.PATIENCE):  # noqa: B023 - waited for here
                    raise OSError("it is not taken")
                self._room -= len(piece)
            self.say(frame("channel", piece, stream=3))

    def serve(self, answer: "Says") -> None:
        """Hear orders until the link ends."""
        orders = Frames(ORDER_BYTES_MAX)
        with contextlib.suppress(OSError):
            self.say(frame("ready"))
            while data := self.end.recv(1 << 16):
                for header, _ in orders.feed(data):
                    self._hear(json.loads(header), answer)
        with self._taken:
            self._room = 1 << 62  # whoever waits to send hears that nobody listens
            self._taken.notify_all()

    def _hear(self, order: dict[str, object], answer: "Says") -> None:
        if order["kind"] == "carry":
            threading.Thread(target=self._answer, args=(answer,), daemon=True).start()
        if order["kind"] == "taken":
            with self._taken:
                self._room += int(str(order["count"]))
                self._taken.notify_all()

    def _answer(self, answer: "Says") -> None:
        with contextlib.suppress(OSError):
            answer(self)


Says = Callable[[Liar], None]


def ended(told: bytes = b"", *, status: int = 0) -> bytes:
    """Return the end of an action that said ``told``."""
    said = frame("output", told, stream=1) if told else b""
    return said + frame(
        "ended", status=status, stdout=len(told), stderr=0, reason="", stopped=False,
        cpu_seconds=0.0, memory_peak_bytes=0, error="", errno=0,
    )  # fmt: skip


def told_of(content: bytes) -> bytes:
    """Return what an honest runner tells of what it gave."""
    return json.dumps({"size_bytes": len(content), "left_out": []}).encode()


def lies(content: bytes, told: bytes | None = None) -> Says:
    """Answer with ``content`` and an end, as if all were well."""

    def say(liar: Liar) -> None:
        liar.give(content)
        liar.give(b"")
        liar.say(ended(told_of(content) if told is None else told))

    return say


def grows(liar: Liar) -> None:
    """Never stop sending one file."""
    endless = entry("file", b"x", size_bytes=1 << 60, extents=((0, 1 << 60),))
    liar.give(crafted(endless))
    while True:
        liar.give(bytes(BODY_BYTES_MAX))


def hangs(liar: Liar) -> None:
    """Begin to send, and say no more."""
    liar.give(entries.MAGIC)


@contextlib.asynccontextmanager
async def hostile(say: Says) -> AsyncIterator[GuestLink]:
    """Give the link to a guest that answers the order for its state with what ``say`` says."""
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=Liar(theirs).serve, args=(say,), daemon=True)
    serving.start()
    lying = GuestLink(ours)
    try:
        await lying.ready(sandbox.PATIENCE)
        yield lying
    finally:
        lying.close()
        await asyncio.to_thread(serving.join, sandbox.PATIENCE)
        theirs.close()


def given_by(say: Says, into: BytesIO) -> Packed:
    """Take the state of a hostile guest."""

    async def body() -> Packed:
        async with hostile(say) as lying:
            try:
                return await keeping.packed(lying, SMALL, into)
            finally:
                assert lying.lost is None or "broke the protocol" in str(lying.lost)

    return sandbox.run(body)


def test_an_honest_answer_is_taken_so_what_is_refused_is_refused_for_its_lie() -> None:
    honest = crafted(entry("directory", b"d"), entry("link", b"d", b"l", target=b"x"))
    into = BytesIO()
    assert given_by(lies(honest), into).digest == content_digest(honest)
    assert into.getvalue() == honest


def placed_naively(stream: bytes, root: Path) -> None:
    """Place a stream the way that trusts it: by joined paths, which links lead astray."""
    reader = Reader(BytesIO(stream), 1 << 20)
    while (one := reader.entry()) is not None:
        path = root / os.fsdecode(b"/".join(one.parts))
        if one.kind == "link":
            path.symlink_to(os.fsdecode(one.target))
        else:
            path.write_bytes(b"".join(reader.read(length) for _, length in one.extents))


def escaping(outside: Path) -> dict[str, bytes]:
    """Return streams that write beyond their folder into ``outside``, each by another way."""

    def file(*parts: bytes) -> entries.Entry:
        return entry("file", *parts, size_bytes=4, extents=((0, 4),))

    up = (b"..", os.fsencode(outside.name))
    return {
        "climbing": crafted(file(*up, b"climbed"), content=b"mine"),
        "a slash in a name": crafted(file(b"/".join((*up, b"slashed"))), content=b"mine"),
        "through a link": crafted(
            entry("link", b"l", target=os.fsencode(outside)),
            file(b"l", b"linked"),
            content=b"mine",
        ),
    }


@pytest.mark.parametrize("name", ["climbing", "a slash in a name", "through a link"])
def test_a14_a_state_that_leaves_its_folder_breaks_the_link(tmp_path: Path, name: str) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    workspace.mkdir()
    outside.mkdir()
    stream = escaping(outside)[name]
    placed_naively(stream, workspace)
    assert len(names_in(outside)) == 1, "without the checks it is written outside"
    with pytest.raises(GuestLost, match=r"leaves its folder|no directory"):
        given_by(lies(stream), BytesIO())


def test_a7_a_state_without_end_is_cut_at_what_the_box_may_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    much, enough = 8 * BOUNDS.bytes_max, threading.Event()

    def copied(source: BinaryIO, into: BytesIO, _: Bounds) -> Packed:
        into.write(source.read(much))
        enough.set()
        return Packed("", into.tell(), ())

    async def unbounded() -> int:
        into = BytesIO()
        async with hostile(grows) as lying:
            taking = asyncio.ensure_future(keeping.packed(lying, SMALL, into))
            assert await asyncio.to_thread(enough.wait, sandbox.PATIENCE)
            lying.close()
            with pytest.raises(GuestLost):
                await taking
        return into.tell()

    with monkeypatch.context() as off:
        off.setattr(keeping, "passed", copied)
        assert sandbox.run(unbounded) == much, "without bounds it is taken"
    into = BytesIO()
    with pytest.raises(GuestLost, match="more than the limits"):
        given_by(grows, into)
    assert into.tell() < BOUNDS.bytes_max


def given_by_any(say: Says, into: BytesIO) -> Packed:
    """Take the state of a hostile guest, however the link ends."""

    async def body() -> Packed:
        async with hostile(say) as lying:
            return await keeping.packed(lying, SMALL, into)

    return sandbox.run(body)


def test_a3_a_guest_that_gives_no_more_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unbounded() -> bool:
        async with hostile(hangs) as lying:
            taking = asyncio.ensure_future(keeping.packed(lying, SMALL, BytesIO()))
            done, _ = await asyncio.wait([taking], timeout=NOT_YET_SECONDS)
            lying.close()
            with pytest.raises(GuestLost):
                await taking
            return not done

    assert sandbox.run(unbounded), "without a deadline it is waited for"
    monkeypatch.setattr(keeping, "STATE_SECONDS", -BOUNDS.bytes_max / keeping._BYTES_PER_SECOND)
    monkeypatch.setattr(link, "_GRACE_SECONDS", NOT_YET_SECONDS)
    with pytest.raises(GuestLost, match="in time"):
        given_by_any(hangs, BytesIO())


PLAIN = crafted(entry("directory", b"d"))
TOLD_WRONG = {
    "another length": b'{"size_bytes": 7, "left_out": []}',
    "a length below nothing": b'{"size_bytes": -1, "left_out": []}',
    "more names left out than are told": json.dumps(
        {"size_bytes": len(PLAIN), "left_out": ["x"] * 21}
    ).encode(),
    "no word": b"",
}


@pytest.mark.parametrize("name", TOLD_WRONG)
def test_a_state_that_is_not_what_its_guest_tells_breaks_the_link(name: str) -> None:
    with pytest.raises(GuestLost, match="broke the protocol"):
        given_by(lies(PLAIN, TOLD_WRONG[name]), BytesIO())


def test_a_state_that_was_cut_short_is_none(tmp_path: Path) -> None:
    with pytest.raises(GuestLost, match="ends early"):
        given_by(lies(PLAIN[:-1]), BytesIO())
    # Cut between two records it reads like a whole one: its length tells.
    with pytest.raises(GuestLost, match="of which"):
        given_by(lies(entries.MAGIC, told_of(PLAIN)), BytesIO())
    assert names_in(tmp_path) == []


# --- what passes the host's checks ----------------------------------------------------------------

SETUID = entry("file", b"x")._replace(mode=0o4755)
MORE = {
    "a setuid bit": crafted(SETUID),
    "a link to nothing": crafted(entry("link", b"x")),
    "a target with an end in it": crafted(entry("link", b"x", target=b"a\0b")),
    "a name with an end in it": crafted(entry("directory", b"a\0b")),
    "a name too long": crafted(entry("directory", b"n" * 256)),
    "another name of a directory": crafted(
        entry("directory", b"a"), entry("same", b"b", target=b"a")
    ),
    "another name of what is not there": crafted(entry("same", b"b", target=b"a")),
    "a size without content's kind": crafted(entry("directory", b"a", size_bytes=5)),
    "a time beyond all": crafted(entry("directory", b"a")._replace(changed_ns=1 << 63)),
}


def longer(stream: bytes) -> bytes:
    """Return a stream whose first record carries something besides."""
    record = stream[len(entries.MAGIC) + 4 :]
    more = bytes([record[0] + 1]) + record[1:] + b"\xc4\x06hidden"
    return entries.MAGIC + len(more).to_bytes(4) + more


@pytest.mark.parametrize("name", [*FORGED, *MORE, "something besides"])
def test_no_forged_state_passes_the_host(name: str) -> None:
    stream = {**FORGED, **MORE, "something besides": longer(PLAIN)}[name]
    with pytest.raises((Forged, EndsEarly)):
        unpacking.passed(BytesIO(stream), BytesIO(), BOUNDS)


def test_what_is_packed_passes_unchanged_and_only_within_its_bounds(tmp_path: Path) -> None:
    expected, stream = of_host(filled(tmp_path))
    into = BytesIO()
    assert unpacking.passed(BytesIO(stream), into, BOUNDS) == expected
    assert into.getvalue() == stream
    for less in (
        BOUNDS._replace(bytes_max=1000),
        BOUNDS._replace(entries_max=3),
        Bounds(bytes_max=0, entries_max=0),
    ):
        with pytest.raises(TooMuch):
            unpacking.passed(BytesIO(stream), BytesIO(), less)
