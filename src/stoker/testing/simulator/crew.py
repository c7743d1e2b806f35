"""The workers of a simulated run: the production ones on boxes, homes and stores in memory."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from stoker.broker.base import Ledger
from stoker.config.classes import WorkerClassSettings
from stoker.config.tree import Settings
from stoker.coordinator.workers import WorkerSeen
from stoker.journal.artifacts import ArtifactStore
from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import ExecutionPolicy, Isolation, Trust
from stoker.model.ids import WorkerId
from stoker.sandbox.base import Box, not_offered
from stoker.seams.clock import Clock
from stoker.seams.entropy import fresh_id
from stoker.testing.boxes import MemoryBackend
from stoker.worker.assembly import (
    Ground,
    assemble,
    make_ahead,
    meters_of,
    note_isolation,
    policies_of,
)
from stoker.worker.boxes import Boxes, Chosen
from stoker.worker.figures import WorkerFigures
from stoker.worker.loop import Worker
from stoker.worker.states import States


def without_isolation(classes: dict[str, WorkerClassSettings]) -> dict[str, WorkerClassSettings]:
    """Return ``classes`` as boxes in memory can serve them: trusted, and with no boundary."""
    open_to_all = {
        "isolation": Isolation.PROCESS, "trust": Trust.TRUSTED, "warm": False, "preload": ()
    }  # fmt: skip
    return {name: one.model_copy(update=open_to_all) for name, one in classes.items()}


class Crew:
    """All workers of a run."""

    def __init__(self, settings: Settings, artifacts: ArtifactStore, clock: Clock) -> None:
        self._settings = settings
        self._artifacts = artifacts
        self._clock = clock
        self._homes: list[_Home] = []
        self._workers: list[Worker] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(
        self, connect: Callable[[], Ledger], backend: Callable[[], MemoryBackend], cores: int
    ) -> None:
        """Start the workers the settings ask for, each with a connection and boxes of its own."""
        for number in range(self._settings.workers.count):
            home = _Home(f"w{number}")
            worker = await self._worker(home, connect(), backend(), cores)
            self._homes.append(home)
            self._workers.append(worker)
            self.tasks.append(asyncio.create_task(worker.run(), name=f"worker {home.name}"))

    def seen(self) -> tuple[WorkerSeen, ...]:
        """Return what every worker last said of itself."""
        return tuple(home.seen for home in self._homes if home.seen is not None)

    async def end(self) -> None:
        """Kill what runs and see every worker ended."""
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _worker(
        self, home: "_Home", ledger: Ledger, backend: MemoryBackend, cores: int
    ) -> Worker:
        settings, log = self._settings, _silent_log()

        async def choose(_policy: ExecutionPolicy) -> Chosen:
            return Chosen(backend, await backend.offer())

        classes = {n: one for n, one in settings.workers.classes.items() if not one.by_ticket}
        boxes = Boxes(choose, log, self._clock)
        make_ahead(boxes, classes)
        meters = meters_of(classes, cores=cores, now=self._clock.monotonic())
        await note_isolation(boxes, policies_of(settings, classes), meters)
        return assemble(
            Ground(
                settings=settings,
                classes=classes,
                meters=meters,
                ledger=ledger,
                home=home,
                boxes=boxes,
                artifacts=self._artifacts,
                states=_NoStates(),
                clock=self._clock,
                log=log,
            )
        )


class _Home:
    """Who a worker is (``worker.home.Home``), kept here; its status passes through its codec."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker_id = WorkerId(fresh_id("wrk_"))
        self.previous: WorkerId | None = None
        self.seen: WorkerSeen | None = None

    def renew(self) -> None:
        """Become another incarnation."""
        self.previous, self.worker_id = self.worker_id, WorkerId(fresh_id("wrk_"))

    def remember(self) -> None:
        """Keep nothing: there is no process that could die."""

    def write_status(self, figures: WorkerFigures) -> None:
        """Show the figures to the coordinator."""
        self.seen = msgspec.json.decode(msgspec.json.encode(figures), type=WorkerSeen)


class _NoStates(States):
    """Checkpoints are files, and there are none here."""

    def __init__(self) -> None:
        """Touch no directory."""

    async def keep(self, box: Box) -> Checkpoint:  # noqa: ARG002 - refused, whichever it is
        """Refuse. Raises ``BranchUnavailable``."""
        raise not_offered("checkpoints", "simulated")

    async def found(self, saved: Checkpoint) -> Checkpoint:  # noqa: ARG002 - as above
        """Refuse. Raises ``BranchUnavailable``."""
        raise not_offered("checkpoints", "simulated")


def _silent_log() -> FilteringBoundLogger:
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger("critical")
    )
    return log
