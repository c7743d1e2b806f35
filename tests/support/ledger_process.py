"""A real owner process for crash tests: armed, watched, talked to in raw bytes."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.broker.base import CapabilitiesRequest, Request, StatsRequest
from stoker.broker.envelope import Answer, Call, decode_answer, encode
from stoker.broker.place import LOG
from stoker.broker.spawn import OwnerSettings, published_socket
from stoker.wire.frames import FRAME_BYTES_MAX, PROTOCOL_VERSION, FrameDecoder, Hello, frame

WAIT_SECONDS = 60.0
STARTED: list["subprocess.Popen[bytes]"] = []
OWNER = (sys.executable, "-m", "stoker.broker.owner")


def start_owner(
    place: Path,
    fault: str = "",
    settings: OwnerSettings | None = None,
    runtime: str = "",
    program: Sequence[str] = OWNER,
) -> "subprocess.Popen[bytes]":
    """Start an owner as our own child, so that its end can be waited for."""
    chosen = settings or OwnerSettings(idle_exit_seconds=30.0)
    environ = {**os.environ, "STOKER_FAULT": fault, "XDG_RUNTIME_DIR": runtime}
    with (place / LOG).open("ab") as log:
        owner = subprocess.Popen(
            [
                *program,
                "--foreground",
                "--directory",
                str(place),
                "--limits",
                msgspec.json.encode(chosen.limits).decode(),
                "--idle-exit",
                str(chosen.idle_exit_seconds),
            ],
            env=environ,
            stdout=log,
            stderr=log,
        )
    STARTED.append(owner)
    return owner


def end_owners() -> None:
    """End every owner this test started and has not waited for."""
    while STARTED:
        owner = STARTED.pop()
        if owner.poll() is None:
            owner.kill()
            owner.wait()


class RawPeer:
    """A peer that may say anything."""

    def __init__(self, place: Path, *, greet: bool = True) -> None:
        path = published_socket(place)
        assert path is not None, "no owner has published its socket"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_SECONDS)
        self.sock.connect(str(path))
        self.frames = FrameDecoder()
        self._received: list[Hello | Answer] = []
        self._last_id = 0
        if greet:
            self.send(encode(Hello(protocol=PROTOCOL_VERSION, role="test")))
            assert isinstance(self.receive(), Hello)

    def send(self, document: bytes) -> None:
        self.sock.sendall(frame(document))

    def receive(self) -> Hello | Answer | None:
        """Return the next message, ``None`` when the owner hung up."""
        while not self._received:
            try:
                data = self.sock.recv(65_536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received += [decode_answer(document) for document in self.frames.feed(data)]
        return self._received.pop(0)

    def ask(self, request: Request) -> Answer:
        self._last_id += 1
        self.send(encode(Call(self._last_id, request)))
        answer = self.receive()
        assert isinstance(answer, Answer)
        assert answer.call_id == self._last_id
        return answer

    def close(self) -> None:
        self.sock.close()


def wait_for_end(owner: "subprocess.Popen[bytes]") -> int:
    """Return how the process ended: minus the signal, or its status."""
    return owner.wait(timeout=WAIT_SECONDS)


def wait_until_published(place: Path, owner: "subprocess.Popen[bytes]") -> None:
    """Return once somebody listens; the process must not end before."""
    tries = int(WAIT_SECONDS / 0.02)
    for _ in range(tries):
        assert owner.poll() is None, (place / LOG).read_text()
        path = published_socket(place)
        if path is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except OSError:
                    pass
                else:
                    return
        select.select([], [], [], 0.02)
    raise AssertionError("the owner did not come up")


def refuses_bad_frames(place: Path) -> None:
    """Malformed, oversized and truncated frames cost their sender the connection, nobody else."""
    good = RawPeer(place)
    call = encode(Call(1, StatsRequest()))
    hello = encode(Hello(protocol=PROTOCOL_VERSION, role="x"))
    bad: dict[str, tuple[bool, list[bytes]]] = {
        "wrong version": (False, [encode(Hello(protocol=99, role="x"))]),
        "no hello": (False, [call]),
        "not msgpack": (True, [b"\xc1\xc1\xc1"]),
        "another type": (True, [hello]),
        "an unknown verb": (True, [msgspec.msgpack.encode({"type": "call", "call_id": 1})]),
        "call id 0": (True, [encode(Call(0, StatsRequest()))]),
    }
    for name, (greet, documents) in bad.items():
        peer = RawPeer(place, greet=greet)
        for document in documents:
            peer.send(document)
        answer = peer.receive()
        assert isinstance(answer, Answer), name
        assert answer.fault is not None, name
        assert answer.fault.code == "wire_violation", name
        assert peer.receive() is None, f"{name}: the connection stays open"
        peer.close()
    oversized = RawPeer(place)
    oversized.sock.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    answer = oversized.receive()
    assert isinstance(answer, Answer)
    assert answer.fault is not None
    oversized.close()
    truncated = RawPeer(place)
    truncated.sock.sendall(b"\x00\x00\x10\x00half")
    truncated.close()
    assert good.ask(CapabilitiesRequest()).reply is not None
    good.close()
