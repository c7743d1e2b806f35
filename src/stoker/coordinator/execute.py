"""Executing a run from a request: make or find its directory, bring up its parts, run, let go.

Bad input is found before anything is started; a run that never began leaves nothing behind.
"""

import asyncio
import shutil
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec

from stoker.broker.base import Durability, Ledger
from stoker.broker.client import connect
from stoker.broker.limits import database_of, limits_of, refuse_other
from stoker.broker.network import remote_of
from stoker.config.tasks import read_tasks
from stoker.config.tree import Settings
from stoker.coordinator.admission import Admission
from stoker.coordinator.agreement import (
    Inputs,
    differences,
    record_of,
    require_same_run,
    require_usable,
)
from stoker.coordinator.assembly import Ground, assemble
from stoker.coordinator.branch_requests import BranchWatch
from stoker.coordinator.cancelling import CancelWatch
from stoker.coordinator.common import CommonLedger
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.hosts import HostLink, HostPool
from stoker.coordinator.plan import Plan, policy_digests
from stoker.coordinator.record import (
    RunDirectory,
    RunRecord,
    find_run,
)
from stoker.coordinator.request import Changed, Observer, RunReport, RunRequest, StopSignal
from stoker.coordinator.sharing import Membership, Part, end_owner
from stoker.coordinator.snapshots import Snapshots
from stoker.coordinator.storage import StorageWatch, require_room
from stoker.coordinator.telling import Telling
from stoker.coordinator.trainer import Serving, TrainerSeat
from stoker.coordinator.workers import LocalWorkers
from stoker.errors import BadInput, RunChanged, RunOwned, StokerError
from stoker.inference.base import Model
from stoker.inference.open import open_model, start_model
from stoker.journal.artifacts import ArtifactStore
from stoker.model.ids import RunId
from stoker.observe.log import Log, open_log
from stoker.observe.metrics import Metrics, start_endpoint
from stoker.rollout.hosts import HostProcess
from stoker.rollout.messages import Loaded
from stoker.seams.clock import Clock, SystemClock
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

RECORDED = declare("coordinator.recorded", "the run has its record; no ledger has been asked")

_READY_SECONDS = 60.0
_CHECK_SECONDS = 5.0
"""What check replays may still take at the end of a run."""


async def execute(
    request: RunRequest,
    *,
    observer: Observer | None = None,
    stop: StopSignal | None = None,
    model: Model | None = None,
    trainer: TrainerSeat | None = None,
) -> RunReport:
    """Execute or resume a run, or one partition of it; return when every rollout of it has its
    outcome or ``stop`` says so.

    ``model`` is used in place of the one ``request.model`` names (which then only names it in the
    record): an engine of this process, as ``inference.callable.CallableModel``, one for each
    partition. It is closed here. With a ``trainer`` (``stoker.start_run``) the run lasts until that
    leaves. Several partitions may be executed in one process and loop.

    Raises:
        BadInput: program, tasks, model, settings or run directory cannot be used; nothing is left.
        StokerError: a part broke under way; the run can be resumed.

    **Cancellation:** as ``stop.stop()``: the run can be resumed.
    **Durability:** every outcome in the report is on disk.
    """  # noqa: D205 - one thought
    execution = _Execution(request, observer, stop or StopSignal(), model, trainer)
    return await execution.execute()


