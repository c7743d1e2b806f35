"""What each coordinator of a run has of its own, and how they share the rest (design 0009).

A coordinator's own: ``coordinator-1.lock``, ``status-1.json``, ``logs/coordinator-1.log``; without
the number where the run is not divided. Shared: record, tasks, settings, ledger, artifacts and
local workers. Every coordinator of a divided run holds ``run.lock`` together with the others; the
last one turns it into its own and ends what they shared. The kernel frees all of it when a process
dies. Of an undivided run the one coordinator is always the last, and none of these locks exist.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from stoker.broker.place import owner_pid
from stoker.config.tasks import read_tasks
from stoker.coordinator.partition import Partition, divided
from stoker.coordinator.record import RunDirectory
from stoker.errors import RunOwned
from stoker.seams.locks import lock_is_held, make_sole, take_lock

_LOOK_SECONDS = 0.02
_OWNER_SECONDS = 5.0
_OWNER_LOOKS = 250


class Part:
    """The files of one partition, and the lock its coordinator holds."""

    def __init__(self, run: RunDirectory, partition: Partition) -> None:
        self.partition = partition
        self._run = run
        self._suffix = "" if partition.is_whole else f"-{partition.index}"
        self._lock = run.path / f"coordinator{self._suffix}.lock"
        self.log = run.logs / f"coordinator{self._suffix}.log"
        self.status = run.status.with_stem(f"status{self._suffix}")

    def host_log(self, number: int) -> Path:
        """Return where program host ``number`` writes."""
        return self._run.logs / f"host{self._suffix}-{number}.out"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the partition for this process.

        Raises:
            RunOwned: another living coordinator holds it.
        """
        descriptor = take_lock(self._lock)
        if descriptor is None:
            what = (
                "the run" if self.partition.is_whole else f"partition {self.partition} of the run"
            )
            raise RunOwned(
                f"{what} in {self._run.path} is owned by living process {self._written()}; nothing "
                "was changed; stop that process first, or watch it with: stoker status"
            )
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> str:
        """Return the process that holds the partition now, or nothing."""
        return self._written() if lock_is_held(self._lock) else ""

    def _written(self) -> str:
        return self._lock.read_text(encoding="ascii").strip() or "unknown"


def parts_of(run: RunDirectory) -> tuple[Part, ...]:
    """Return every partition of a recorded run.

    Raises:
        RunNotFound: it has no record.
    """
    return tuple(Part(run, partition) for partition in divided(run.record.partition_count))


def part_of_task(run: RunDirectory, task_id: str) -> Part:
    """Return the partition of a recorded run that sees to a task of it."""
    parts = parts_of(run)
    if len(parts) == 1:
        return parts[0]
    tasks = read_tasks(run.tasks, run.record.settings["run"]["task_limit"])
    run_id = run.record.run_id
    return next(
        part
        for part in parts
        if any(task.task_id == task_id for task in part.partition.hand(run_id, tasks))
    )


def is_running(run: RunDirectory) -> bool:
    """Return whether a coordinator of a recorded run lives, of whichever partition."""
    return any(part.holder() for part in parts_of(run))


class Membership:
    """One coordinator among those of its run."""

    def __init__(self, run: RunDirectory, partition: Partition) -> None:
        self._run = run
        self._partition = partition
        self._descriptor: int | None = None
        self._last: bool | None = None

    async def join(self) -> None:
        """Become one of the run's coordinators; waits while the last one before tidies up.

        Raises:
            RunDirectoryUnusable: it cannot be written.
        """
        while not self._partition.is_whole:
            self._run.create()
            descriptor = take_lock(self._run.path / "run.lock", shared=True)
            if descriptor is not None:
                if os.fstat(descriptor).st_nlink:
                    self._descriptor = descriptor
                    return
                os.close(descriptor)  # the directory was removed meanwhile: a run that never began
            await asyncio.sleep(_LOOK_SECONDS)

    def leave(self) -> bool:
        """Stop being one of them; whether nobody else is, so that what was shared is ours to end.

        Until ``close`` nobody joins a run whose last coordinator this was. Asked again, the answer
        is the same.
        """
        if self._last is None:
            self._last = self._descriptor is None or make_sole(self._descriptor)
        return self._last

    def close(self) -> None:
        """Let others join again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for and hold the right to read and write the record."""
        descriptor: int | None = None
        while not self._partition.is_whole and descriptor is None:
            descriptor = take_lock(self._run.path / "record.lock")
            if descriptor is None:
                await asyncio.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def others(self) -> list[str]:
        """Return the other living coordinators, for people."""
        return [
            f"{one} (process {holder})"
            for one in divided(self._partition.count)
            if one != self._partition and (holder := Part(self._run, one).holder())
        ]


async def end_owner(directory: Path) -> None:
    """Ask the ledger's owner to close; whoever needs it next starts it again.

    Without this it would idle for a while after every run. It is asked, never killed: it closes
    its database first, and a client that is connected just then starts another.
    """
    pid = owner_pid(directory)
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    for _ in range(_OWNER_LOOKS):
        if owner_pid(directory) != pid:
            return
        await asyncio.sleep(_OWNER_SECONDS / _OWNER_LOOKS)
