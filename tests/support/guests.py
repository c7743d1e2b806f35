"""A guest runner without a guest: a process of this machine, beneath a directory."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import stoker
from stoker.model.execution import Limits
from stoker.sandbox import states
from stoker.sandbox.branching import bounds_of
from stoker.sandbox.states import Packed
from stoker.sandbox.vm.link import GuestLink, Order

LIMITS = {"memory_bytes": 1, "processes_max": 1, "disk_bytes": 1, "files_max": 1}
SMALL = Limits(disk_bytes=1 << 20, files_max=100)
BOUNDS = bounds_of(SMALL)
ENDED: dict[str, Any] = {
    "status": 0, "stdout": 0, "stderr": 0, "reason": "", "stopped": False, "cpu_seconds": 0.0,
    "memory_peak_bytes": 0, "error": "", "errno": 0,
}  # fmt: skip
"""The end of an action that did nothing, as a runner tells it."""
PATIENCE = 30.0
"""Seconds: only reached when something hangs."""


@contextlib.asynccontextmanager
async def runner(workspace: Path) -> AsyncIterator[GuestLink]:
    """Give the link to a runner that has begun; it must end by itself when the link closes."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: ASYNC220 - started at once, and waited for elsewhere
            [sys.executable, "-m", "stoker.sandbox.guest.runner", "--directory", str(workspace)],
            stdin=theirs.fileno(),
            env={"PYTHONPATH": str(Path(stoker.__file__).parent.parent)},
            cwd="/",
        )
    link = GuestLink(ours)
    try:
        await link.ready(PATIENCE)
        await link.adopt("box", 0, LIMITS, entropy=b"", seconds=PATIENCE)
        yield link
    finally:
        link.close()
        try:
            code = await asyncio.to_thread(process.wait, PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert code == 0, "the runner failed"


def order(
    *argv: str, timeout: float = PATIENCE, cpu: float = PATIENCE, output: int = 1 << 20
) -> Order:
    """Return an action of the usual bounds."""
    return Order(
        argv=argv,
        environment={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        directory=".",
        rlimits={"core": (0, 0)},
        timeout_seconds=timeout,
        cpu_seconds=cpu,
        output_bytes=output,
    )


def filled(directory: Path) -> Path:
    """Make a small tree with one of each kind."""
    workspace = directory / "workspace"
    (workspace / "deep" / ("n" * 255)).mkdir(parents=True)
    (workspace / "deep" / "file").write_bytes(bytes(range(256)) * 1200)
    (workspace / "tool").write_text("x")
    (workspace / "tool").chmod(0o4755)
    os.link(workspace / "tool", workspace / "again")
    (workspace / "out").symlink_to("/etc/passwd")
    os.mkfifo(workspace / "pipe")
    with (workspace / "sparse").open("wb") as file:
        file.truncate(3_000_000)
        file.seek(1_000_000)
        file.write(b"middle")
    os.utime(workspace / "tool", ns=(-5, -5_000_000_001))
    return workspace


def of_host(workspace: Path) -> tuple[Packed, bytes]:
    """Return the state of a workspace as the host packs it."""
    into = BytesIO()
    opened = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
    try:
        packed = states.pack({b"workspace": opened}, into, BOUNDS)
    finally:
        os.close(opened)
    return packed, into.getvalue()
