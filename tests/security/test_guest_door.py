"""The way out of guests: connections by the link, and guests that lie about them (CASES A15)."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sandbox.guest.wire import (
    BODY_BYTES_MAX,
    CONNECTIONS_MAX,
    DOOR_FIRST,
    WINDOW_BYTES,
    frame,
)
from stoker.sandbox.vm.link import GuestLink, GuestLost, GuestRun
from support import sandbox
from support.guests import ENDED, PATIENCE, order, runner

TALKS = """
import socket, sys
port, count = map(int, sys.argv[1:])
for at in range(count):
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.sendall(b"%d:" % at + b"x" * 700_000)
        end.shutdown(socket.SHUT_WR)
        whole = b""
        while data := end.recv(1 << 16):
            whole += data
        print(at, len(whole), whole[:4].decode())
"""
MANY = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
served = 0
for end in ends:
    try:
        end.sendall(b"x")
        end.shutdown(socket.SHUT_WR)
        served += bool(end.recv(10))
    except OSError:
        pass
print(served)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Echo:
    """Plays the proxy: answers each connection with what it said, once it has said all."""

    def __init__(self) -> None:
        self.served: set[asyncio.Task[None]] = set()
        self.may = asyncio.Event()
        self.may.set()

    def connect(self) -> int:
        """See ``streams.Connect``."""
        ours, theirs = socket.socketpair()
        task = asyncio.ensure_future(self._serve(ours))
        self.served.add(task)
        return theirs.detach()

    async def _serve(self, end: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=end)
        try:
            whole = await reader.read()
            await self.may.wait()
            writer.write(whole)
            await writer.drain()
        finally:
            writer.close()


def run_with_door(
    workspace: Path, *argv: str, on: Callable[[Echo], None] = lambda _: None
) -> tuple[GuestRun, Echo]:
    """Run Python in a runner of this machine, whose door is at the first argument."""

    async def body() -> tuple[GuestRun, Echo]:
        echo = Echo()
        on(echo)
        opened = msgspec.structs.replace(
            order(sys.executable, "-c", *argv), door=int(argv[1]), authorities=()
        )
        async with runner(workspace) as link:
            ran = await link.run(opened, b"", (), echo.connect)
            assert (await link.run(order("true"), b"")).ended.status == 0, "the link goes on"
        for task in echo.served:
            task.cancel()
        await asyncio.gather(*echo.served, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes in the next turn
        return ran, echo

    return sandbox.run(body)


def test_each_connection_carries_both_ways_to_its_end(tmp_path: Path) -> None:
    ran, echo = run_with_door(tmp_path, TALKS, str(free_port()), "5")
    expected = "".join(f"{at} 700002 {at}:xx\n" for at in range(5))
    assert (ran.stdout.decode(), ran.stderr) == (expected, b"")
    assert len(echo.served) == 5


def test_more_at_once_than_there_may_be_are_refused_and_the_others_served(tmp_path: Path) -> None:
    ran, echo = run_with_door(tmp_path, MANY, str(free_port()), str(CONNECTIONS_MAX + 3))
    assert (ran.stdout, ran.stderr) == (b"%d\n" % CONNECTIONS_MAX, b"")
    assert len(echo.served) == CONNECTIONS_MAX


def test_a_program_that_ends_leaves_no_connection_and_its_port_is_free(tmp_path: Path) -> None:
    port = free_port()
    leaves = "import os, socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    ran, _ = run_with_door(
        tmp_path, f"{leaves}.send(b'x'); os._exit(0)", str(port), on=lambda echo: echo.may.clear()
    )
    assert (ran.ended.status, ran.stderr) == (0, b"")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_whom_to_trust_is_written_by_the_program_and_never_through_what_it_may_not(
    tmp_path: Path,
) -> None:
    async def body() -> tuple[GuestRun, GuestRun]:
        made = [str(tmp_path / "bundle"), "an authority"]
        opened = msgspec.structs.replace(order("cat", made[0]), authorities=made)
        nowhere = msgspec.structs.replace(opened, authorities=[str(tmp_path / "no" / "x"), "a"])
        async with runner(tmp_path) as link:
            return await link.run(opened, b""), await link.run(nowhere, b"")

    written, refused = sandbox.run(body)
    assert written.stdout.endswith(b"\nan authority")
    assert refused.ended.errno == 2


# --- guests that lie ------------------------------------------------------------------------------

FIRST = frame("connected", stream=DOOR_FIRST)
LIES = {
    "out of turn": frame("connected", stream=DOOR_FIRST + 1),
    "the same twice": FIRST * 2,
    "more than there may be": b"".join(
        frame("connected", stream=DOOR_FIRST + at) for at in range(CONNECTIONS_MAX + 1)
    ),
    "bytes of none": frame("channel", b"x", stream=DOOR_FIRST),
    "bytes after its end": FIRST
    + frame("channel", stream=DOOR_FIRST)
    + frame("channel", b"x", stream=DOOR_FIRST),
    "more than its window": FIRST
    + frame("channel", bytes(BODY_BYTES_MAX), stream=DOOR_FIRST)
    * (4 * WINDOW_BYTES // BODY_BYTES_MAX),  # its socket takes some of it
    "taken what was not sent": FIRST + frame("taken", stream=DOOR_FIRST, count=1),
    "taken of one that never was": frame("taken", stream=DOOR_FIRST, count=1),
}


def spoken(
    said: bytes, *, connections: int, proxy: Callable[[socket.socket], None] = lambda _: None
) -> Exception | GuestRun:
    """Let a guest with a door say ``said``; return what came of its action, all let go of.

    ``proxy`` is what becomes of each connection at its other end.
    """
    opened: list[socket.socket] = []

    def connect() -> int:
        if len(opened) >= connections:
            raise OSError(24, "Too many open files")
        ours, theirs = socket.socketpair()
        opened.append(ours)
        proxy(ours)
        return theirs.detach()

    async def body() -> Exception | GuestRun:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        link = GuestLink(ours)
        wanted = msgspec.structs.replace(order("x"), door=1)
        running = asyncio.ensure_future(link.run(wanted, b"", (), connect))
        await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(theirs, said)
        try:
            return await running
        except GuestLost as lost:
            return lost
        finally:
            link.close()
            theirs.close()

    came = sandbox.run(body)
    for end in opened:
        with end, contextlib.suppress(ConnectionResetError):
            end.settimeout(PATIENCE)
            while end.recv(1 << 20):
                pass
    return came


@pytest.mark.parametrize("name", LIES)
def test_a_guest_that_lies_about_its_connections_is_lost(name: str) -> None:
    came = spoken(LIES[name] + frame("ended", **ENDED), connections=1 << 20)
    assert isinstance(came, GuestLost)
    assert "protocol" in str(came)


def test_honest_connections_end_with_their_action_and_a_shortage_of_ours_is_no_result() -> None:
    honest = FIRST + frame("channel", b"x", stream=DOOR_FIRST) + frame("ended", **ENDED)
    assert isinstance(spoken(honest, connections=1), GuestRun)
    assert isinstance(spoken(honest, connections=0), GuestLost)


def test_what_the_proxy_does_not_take_of_ended_connections_makes_room_for_others() -> None:
    said = b"".join(
        frame("connected", stream=number)
        + frame("channel", bytes(BODY_BYTES_MAX), stream=number) * 4
        + frame("channel", stream=number)
        for number in range(DOOR_FIRST, DOOR_FIRST + CONNECTIONS_MAX + 5)
    )
    ends = spoken(
        said + frame("ended", **ENDED),
        connections=1 << 20,
        proxy=lambda end: end.shutdown(socket.SHUT_WR),
    )
    assert isinstance(ends, GuestRun), ends


numbers = st.integers(DOOR_FIRST - 1, DOOR_FIRST + 3)
frames = st.one_of(
    st.builds(lambda number: frame("connected", stream=number), numbers),
    st.builds(
        lambda number, body: frame("channel", body, stream=number), numbers, st.binary(max_size=9)
    ),
    st.builds(
        lambda number, count: frame("taken", stream=number, count=count),
        numbers,
        st.integers(0, 2),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(frames, max_size=12))
def test_whatever_a_guest_says_of_its_connections_its_action_ends_or_it_is_lost(
    said: list[bytes],
) -> None:
    spoken(b"".join(said) + frame("ended", **ENDED), connections=3)
