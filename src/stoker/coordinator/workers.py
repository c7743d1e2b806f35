"""The local workers of a run: started in sessions of their own, so that they outlive a coordinator.

A worker that serves this run already (after a coordinator died) is left as it is; one that ended is
started again, later each time it ends early. Why a worker cannot start at all is read from its
``failed.json`` and ends the run with that reason. Of several coordinators one is the keeper (a lock
says which); when it ends or dies another takes over, and takes the workers over.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.coordinator.record import RunDirectory
from stoker.errors import StokerError, WorkerLost, from_record
from stoker.model.faults import FaultRecord
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.removal import remove_tree
from stoker.seams.clock import Clock
from stoker.seams.locks import lock_is_held, take_lock

_LOOK_SECONDS = 0.25
_BACKOFF_SECONDS_MAX = 10.0
_EARLY_ENDS_MAX = 10
_STOP_SECONDS = 15.0
STOPPED_SECONDS = 60.0
"""A worker that stands stopped for this long is ended: its slots serve nobody."""


class ClassSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of one class (``worker.figures.ClassFigures``, as far as we read it)."""

    slots: int
    busy: int
    finished: int
    busy_share: float
    isolation: dict[str, object] | None = None


_ENDED = "ended"
DIED = "died"
"""State of a worker that was killed: it could not say so, but nobody holds its lock."""


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself in ``status.json``."""

    name: str
    pid: int
    state: str
    classes: dict[str, ClassSeen]
    boxes_alive: int
    boxes_leaked: int
    boxes_ready: int = 0
    memory_short: bool = False
    """It takes no more work on: what its boxes leave of the host's memory is its reserve."""

    def died(self) -> "WorkerSeen":
        """Return what is left of it once it was killed: counts, but no slots, boxes or wants."""
        gone = {
            name: msgspec.structs.replace(one, slots=0, busy_share=0.0)
            for name, one in self.classes.items()
        }
        return msgspec.structs.replace(
            self, state=DIED, classes=gone, boxes_alive=0, boxes_ready=0, memory_short=False
        )


@dataclass(slots=True)
class _Worker:
    name: str
    home: Path
    process: "subprocess.Popen[bytes] | None" = None
    early_ends: int = 0
    started_at: float = 0.0
    not_before: float = 0.0
    stopped_at: float | None = None


