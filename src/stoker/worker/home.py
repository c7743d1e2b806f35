"""The files of one worker: its lock, who it was before, how it is, and why it could not start.

They lie in ``RUN/workers/NAME/``. Invariants: one living process per name (the lock is held for the
life of the process and freed by the kernel whatever kills it); the incarnation on disk is the last
one that may have leases; ``status.json`` and ``failed.json`` are whole or absent.
"""

import os
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.errors import RunOwned
from stoker.model.faults import FaultRecord
from stoker.model.ids import WorkerId
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, write
from stoker.seams.locks import take_lock

from .figures import WorkerFigures

HOME_WRITE = declare(
    "worker.file.write", "a small file of a worker is written", "kill", "torn", "disk_full"
)


class Home(Protocol):
    """Who a worker is, and where it shows itself."""

    name: str
    worker_id: WorkerId
    """Of this incarnation."""
    previous: WorkerId | None
    """The one before it, which is over."""

    def renew(self) -> None:
        """Become another incarnation."""
        ...

    def remember(self) -> None:
        """Keep who we are, once the ledger knows it."""
        ...

    def write_status(self, figures: WorkerFigures) -> None:
        """Show the figures to whoever looks."""
        ...


class WorkerHome:
    """Directory of one worker, locked while this object lives."""

    def __init__(self, run_directory: Path, name: str) -> None:
        """Lock the name.

        Raises:
            RunOwned: a living worker has this name.
        """
        self.run_directory = run_directory
        self.name = name
        self.directory = run_directory / "workers" / name
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = take_lock(self.directory / "lock")
        if lock is None:
            raise RunOwned(
                f"a living worker named {name!r} already serves {run_directory}; "
                "nothing was started; choose another --name",
                worker=name,
            )
        self._lock = lock
        (self.directory / "failed.json").unlink(missing_ok=True)
        self.previous: WorkerId | None = self._read_incarnation()
        self.worker_id = WorkerId(fresh_id("wrk_"))

    def renew(self) -> None:
        """Become another incarnation; the one before it is known to be over."""
        self.previous = self.worker_id
        self.worker_id = WorkerId(fresh_id("wrk_"))

    def remember(self) -> None:
        """Write down who we are, once the ledger knows it.

        **Durability:** survives the process, not a power cut: after one there are no leases of a
        living worker to give up early, they merely run out.
        """
        self._replace("incarnation", self.worker_id.encode())

    def write_status(self, figures: WorkerFigures) -> None:
        """Show the figures to whoever looks."""
        self._replace("status.json", msgspec.json.encode(figures))

    def write_failed(self, fault: FaultRecord) -> None:
        """Say why this worker could not start."""
        self._replace("failed.json", msgspec.json.format(msgspec.json.encode(fault)))

    def close(self) -> None:
        """Free the name."""
        os.close(self._lock)

    def _read_incarnation(self) -> WorkerId | None:
        try:
            text = (self.directory / "incarnation").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        return WorkerId(text) if text.startswith("wrk_") else None

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.directory / f".{name}.new"
        with temporary.open("wb") as file:
            write(HOME_WRITE, content, file)
        temporary.replace(self.directory / name)
