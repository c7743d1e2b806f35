"""The disk that runs may use: a budget for stored content, and what of ended runs may go.

At the budget a run drains: nothing new is admitted, what is active finishes and keeps its results
(so the budget is passed by what active rollouts still write), and the run can be resumed. Nothing
is ever removed to make room; people do that with ``stoker runs prune``, which takes whole runs that
are finished, exported since, wanted by nobody, and without branches that wait to be run.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.broker.place import owner_pid
from stoker.coordinator.branch_requests import waiting
from stoker.coordinator.record import RunDirectory, write_atomically
from stoker.coordinator.request import StopSignal
from stoker.coordinator.sharing import is_running, parts_of
from stoker.coordinator.view import RunSnapshot
from stoker.errors import ConfigInvalid

_LOOK_SECONDS = 5.0
_EXPORTED = "exported.json"
_PRUNED = ".pruned-"


class ExportMark(msgspec.Struct, frozen=True, kw_only=True):
    """Left in a run when all it had then was exported."""

    at: float
    """Wall time, seconds since 1970."""
    file: str
    rollouts: int
    """Finished rollouts that were read; none was unfinished."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One run, and whether it may go."""

    run: str
    size_bytes: int
    kept: str
    """Why it must stay; empty: it may go."""


def stored_bytes(artifacts: Path) -> int:
    """Return how many bytes of content lie in an artifact store. Blocks while it is walked."""
    total = 0
    for file in artifacts.glob("*/*"):
        with suppress(FileNotFoundError):  # a draft that has just got its name
            total += file.stat().st_size
    return total


def require_room(artifacts: Path, most: int | None) -> None:
    """Check the budget before anything is started.

    Raises:
        ConfigInvalid: it is used up.
    """
    if most is not None and (used := stored_bytes(artifacts)) >= most:
        raise ConfigInvalid(f"{_reached(artifacts, used, most)}; nothing was started")


class StorageWatch:
    """Looks at one store while a run goes on; ends by draining the run."""

    def __init__(self, artifacts: Path, most: int | None, stop: StopSignal) -> None:
        self._artifacts = artifacts
        self._most = most
        self._stop = stop
        self.held = ""
        """Why nothing new is admitted, once the budget is reached."""

    async def run(self, say: Callable[[str], None]) -> None:
        """Look every few seconds until the budget is reached; then tell and drain."""
        while self._most is not None:
            used = await asyncio.to_thread(stored_bytes, self._artifacts)
            if used >= self._most:
                self.held = (
                    f"{_reached(self._artifacts, used, self._most)}; nothing new is admitted, "
                    "what is active finishes, and the run can be resumed"
                )
                say(self.held)
                self._stop.drain()
                return
            await asyncio.sleep(_LOOK_SECONDS)


def _reached(artifacts: Path, used: int, most: int) -> str:
    return (
        f"the artifacts in {artifacts} take {used} bytes of the {most} of storage.artifacts_max: "
        "raise it, or make room with: stoker runs prune"
    )


def mark_exported(run: RunDirectory, mark: ExportMark) -> None:
    """Note that everything the run had was exported."""
    write_atomically(run.path / _EXPORTED, msgspec.json.encode(mark), synced=True)


def judge(run: RunDirectory, before: float) -> Judged:
    """Say whether ``run`` may go: finished, exported before ``before``, wanted by nobody."""
    size = sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file() and not f.is_symlink())
    return Judged(run=run.path.name, size_bytes=size, kept=_kept(run, before))


def _kept(run: RunDirectory, before: float) -> str:
    if run.ledger.is_symlink():
        return f"it shares {run.ledger.resolve().parent}, which goes as a whole"
    if is_running(run) or owner_pid(run.ledger) is not None:
        return "it is in use"
    if waiting(run):
        return "branches of it wait to be run"
    total = _finished_total(run)
    return "it is not finished" if total is None else _not_exported(run, total, before)


def _not_exported(run: RunDirectory, total: int, before: float) -> str:
    try:
        mark = msgspec.json.decode((run.path / _EXPORTED).read_bytes(), type=ExportMark)
    except (FileNotFoundError, msgspec.MsgspecError):
        return "it is not exported"
    if mark.rollouts < total:
        return f"only {mark.rollouts} of its {total} rollouts are exported"
    return "" if mark.at < before else "it was exported too recently"


def _finished_total(run: RunDirectory) -> int | None:
    """Return how many rollouts a finished run has; ``None``: a part of it may have work left."""
    total = 0
    for part in parts_of(run):
        try:
            snapshot = msgspec.json.decode(part.status.read_bytes(), type=RunSnapshot)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if snapshot.state != "finished":
            return None
        total += snapshot.rollouts_total
    return total


def prune(run: RunDirectory) -> None:
    """Remove a run that ``judge`` lets go; killed half-way it is no run, and ``sweep`` ends it.

    Raises:
        OSError: it could not be removed whole.
    """
    doomed = run.path.with_name(_PRUNED + run.path.name)
    run.path.rename(doomed)
    (doomed / "run.json").unlink()
    shutil.rmtree(doomed)


def sweep(runs_directory: Path) -> None:
    """Remove what a prune that was killed left behind."""
    for doomed in runs_directory.glob(_PRUNED + "*"):
        shutil.rmtree(doomed)
