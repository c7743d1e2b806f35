"""Puts a worker together from its settings, and ends it when nobody needs it any more."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
from structlog.typing import FilteringBoundLogger

from stoker.broker.base import Durability, Ledger
from stoker.broker.client import connect
from stoker.broker.limits import database_of, limits_of
from stoker.broker.network import remote_of
from stoker.config.boxes import SmolSettings
from stoker.config.classes import WorkerClassSettings
from stoker.config.tree import Settings
from stoker.journal.artifacts import ArtifactStore
from stoker.model.execution import ExecutionPolicy
from stoker.sandbox.egress.gate import EgressDecision
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend
from stoker.sandbox.smol.target import CloudTarget
from stoker.seams.clock import SystemClock
from stoker.seams.faultpoints import declare, reach
from stoker.seams.locks import lock_is_held

from .assembly import Ground, assemble, make_ahead, meters_of, note_isolation, policies_of
from .boxes import Boxes, Chosen
from .desk import TicketDesk
from .home import WorkerHome
from .loop import Worker
from .metrics import WorkerMetrics
from .process import cores, cpu_pressure, memory_available, yield_cores
from .remote import RemoteStore
from .states import States

_LOOK_SECONDS = 1.0

SWEPT = declare("worker.swept", "boxes of dead incarnations are gone; nothing is enrolled")


class Service:
    """One worker process, from settings to its end."""

    def __init__(
        self,
        home: WorkerHome,
        settings: Settings,
        log: FilteringBoundLogger,
        *,
        ticket_class: str | None = None,
    ) -> None:
        """``ticket_class``: serve only this class, and only what is brought by ticket."""
        self._home = home
        self._ticket_class = ticket_class
        self._settings = settings
        self._log = log
        self._clock = SystemClock()
        self._tasks: list[asyncio.Task[None]] = []
        self._worker: Worker | None = None
        self._end_asked = 0
        self.desk: TicketDesk | None = None
        """Where tickets are brought, of a worker that serves a class by ticket."""
        self._reserve: Callable[[], None] = lambda: None

    def end(self, *, at_once: bool = False) -> None:
        """Drain, or kill."""
        self._end_asked = max(self._end_asked, 2 if at_once else 1)
        if self._worker is not None:
            self._worker.drain()
            if at_once:
                self._worker.kill()

    async def open(self, stack: AsyncExitStack, metrics_port: int | None) -> None:
        """Find backends, sweep, connect.

        Raises:
            IsolationUnavailable: a class cannot have the isolation it asks for.
            LedgerUnavailable: there is no ledger to serve.
        """
        sandbox = self._settings.sandbox
        host = await stack.enter_async_context(
            SandboxHost.open(
                self._home.directory / "boxes",
                uid_base=sandbox.uid_base,
                uid_count=sandbox.uid_count,
                egress_told=self._egress_told,
                baselines_max=sandbox.baselines_max,
                cloud=_cloud(sandbox.smol),
            )
        )

        async def choose(policy: ExecutionPolicy) -> Chosen:
            backend = await choose_backend(policy, host)
            return Chosen(backend, await backend.offer())

        self._reserve = lambda: yield_cores(host.maker().pid)
        boxes = Boxes(choose, self._log)
        boxes.reserve_memory_bytes = self._settings.workers.reserve_memory
        boxes.memory_available = memory_available
        boxes.cpu_pressure = cpu_pressure
        classes = self._classes()
        make_ahead(boxes, classes)
        by_queue = self._ticket_class is None  # a queue of the team's own has its own concurrency
        now = self._clock.monotonic()
        meters = meters_of(classes, cores=cores(), now=now, adapt=by_queue)
        await note_isolation(boxes, policies_of(self._settings, classes), meters)
        meters.swept = await self._sweep(boxes)
        reach(SWEPT)
        ledger = await self._connect()
        stack.push_async_callback(ledger.close)
        artifacts = ArtifactStore(self._home.run_directory / "artifacts")
        self._worker = assemble(
            Ground(
                settings=self._settings,
                classes=classes,
                meters=meters,
                ledger=ledger,
                home=self._home,
                boxes=boxes,
                artifacts=artifacts,
                states=self._states(artifacts),
                clock=self._clock,
                log=self._log,
            )
        )
        if self._ticket_class is not None:
            slots = meters.classes[self._ticket_class].slots
            self.desk = TicketDesk(self._worker, ledger, self._ticket_class, slots)
        if metrics_port is not None:
            metrics = WorkerMetrics(self._worker.figures, metrics_port)
            meters.listeners.append(metrics.observe)
            self._tasks.append(asyncio.create_task(metrics.run()))
        self._log.info(
            "worker_started",
            slots={name: meter.slots for name, meter in meters.classes.items()},
            isolation={name: str(meter.isolation) for name, meter in meters.classes.items()},
        )

    def _egress_told(self, decision: EgressDecision) -> None:
        tell = self._log.info if decision.allowed else self._log.warning
        tell("egress", **msgspec.structs.asdict(decision))

    async def run(self) -> None:
        """Serve until told to end, or until nobody needs us."""
        assert self._worker is not None, "opened first"
        self._tasks.append(asyncio.create_task(self._until_idle(self._worker)))
        if self._end_asked:
            self.end(at_once=self._end_asked > 1)
        try:
            await self._worker.run(polling=self._ticket_class is None)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sweep(self, boxes: Boxes) -> int:
        began = self._clock.monotonic()
        swept = await boxes.sweep()
        if swept:
            seconds = round(self._clock.monotonic() - began, 3)
            self._log.warning("boxes_swept", boxes=swept, seconds=seconds)
        return swept

    async def _connect(self) -> Ledger:
        ledger = self._settings.ledger
        return await connect(
            self._home.run_directory / "ledger",
            role="worker",
            limits=limits_of(ledger, self._settings.workers, self._settings.services),
            durability=Durability(ledger.durability),
            idle_exit_seconds=ledger.idle_exit,
            elsewhere=remote_of(ledger) or database_of(ledger),
        )

    def _classes(self) -> dict[str, WorkerClassSettings]:
        """Return the classes this worker serves."""
        every = self._settings.workers.classes
        if self._ticket_class is not None:
            return {self._ticket_class: every[self._ticket_class]}
        return {name: one for name, one in every.items() if not one.by_ticket}

    def _states(self, artifacts: ArtifactStore) -> States:
        storage = self._settings.storage
        remote = RemoteStore(storage.url, endpoint=storage.endpoint) if storage.url else None
        return States(artifacts, self._home.directory / "states", remote)

    async def _until_idle(self, worker: Worker) -> None:
        """End the worker when no coordinator lived and nothing was leased for long enough."""
        limit = self._settings.workers.idle_exit
        locks = "coordinator*.lock"  # a run may have several coordinators
        seen = self._clock.monotonic()
        while True:
            if self._settings.workers.reserve_cores > 0:
                self._reserve()
            await asyncio.sleep(min(_LOOK_SECONDS, limit / 4))
            now = self._clock.monotonic()
            if any(lock_is_held(lock) for lock in self._home.run_directory.glob(locks)):
                seen = now
            alone = now - seen >= limit
            if alone and worker.idle_seconds >= limit:
                self._log.info("idle", seconds=limit)
                worker.drain()
            elif alone and worker.silent_seconds >= limit:
                self._log.warning("idle", seconds=limit, ledger="out of reach")
                worker.kill()


def _cloud(settings: SmolSettings) -> CloudTarget | None:
    if not settings.url:
        return None
    return CloudTarget(url=settings.url, key_file=settings.key_file, image=settings.image)
