"""A guest runner without a guest: a process of this machine, beneath a directory."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import stoker
from stoker.sandbox.vm.link import GuestLink, Order

LIMITS = {"memory_bytes": 1, "processes_max": 1, "disk_bytes": 1, "files_max": 1}
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
