"""What there is to be reached on the host while attacks run: files, ports, processes, memory."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from stoker.sandbox import runtime

SECRET = "a-secret-of-the-host"  # noqa: S105 - one that nothing depends on
NOBODY = 65_534
_SHARED_BYTES = 4096


class World:
    """What there is to be reached on the host, for as long as the attacks run."""

    def __init__(self, place: str) -> None:
        self.directory = Path(place)
        self.directory.chmod(0o777)
        self.state = self.directory / "state"
        self.state.mkdir(mode=0o700)
        self.places: dict[str, str | int] = {}
        self.python = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        name = f"stoker-attacked-{os.getpid()}"
        mark = str(800_000 + os.getpid() % 90_000)
        self.python = str(runtime.prepare().python / "bin" / "python")
        file = self.directory / "secret"
        file.write_text(SECRET)
        file.chmod(0o644)
        writable = self.directory / "writable"
        writable.mkdir()
        writable.chmod(0o777)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.places = {
            "name": name,
            "mark": mark,
            "secret": SECRET,
            "file": str(file),
            "writable": str(writable),
            "tmp": f"/tmp/{name}",  # noqa: S108 - where boxes have one of their own
            "tcp": tcp.getsockname()[1],
            "tcp6": _listening6(stack),
            "udp": stack.enter_context(_echo()),
            "abstract": name,
            "socket": str(self.directory / "socket"),
            "process": stack.enter_context(_sleeper(name[::-1])),
            "shared": stack.enter_context(_shared_memory()),
            "host": socket.gethostname(),
            "network": str(Path("/proc/self/ns/net").readlink()),
            "descriptor": os.open(file, os.O_RDONLY),
        }
        stack.callback(os.close, int(self.places["descriptor"]))
        left = Path(str(self.places["tmp"]))
        left.touch(mode=0o644)
        stack.callback(left.unlink, missing_ok=True)
        for address in ("\0" + name, str(self.places["socket"])):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        (self.directory / "socket").chmod(0o777)

    def survivors(self) -> list[int]:
        """Return the processes that sleep for the mark."""
        wanted = [b"sleep", str(self.places["mark"]).encode()]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().split(b"\0")[:2]
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    if line == wanted and state not in (b"Z", b"X"):
                        found.append(int(entry.name))
        return found

    def kill_survivors(self) -> None:
        """End what an attack left."""
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _listening6(stack: contextlib.ExitStack) -> int:
    with contextlib.suppress(OSError):
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
        return int(stack.enter_context(server).getsockname()[1])
    return 0  # a host without IPv6: the attack does not count


@contextlib.contextmanager
def _sleeper(name: str) -> Iterator[int]:
    """A process of the user that plain children run as, with ``name`` among its arguments."""
    root = os.geteuid() == 0
    argv = ["sh", "-c", "sleep 100000", name]
    who = NOBODY if root else None
    with subprocess.Popen(argv, user=who, start_new_session=True) as process:  # noqa: S603 - a shell
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _echo() -> Iterator[int]:
    """A program that answers datagrams on the host's loopback; gives its port."""
    script = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "while True:\n    data, who = s.recvfrom(99); s.sendto(data, who)"
    )
    argv = [sys.executable, "-I", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        assert process.stdout is not None, "asked for above"
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def _shared_memory() -> Iterator[int]:
    """A segment that others may attach, under a key; gives the key."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x5354_0000 + os.getpid() % 0xFFFF
    create = 0o1000 | 0o666
    segment = libc.shmget(key, _SHARED_BYTES, create)
    try:
        yield key
    finally:
        if segment >= 0:
            libc.shmctl(segment, 0, None)
