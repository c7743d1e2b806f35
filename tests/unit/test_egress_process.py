"""The egress proxy's process, against a box that hands it what it should not."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.model.tools import RunRequest
from stoker.sandbox.egress.gate import PORT, Carried, Egress, Gate
from stoker.sandbox.egress.main import Process
from stoker.sandbox.inside import way_out

_DEADLINE_SECONDS = 30


class Worker:
    """Plays the worker, and the box behind each gate."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.control, theirs):
            end.setblocking(False)
        self.process = Process(theirs)
        self.theirs = theirs

    def open(self, number: int, *, handed: bool = False) -> socket.socket:
        """Open a gate; return the other end of its channel."""
        ours, box = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        told = {"open": number, "rules": [], "credentials": [], "handed": handed}
        with ours:
            socket.send_fds(self.control, [json.dumps(told).encode()], [ours.fileno()])
        return box

    async def close(self, number: int) -> dict[str, Any]:
        """Close a gate; return the answer."""
        loop = asyncio.get_running_loop()
        self.control.send(json.dumps({"close": number}).encode())
        while True:
            said: dict[str, Any] = json.loads(await loop.sock_recv(self.control, 65536))
            if "closed" in said:
                return said


@contextlib.asynccontextmanager
async def working(complaints: list[dict[str, Any]]) -> AsyncIterator[Worker]:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    worker = Worker()
    serving = loop.create_task(worker.process.run())
    async with asyncio.timeout(_DEADLINE_SECONDS):
        yield worker
        worker.control.close()
        await serving
    worker.theirs.close()


def run(work: Callable[[Worker], Any]) -> list[dict[str, Any]]:
    """Run ``work``; return what the event loop complained of."""
    complaints: list[dict[str, Any]] = []

    async def inside() -> None:
        async with working(complaints) as worker:
            await work(worker)

    asyncio.run(inside())
    return complaints


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a kernel directory


def test_descriptors_that_are_no_listening_socket_are_closed_unused() -> None:
    before: list[int] = []

    async def work(worker: Worker) -> None:
        before.append(open_files())
        box = worker.open(1)
        box.setblocking(False)
        plain, write = os.pipe()
        with socket.socket(socket.AF_UNIX) as other:
            socket.send_fds(box, [b"x"], [plain, other.fileno(), write])
        os.close(plain)
        os.close(write)
        assert await asyncio.get_running_loop().sock_recv(box, 1) == b""
        box.close()
        await worker.close(1)
        before.append(open_files())

    assert run(work) == []
    assert before[0] == before[1]


def test_connections_that_are_handed_over_are_served_until_the_gate_closes() -> None:
    before: list[int] = []

    async def work(worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        before.append(open_files())
        channel = worker.open(1, handed=True)
        gate = Gate(cast("Egress", None), 1, channel.fileno(), {}, b"")
        ends = [socket.socket(fileno=gate.connect()) for _ in range(3)]
        for end in ends:
            end.setblocking(False)
        for end in ends[:2]:
            await loop.sock_sendall(end, b"GET / HTTP/1.1\r\n\r\n")
            assert (await loop.sock_recv(end, 100)).startswith(b"HTTP/1.1 405")
        answer = await worker.close(1)
        assert answer["refused"] == 2
        assert await loop.sock_recv(ends[2], 1) == b"", "one that said nothing ends with the gate"
        late = socket.socket(fileno=gate.connect())
        assert late.recv(1) == b"", "and one that comes too late has ended"
        for end in (*ends, late, channel):
            end.close()
        before.append(open_files())

    assert run(work) == []
    assert before[0] == before[1]


def test_a_connection_that_cannot_be_taken_is_a_fault_of_ours() -> None:
    async def work(worker: Worker) -> None:
        channel = worker.open(1, handed=True)
        channel.send(b"c")  # what arrives where there is no descriptor left for it
        assert await worker.close(1) == {"closed": 1}
        channel.close()

    assert run(work) == []


class _Closing:
    """A proxy that serves to the end."""

    async def closed(self, _number: int) -> Carried:
        return Carried()


@pytest.mark.parametrize("why", ["gone", "slow"])
def test_a_connection_that_the_proxy_does_not_take_is_a_fault_of_ours(why: str) -> None:
    async def body() -> tuple[Carried | None, Carried | None]:
        ours, theirs = socket.socketpair()
        gates = [Gate(cast("Egress", _Closing()), 1, ours.fileno(), {}, b"") for _ in range(2)]
        ends = [gates[0].connect()]
        if why == "gone":
            theirs.close()
            ends.append(gates[1].connect())
        while why == "slow" and await gates[1].close() is not None:
            ends.append(gates[1].connect())
        assert os.read(ends[-1], 1) == b""
        for end in ends:
            os.close(end)
        ours.close()
        theirs.close()
        return await gates[0].close(), await gates[1].close()

    assert asyncio.run(body()) == (Carried(), None)


def test_a_listening_socket_that_the_box_shut_is_left_alone() -> None:
    async def work(worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        box = worker.open(1)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.send_fds(box, [b"listening"], [listening.fileno()])
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 405")
            writer.close()
            listening.shutdown(socket.SHUT_RDWR)
        for _ in range(5):
            turned = loop.create_future()
            loop.call_soon(turned.set_result, None)
            await turned
        box.close()
        assert (await worker.close(1))["refused"] == 1

    assert run(work) == []


@pytest.mark.parametrize("spoiled", [b"", b"not one packet of ours"])
def test_closing_a_gate_that_never_opened_is_answered(spoiled: bytes) -> None:
    async def work(worker: Worker) -> None:
        if spoiled:
            worker.control.send(spoiled)
        said = await worker.close(7)
        assert said == {"closed": 7}, "no figures: the action it was for is a fault of ours"

    complaints = run(work)
    assert len(complaints) == bool(spoiled)


def test_the_loader_heeds_what_the_box_set_only_once_the_door_is_open() -> None:
    gate = Gate(cast("Egress", None), 1, -1, {}, b"")
    request = RunRequest(
        argv=("env", "-0"), environment={"LD_LIBRARY_PATH": "/workspace/a=b", "OTHER": "x"}
    )
    scripts = str(Path(way_out.__file__).parent)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        at = theirs.fileno()
        asked = gate.through(
            request, {"LD_PRELOAD": "/workspace/x.so"}, (sys.executable, scripts), at
        )
        given = {"LD_PRELOAD": "/workspace/x.so", **asked.environment}
        assert given["LD_PRELOAD"] == given["LD_LIBRARY_PATH"] == ""
        argv = ["0" if part == str(PORT) else part for part in asked.argv]  # any free port
        done = subprocess.run(argv, env=given, pass_fds=[at], capture_output=True, check=True)
        _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
    os.close(descriptors[0])
    seen = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
    assert seen["LD_LIBRARY_PATH"] == "/workspace/a=b"
    assert seen["LD_PRELOAD"] == "/workspace/x.so"
    assert seen["OTHER"] == "x"
