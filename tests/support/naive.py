"""Running a program the naive way: no box, no defence; its leavings are ended by the test."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.sandbox import runtime
from support.sandbox import MARK, PATIENCE, marked_pids

PIPE_BYTES = 65_536
UNCAPPED_BYTES = 16 << 20
"""How much a reader without a cap is let keep before the test believes it."""
ATTACKER_UID = 1_999_000_000 + os.getpid() % 100_000
"""A uid nobody has: what it can kill or fill is its own."""


def until(holds: Callable[[], object]) -> None:
    """Look until ``holds``; the bound is only reached when something hangs."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "what the test waits for never came"
        time.sleep(0.005)


@contextlib.contextmanager
def started(*argv: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program as a plain child; afterwards it and every sleeper it left are dead."""
    path = f"{_public_python().parent}:/usr/local/bin:/usr/bin:/bin"
    options = {"stdin": subprocess.DEVNULL, "env": {"PATH": path}, "cwd": "/", **options}
    process: subprocess.Popen[bytes] = subprocess.Popen(argv, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        _kill(left())
        process.wait(PATIENCE)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        until(lambda: not left())


def _public_python() -> Path:
    """Return an interpreter that any uid can run."""
    return runtime.prepare().python / "bin" / "python"


def left() -> list[int]:
    """Return every process an attack left, also a shell that was stopped before it slept."""
    signs = (b"sleep\0" + MARK.encode(), b"sleep " + MARK.encode())
    found = set(marked_pids())
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            line = (entry / "cmdline").read_bytes()
            if any(sign in line for sign in signs) and state(int(entry.name)) not in b"ZX":
                found.add(int(entry.name))
    return sorted(found)


def kill_marked() -> None:
    """Kill every sleeper an attack left."""
    _kill(marked_pids())


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_uid(uid: int) -> None:
    """Kill everything of ``uid`` in one system call, which no fork escapes."""
    script = "import os, signal; os.kill(-1, signal.SIGKILL)"
    assert uid > 0
    subprocess.run(
        [str(_public_python()), "-I", "-S", "-c", script],
        user=uid, group=uid, extra_groups=[], cwd="/", check=True, timeout=PATIENCE,
    )  # fmt: skip


def waiting_bytes(stream: object) -> int:
    """Return how many bytes lie in a pipe."""
    answer = fcntl.ioctl(stream.fileno(), termios.FIONREAD, b"\0" * 4)  # type: ignore[attr-defined]
    return int(struct.unpack("i", answer)[0])


def state(pid: int) -> bytes:
    """Return the state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def pids_of(uid: int) -> list[int]:
    """Return the processes of a uid."""
    found = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if entry.stat().st_uid == uid:
                found.append(int(entry.name))
    return found