class _Execution:
    def __init__(
        self,
        request: RunRequest,
        observer: Observer | None,
        stop: StopSignal,
        model: Model | None,
        trainer: TrainerSeat | None,
    ) -> None:
        self._request = request
        self._model = model
        self._settings: Settings = request.settings
        self._observer = observer
        self._stop = stop
        self._clock: Clock = SystemClock()
        self._trainer = trainer
        self._partition = request.partition
        self._part: Part
        self._membership: Membership
        self._common: CommonLedger
        """All set once it is known which run this is."""
        self._made = False
        """The run's record is ours."""
        self._stack = AsyncExitStack()
        self._metrics = Metrics()
        self._log: Log
        """Opened once the run directory is owned."""
        self._notices: tuple[str, ...] = ()
        """What the model says it cannot give."""

    async def execute(self) -> RunReport:
        request = self._request
        require_usable(request)
        if request.resume is not None:
            run = find_run(request.resume, request.runs_directory)
        else:
            run = RunDirectory(request.runs_directory / (request.run_id or fresh_id("run_")))
        known = run.record if run.recorded else None
        if known is not None:
            require_same_run(request, known)
        inputs = self._read(request.tasks if known is None else run.tasks)
        self._common = CommonLedger.of(run, self._settings, fresh=known is None)
        if known is None:
            run.create()
        self._membership = Membership(run, self._partition)
        await self._membership.join()
        try:
            await self._common.join(self._settings)
            return await self._owned(run, inputs)
        except BadInput:
            if (self._made or not run.recorded) and self._membership.leave():
                _remove_unbegun(run, request.runs_directory)
            raise
        finally:
            if not (self._partition.is_whole and self._common.place is None) and self._is_last():
                # Whoever left before us saw us, perhaps only being refused, and ended nothing.
                await self._workers(run).stop()
                await end_owner(run.ledger)
            self._membership.close()
            self._common.close()

    def _is_last(self) -> bool:
        """Stop sharing; whether nobody else shares workers and ledger with this coordinator."""
        # Both are let go of: whoever leaves the run next must not find us at the ledger still.
        return all((self._membership.leave(), self._common.leave()))

    def _read(self, tasks: Path) -> Inputs:
        if not self._request.program.is_file():
            raise BadInput(f"there is no program file {self._request.program}; nothing was started")
        found = read_tasks(tasks, self._settings.run.task_limit)
        model = self._model or open_model(
            self._request.model, base=Path.cwd(), settings=self._settings.model
        )
        return Inputs(found, tasks.read_bytes(), model)

    async def _owned(self, run: RunDirectory, inputs: Inputs) -> RunReport:
        require_room(run.artifacts, self._settings.storage.artifacts_max)
        self._part = Part(run, self._partition)
        with self._part.owned():
            async with self._stack:
                self._stack.push_async_callback(inputs.model.close)
                log = open_log(self._part.log, level=self._settings.observe.log_level)
                self._stack.callback(log.close)
                self._log = log
                await start_model(inputs.model, self._stop.wait_stopping())
                self._notices = inputs.model.info().notices
                for notice in self._notices:
                    log.event("model_notice", text=notice)
                return await self._prepared(run, inputs)

    async def _prepared(self, run: RunDirectory, inputs: Inputs) -> RunReport:
        pool = HostPool(self._spawn, self._settings.program.hosts)
        self._stack.push_async_callback(pool.close)
        loaded = await pool.start()
        self._admission().require_fit(loaded.boxes)
        async with self._membership.turn():
            record = self._settle_record(run, inputs, loaded)
        plan = Plan(
            run_id=record.run_id,
            partition=self._partition,
            tasks=self._partition.hand(record.run_id, inputs.tasks),
            group_size=self._settings.run.group_size,
            spare=self._settings.run.spare,
            branches_max=self._settings.run.branches_max,
            seed=self._settings.run.seed,
            restarts=record.restarts,
            loaded=loaded,
            policy_digests=policy_digests(self._settings),
        )
        workers = self._workers(run)
        self._stack.push_async_callback(self._leave, workers)
        # A partition without tasks needs no worker, and waits for none.
        keeping = asyncio.create_task(workers.keep() if plan.total else asyncio.sleep(0))
        self._stack.push_async_callback(_cancelled, keeping)
        ledger = await self._ledger(run)
        if plan.total:
            await self._workers_ready(workers, keeping)
        coordinator = await self._assemble(run, plan, ledger, inputs.model, pool)
        self._stack.push_async_callback(coordinator.close)
        return await self._run(run, coordinator, workers, keeping)

    def _admission(self) -> Admission:
        return Admission(self._settings.admission, self._clock, self._partition)

    def _workers(self, run: RunDirectory) -> LocalWorkers:
        count, place = self._settings.workers.count, self._common.place
        shared = place is not None or not self._partition.is_whole
        return LocalWorkers(place or run, count, self._clock, shared=shared)

    async def _leave(self, workers: LocalWorkers) -> None:
        """Stop the local workers, or leave them to the run's other coordinators."""
        if self._is_last():
            await workers.stop()
        else:
            workers.hand_over()

    # --- parts -------------------------------------------------------------------------------

    async def _ledger(self, run: RunDirectory) -> Ledger:
        settings = self._settings.ledger
        limits = limits_of(settings, self._settings.workers, self._settings.services)
        durability = Durability(settings.durability)
        ledger = await connect(
            run.ledger,
            role="coordinator",
            limits=limits,
            durability=durability,
            idle_exit_seconds=settings.idle_exit,
            elsewhere=remote_of(settings) or database_of(settings),
        )
        self._stack.push_async_callback(self._end_owner, run.ledger)
        self._stack.push_async_callback(ledger.close)
        refuse_other(await ledger.capabilities(), limits, durability, run.ledger)
        return ledger

    async def _assemble(
        self, run: RunDirectory, plan: Plan, ledger: Ledger, model: Model, pool: HostPool
    ) -> Coordinator:
        trainer = self._trainer
        ground = Ground(
            settings=self._settings,
            plan=plan,
            ledger=ledger,
            model=model,
            pool=pool,
            spawn=self._spawn,
            artifacts=ArtifactStore(run.artifacts),
            metrics=self._metrics,
            log=self._log,
            clock=self._clock,
            stop=self._stop,
            feed=trainer.feed if trainer is not None else None,
        )
        coordinator = await assemble(ground, self._stack)
        if trainer is not None:
            trainer.serving.set_result(Serving(run, coordinator, model))
        return coordinator

    async def _workers_ready(self, workers: LocalWorkers, keeping: "asyncio.Task[None]") -> None:
        """Wait until a local worker works, so that a host that cannot box says so at once."""
        deadline = self._clock.monotonic() + _READY_SECONDS
        while self._settings.workers.count and self._clock.monotonic() < deadline:
            if keeping.done():
                keeping.result()
            if workers.ready():
                return
            await asyncio.sleep(0.02)

    async def _spawn(self, number: int) -> HostLink:
        return await HostProcess.start(
            self._request.program,
            log=self._part.host_log(number),
            name=self._request.program_name,
            stuck_seconds=self._settings.program.stuck,
        )

    # --- the record --------------------------------------------------------------------------

    def _settle_record(self, run: RunDirectory, inputs: Inputs, loaded: Loaded) -> RunRecord:
        """Write the record of a new run; hold one that is there against what is given now."""
        fresh = record_of(
            RunId(run.path.name), self._request, loaded, inputs, created=self._clock.now().wall
        )
        if run.recorded:
            record = run.record
            require_same_run(self._request, record)
            changes = differences(record, fresh)
            if changes:
                self._require_changeable(record, changes)
            elif not self._partition.is_whole:
                return record  # it is the others' as well, and says the same
            fresh = msgspec.structs.replace(
                fresh,
                run_id=record.run_id,
                created=record.created,
                restarts=record.restarts + bool(changes),
            )
        tasks = None if run.recorded else inputs.tasks_bytes
        self._made |= tasks is not None
        run.write_down(fresh, self._settings.model_dump_json(indent=1).encode(), tasks)
        reach(RECORDED)
        return fresh

    def _require_changeable(self, record: RunRecord, changes: list[str]) -> None:
        if self._request.changed is Changed.REFUSE:
            raise RunChanged(
                f"run {record.run_id} was made with another "
                + "; another ".join(changes)
                + "; nothing was changed; give it what it was made with, or --changed restart "
                "to start its unfinished rollouts anew"
            )
        if others := self._membership.others():
            raise RunOwned(
                f"run {record.run_id} cannot be restarted with another program, model or limits "
                f"while partition {' and '.join(others)} lives; nothing was changed; stop it first"
            )

    # --- running -----------------------------------------------------------------------------

    async def _run(
        self,
        run: RunDirectory,
        coordinator: Coordinator,
        workers: LocalWorkers,
        keeping: "asyncio.Task[None]",
    ) -> RunReport:
        port = self._settings.observe.metrics_port
        if port is not None:
            endpoint = start_endpoint(self._metrics, self._partition.port(port))
            self._stack.callback(endpoint.close)
        shared = self._settings.sandbox.accept_shared_kernel
        snapshots = Snapshots(coordinator, run, self._part, workers, accept_shared_kernel=shared)
        for notice in self._notices:
            snapshots.said(notice)
        self._log.event("run_started", run=run.path.name, rollouts=coordinator.parts.plan.total)
        storage = StorageWatch(run.artifacts, self._settings.storage.artifacts_max, self._stop)
        telling = Telling(self._settings, coordinator, snapshots, self._observer)
        told = asyncio.create_task(telling.run(self._metrics, self._clock))
        besides = [
            asyncio.create_task(coordinator.parts.checker.run()),
            asyncio.create_task(storage.run(snapshots.hold)),
            asyncio.create_task(CancelWatch(run, coordinator).run()),
        ]
        BranchWatch(run, coordinator)
        for task in besides:
            self._stack.push_async_callback(_cancelled, task)
        for task in (keeping, told, *besides):
            task.add_done_callback(lambda done: _trouble(coordinator, done))
        try:
            await coordinator.run()
            if coordinator.left == 0:
                await coordinator.parts.checker.settle(_CHECK_SECONDS)
            coordinator.state = "finished" if coordinator.left == 0 else "stopped"
        finally:
            await _cancelled(told)
            await _cancelled(keeping)
            await self._leave(workers)
            if self._membership.leave():  # else the last one may be ending the ledger's owner now
                with suppress(StokerError):  # a ledger that broke has nothing newer to say
                    await snapshots.refresh()
            snapshot = telling.last()
            snapshots.write(snapshot)
            self._log.event("run_ended", run=run.path.name, left=coordinator.left)
        return RunReport(snapshot=snapshot, resumable=coordinator.left > 0)

    async def _end_owner(self, directory: Path) -> None:
        if self._is_last():
            await end_owner(directory)


def _trouble(coordinator: Coordinator, done: "asyncio.Task[None]") -> None:
    if not done.cancelled():
        error = done.exception()
        if isinstance(error, Exception):
            coordinator.broke(error)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


def _remove_unbegun(run: RunDirectory, runs_directory: Path) -> None:
    """Leave nothing behind of a run that admitted nothing."""
    if not any(run.path.glob("status*.json")):
        shutil.rmtree(run.path, ignore_errors=True)
        with suppress(OSError):
            runs_directory.rmdir()