class LocalWorkers:
    """Keeps ``count`` workers serving a run; ``shared``: while nobody else does."""

    def __init__(self, run: RunDirectory, count: int, clock: Clock, *, shared: bool) -> None:
        self._run = run
        self._clock = clock
        self._shared = shared
        self._keeper: int | None = None
        """Descriptor that holds the keeper's lock."""
        self._workers = [_Worker(f"w{i}", run.workers / f"w{i}") for i in range(count)]

    async def keep(self) -> None:
        """Start what is missing and go on looking, until cancelled.

        Raises:
            StokerError: a worker says it cannot serve this run on this host.
        """
        while True:
            if self._is_keeper():
                for worker in self._workers:
                    self._look(worker)
            await asyncio.sleep(_LOOK_SECONDS)

    def seen(self) -> tuple[WorkerSeen, ...]:
        """Return what every worker last said of itself, whoever started it; see ``WorkerSeen``."""
        found = []
        for status in sorted(self._run.workers.glob("*/status.json")):
            with suppress(OSError, msgspec.MsgspecError):
                one = msgspec.json.decode(status.read_bytes(), type=WorkerSeen)
                lives = one.state == _ENDED or lock_is_held(status.parent / "lock")
                found.append(one if lives else one.died())
        return tuple(found)

    def ready(self) -> bool:
        """Whether some local worker serves the run now."""
        return any(
            seen.state == "working" and lock_is_held(self._run.workers / seen.name / "lock")
            for seen in self.seen()
        )

    async def stop(self) -> None:
        """Ask every local worker to drain and wait for it; kill what does not end in time.

        What a worker that died had made, and none came after to sweep, is removed here.
        """
        waiting = {w.name: pid for w in self._workers if (pid := self._pid(w)) is not None}
        for pid in waiting.values():
            _signal(pid, signal.SIGTERM)
        deadline = self._clock.monotonic() + _STOP_SECONDS
        while self._clock.monotonic() < deadline and (
            # Of a worker that another coordinator started the lock is free before the process ends.
            any(self._alive(w) for w in self._workers) or any(map(_is_running, waiting.values()))
        ):
            await asyncio.sleep(_LOOK_SECONDS / 10)
        for worker in self._workers:
            if self._alive(worker) and worker.name in waiting:
                _signal(waiting[worker.name], signal.SIGKILL)
            if worker.process is not None:
                await asyncio.to_thread(worker.process.wait)
        for worker in self._workers:
            await self._sweep(worker)
        self._release()

    async def _sweep(self, worker: _Worker) -> None:
        if self._alive(worker):
            return
        for draft in (worker.home / "states").glob("*"):
            with suppress(OSError):
                await asyncio.to_thread(remove_tree, draft)
        boxes = worker.home / "boxes"
        if not any(boxes.glob("boxes/*.json")):
            return
        # What cannot be removed stays written down, and ``sandbox.leftovers`` tells of it.
        with suppress(StokerError):
            async with SandboxHost.open(boxes) as host:
                await host.sweep()

    def hand_over(self) -> None:
        """Leave the workers to the other coordinators."""
        for worker in self._workers:
            if worker.process is not None and worker.process.poll() is None:
                # They end as children of ours if this process lives that long: somebody must reap.
                threading.Thread(target=worker.process.wait, daemon=True).start()
        self._workers.clear()
        self._release()

    def _is_keeper(self) -> bool:
        if self._shared and self._workers and self._keeper is None:
            self._keeper = take_lock(self._run.workers / "keeper.lock")
        return not self._shared or self._keeper is not None

    def _release(self) -> None:
        if self._keeper is not None:
            os.close(self._keeper)
            self._keeper = None

    def _look(self, worker: _Worker) -> None:
        if self._alive(worker):
            self._end_stopped(worker)
            return
        self._raise_failure(worker)
        now = self._clock.monotonic()
        if worker.process is not None:
            if now - worker.started_at < _BACKOFF_SECONDS_MAX:
                worker.early_ends += 1
            else:
                worker.early_ends = 0
            worker.not_before = now + min(
                _BACKOFF_SECONDS_MAX, 0.1 * 2**worker.early_ends if worker.early_ends > 1 else 0.0
            )
            worker.process = None
        if worker.early_ends > _EARLY_ENDS_MAX:
            raise WorkerLost(
                f"worker {worker.name} ended {worker.early_ends} times in a row soon after its "
                f"start; its log is {self._log(worker)}"
            )
        if now >= worker.not_before:
            self._start(worker, now)

    def _end_stopped(self, worker: _Worker) -> None:
        """End a worker that was stopped (SIGSTOP, a debugger) and is not continued.

        Its leases are long lost to others by then; the next incarnation takes its slots up again.
        """
        pid = self._pid(worker)
        if pid is None or not _is_stopped(pid):
            worker.stopped_at = None
        elif worker.stopped_at is None:
            worker.stopped_at = self._clock.monotonic()
        elif self._clock.monotonic() - worker.stopped_at >= STOPPED_SECONDS:
            _signal(pid, signal.SIGKILL)
            worker.stopped_at = None

    def _start(self, worker: _Worker, now: float) -> None:
        worker.started_at = now
        with self._log(worker).open("ab") as log:
            worker.process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-m",
                    "stoker.worker.main",
                    "--run-directory",
                    str(self._run.path),
                    "--settings",
                    str(self._run.settings),
                    "--name",
                    worker.name,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _alive(self, worker: _Worker) -> bool:
        if worker.process is not None and worker.process.poll() is None:
            return True
        return lock_is_held(worker.home / "lock")

    def _pid(self, worker: _Worker) -> int | None:
        if worker.process is not None and worker.process.poll() is None:
            return worker.process.pid
        if not lock_is_held(worker.home / "lock"):
            return None
        return next((seen.pid for seen in self.seen() if seen.name == worker.name), None)

    def _raise_failure(self, worker: _Worker) -> None:
        if worker.process is None:
            return  # an old failure of an earlier coordinator's worker says nothing about now
        with suppress(FileNotFoundError):
            record = msgspec.json.decode(
                (worker.home / "failed.json").read_bytes(), type=FaultRecord
            )
            raise from_record(record)

    def _log(self, worker: _Worker) -> Path:
        return self._run.logs / f"{worker.name}.out"


def _is_stopped(pid: int) -> bool:
    return _state(pid) in {"T", "t"}


def _is_running(pid: int) -> bool:
    return _state(pid) not in {"", "Z", "X"}


def _state(pid: int) -> str:
    """Return the kernel's letter for what a process does; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
