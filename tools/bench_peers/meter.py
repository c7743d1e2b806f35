"""What is counted, and what every peer is given to carry."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench_faults.servers import free_port

PAYLOAD = "x" * 1024
WARM_SECONDS = 2.0
START_SECONDS = 60.0
PORT = int(os.environ.setdefault("PEER_PORT", str(free_port())))
"""Where the peer's server listens; workers inherit it."""


class Meter:
    """Counts round trips over a span of time that begins once everything is warm."""

    def __init__(self, seconds: float) -> None:
        self._span = seconds
        self._from = 0.0
        self.cycles = 0
        self.seconds = 0.0

    def begin(self) -> None:
        """Say that the first round trip is back: what follows warms up, then counts."""
        self._from = time.monotonic() + WARM_SECONDS

    @property
    def going(self) -> bool:
        """Whether more is to be submitted."""
        return time.monotonic() < self._from + self._span

    def count(self, cycles: int = 1) -> None:
        """Take note of results that were seen just now."""
        now = time.monotonic()
        if self._from <= now < self._from + self._span:
            self.cycles += cycles
            self.seconds = now - self._from


@contextlib.contextmanager
def workers(folder: Path, *commands: list[str]) -> Iterator[None]:
    """Run the worker processes of a peer for the block."""
    with (folder / "workers.log").open("ab") as log:
        running = [subprocess.Popen(one, stdout=log, stderr=log) for one in commands]
    try:
        yield
    finally:
        for one in running:
            one.terminate()
        for one in running:
            try:
                one.wait(5.0)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
