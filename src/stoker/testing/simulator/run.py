"""A whole run in one thread and virtual time: ``simulate_run``.

Coordinator, lane, admission, broker core, worker and program host are the production ones, put
together by the functions that put processes together. Between them lie ``links``; the device is
simulated, boxes are dictionaries, tools are functions that sleep in virtual time. No thread,
process, socket, file or clock of the machine is used, save that a program's source is read once for
its digest. The same arguments give the same run, to the byte of its journals.
"""

import asyncio
import io
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import JournalRequest
from stoker.broker.limits import limits_of
from stoker.config.tree import Settings
from stoker.coordinator.assembly import Ground, assemble
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.hosts import HostLink, HostPool
from stoker.coordinator.lane_figures import LaneTotals
from stoker.coordinator.listing import finished_of, summaries
from stoker.coordinator.partition import WHOLE
from stoker.coordinator.plan import Plan, policy_digests
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import StopSignal
from stoker.coordinator.sharing import Part
from stoker.coordinator.snapshots import Snapshots
from stoker.coordinator.telling import Telling
from stoker.coordinator.unused import PROGRAMS
from stoker.coordinator.view import RunSnapshot
from stoker.errors import InternalError
from stoker.inference.policy import FunctionPolicy
from stoker.inference.profile import SimProfile
from stoker.inference.sim import SimModel
from stoker.journal.memory import MemoryArtifacts
from stoker.model.generation import GenerateRequest, Generation
from stoker.model.ids import RolloutId, RunId
from stoker.model.outcome import Outcome
from stoker.model.task import Task
from stoker.model.value import canonical_bytes, content_digest
from stoker.observe.log import Log
from stoker.observe.metrics import Metrics
from stoker.rollout.messages import Loaded
from stoker.rollout.program import Rollout
from stoker.seams.entropy import seeded
from stoker.testing.boxes import Judge, MemoryBackend, Script, small_shell
from stoker.testing.simulator.crew import Crew, without_isolation
from stoker.testing.simulator.links import HostInProcess, LedgerLink, Owner
from stoker.testing.simulator.whereabouts import ON_REPLICA, READY, Whereabouts
from stoker.testing.virtual_clock import VirtualClock, VirtualLoop, run_virtual

RUN = RunId("run_simulated")
DAY_SECONDS = 86_400.0
_MOMENT_SECONDS = 1.0


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run meets, and how long things take there."""

    device: SimProfile
    """Its ``policy`` is not read: ``answer`` says what the model says."""
    answer: Callable[[GenerateRequest], object] = lambda _request: "go"
    """Text, or an ``inference.policy.Answer``; the same for the same request."""
    tools: Script = small_shell
    """What programs in boxes do; its sleeps are virtual."""
    judge: Judge | None = None
    """What ``ctx.score`` decides; ``None``: passed where the solution's file is there."""
    sync_seconds: float = 0.002
    """A sync of the ledger's disk."""
    message_seconds: float = 0.000_1
    """One way between two processes."""
    cores: int = 2
    """Slots of a worker class that names none."""


class Moment(msgspec.Struct, frozen=True):
    """Where the active rollouts were at one second of the run."""

    at: float
    rollouts: dict[str, int]
    """Place → how many; the places are those of ``whereabouts``."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a simulated run; seconds are virtual."""

    seconds: float
    """From the coordinator's start to the last outcome, or to where it was stopped."""
    outcomes: dict[RolloutId, Outcome]
    """Of rollouts that have one."""
    journals: dict[RolloutId, tuple[bytes, ...]]
    """Every event of each rollout, as the ledger stores it."""
    idle_seconds: dict[str, float]
    """No replica worked, by true cause."""
    unused: dict[str, float]
    """Call-seconds in which a place of the window was free, by true cause."""
    lane: LaneTotals
    """What the lane counted itself."""
    snapshot: RunSnapshot
    """What the run said of itself at its end; ``snapshot.lane.unused`` is its own account."""
    timeline: tuple[Moment, ...]
    log: str
    """The coordinator's log."""
    left_behind: int
    """Actions the ledger still has: without an end, or with a result that nobody took."""

    @property
    def digest(self) -> str:
        """Digest of every byte of the journals."""
        return content_digest(canonical_bytes(self.journals))


def simulate_run(
    program: Rollout,
    tasks: Sequence[Task],
    settings: Settings,
    outside: Outside,
    *,
    seed: int = 0,
    until: float = DAY_SECONDS,
) -> SimulatedRun:
    """Run ``program`` on ``tasks`` under ``settings`` and return what became of it.

    ``seed`` decides ids, jitter and what rollouts draw, in place of ``run.seed``. A run that has
    not ended ``until`` then is stopped there, as by a person. Worker classes are trusted and have
    no isolation here, and checkpoints of boxes are refused.

    Raises:
        StokerError: a part broke, as in a real run.
    """
    classes = without_isolation(settings.workers.classes)
    changes = {
        "run": settings.run.model_copy(update={"seed": seed}),
        "workers": settings.workers.model_copy(update={"classes": classes}),
    }
    run = _Run(program, tuple(tasks), settings.model_copy(update=changes), outside)
    with seeded(seed):
        return run_virtual(run.whole(until))


class _Run:
    """One run; run on a virtual loop."""

    def __init__(
        self, program: Rollout, tasks: tuple[Task, ...], settings: Settings, outside: Outside
    ) -> None:
        self._program = program
        self._digest = program.source_digest()
        self._tasks = tasks
        self._settings = settings
        self._outside = outside
        self._clock = VirtualClock()
        self._artifacts = MemoryArtifacts()
        rollouts = len(tasks) * (settings.run.group_size + settings.run.spare)
        self._where = Whereabouts(outside.device.window * outside.device.replicas, rollouts)
        self._metrics = Metrics()
        self._lines = io.StringIO()
        self._moments: list[Moment] = []
        self._owner: Owner

    async def whole(self, until: float) -> SimulatedRun:
        """Bring the parts up, run, and read back what is in the ledger."""
        settings, outside = self._settings, self._outside
        async with AsyncExitStack() as stack:
            limits = limits_of(settings.ledger, settings.workers, settings.services)
            self._owner = Owner(limits, self._clock, outside.sync_seconds)
            stack.push_async_callback(self._owner.close)
            pool = HostPool(self._spawn, settings.program.hosts)
            stack.push_async_callback(pool.close)
            plan = self._plan(await pool.start())
            crew = Crew(settings, self._artifacts, self._clock)
            stack.push_async_callback(crew.end)
            await crew.start(
                self._connect, lambda: MemoryBackend(outside.tools, outside.judge), outside.cores
            )
            stop = StopSignal()
            asyncio.get_running_loop().call_later(until, stop.stop)
            coordinator = await assemble(self._ground(plan, pool, stop), stack)
            stack.push_async_callback(coordinator.close)
            return await self._run(coordinator, crew)

    def _connect(self) -> LedgerLink:
        return LedgerLink(self._owner, self._outside.message_seconds, self._where)

    async def _spawn(self, number: int) -> HostLink:
        where = self._where if number >= 0 else Whereabouts(0, 0)  # check replays do not count
        seconds = self._outside.message_seconds
        return HostInProcess(self._program, self._digest, seconds, self._clock, where)

    def _plan(self, loaded: Loaded) -> Plan:
        run = self._settings.run
        return Plan(
            run_id=RUN,
            tasks=self._tasks,
            group_size=run.group_size,
            spare=run.spare,
            seed=run.seed,
            restarts=0,
            loaded=loaded,
            policy_digests=policy_digests(self._settings),
        )

    def _ground(self, plan: Plan, pool: HostPool, stop: StopSignal) -> Ground:
        return Ground(
            settings=self._settings,
            plan=plan,
            ledger=self._connect(),
            model=_Model(self._outside, self._where),
            pool=pool,
            spawn=self._spawn,
            artifacts=self._artifacts,
            metrics=self._metrics,
            log=Log(self._lines, self._settings.observe.log_level, self._clock),
            clock=self._clock,
            stop=stop,
        )

    async def _run(self, coordinator: Coordinator, crew: Crew) -> SimulatedRun:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "made by run_virtual"
        run = RunDirectory(Path("/simulated"))
        snapshots = _Unwritten(coordinator, run, Part(run, WHOLE), crew, accept_shared_kernel=False)
        telling = Telling(self._settings, coordinator, snapshots, None)
        besides = [
            asyncio.create_task(telling.run(self._metrics, self._clock)),
            asyncio.create_task(coordinator.parts.checker.run()),
            asyncio.create_task(self._look()),
        ]
        for task in (*besides, *crew.tasks):
            task.add_done_callback(lambda done: _trouble(coordinator, done))
        loop.set_exception_handler(lambda _loop, met: coordinator.broke(_met(met)))
        self._where.parked = coordinator.parts.lane.parked
        began = self._clock.monotonic()
        loop.on_passing(self._where.passes)
        try:
            await coordinator.run()
            seconds = self._clock.monotonic() - began
        finally:
            loop.on_passing(lambda _seconds: None)
            for task in besides:
                task.cancel()
            await asyncio.wait(besides)
        coordinator.state = "finished" if coordinator.left == 0 else "stopped"
        return await self._outcome(seconds, telling.last(), coordinator)

    async def _look(self) -> None:
        while True:
            self._moments.append(Moment(self._clock.monotonic(), self._where.counts()))
            await asyncio.sleep(_MOMENT_SECONDS)

    async def _outcome(
        self, seconds: float, snapshot: RunSnapshot, coordinator: Coordinator
    ) -> SimulatedRun:
        outcomes: dict[RolloutId, Outcome] = {}
        journals: dict[RolloutId, tuple[bytes, ...]] = {}
        async for summary in summaries(self._owner, RUN):
            request = JournalRequest(run_id=RUN, rollout_id=summary.rollout_id)
            journals[summary.rollout_id] = (await self._owner.journal(request)).events
            if (finished := finished_of(summary)) is not None:
                outcomes[summary.rollout_id] = finished.outcome
        return SimulatedRun(
            seconds=seconds,
            outcomes=outcomes,
            journals=journals,
            idle_seconds=dict(self._where.idle),
            unused=dict(self._where.unused),
            lane=coordinator.parts.lane.totals(),
            snapshot=snapshot,
            timeline=tuple(self._moments),
            log=self._lines.getvalue(),
            left_behind=await self._left_behind(),
        )

    async def _left_behind(self) -> int:
        stats = await self._owner.stats()
        going = (c.queued + c.leased + c.started + c.parked for c in stats.classes.values())
        return stats.unacknowledged + sum(going)


class _Model(SimModel):
    """The simulated server; tells which calls are on a replica."""

    def __init__(self, outside: Outside, where: Whereabouts) -> None:
        super().__init__(outside.device, FunctionPolicy("simulated", outside.answer))
        self._where = where

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample, as a ``SimModel``."""
        rollout, path = request.rollout_id, request.request_id.partition("/")[2]
        self._where.calls += 1
        self._where.put(rollout, path, ON_REPLICA)
        place = READY  # tried again, or withdrawn
        try:
            generation = await super().generate(replica, request)
            place = PROGRAMS
        finally:
            self._where.calls -= 1
            self._where.put(rollout, path, place)
        return generation


class _Unwritten(Snapshots):
    """Snapshots without a file."""

    def write(self, snapshot: RunSnapshot) -> None:
        """Write nothing."""


def _trouble(coordinator: Coordinator, done: "asyncio.Task[None]") -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, Exception):
        coordinator.broke(error)


def _met(met: dict[str, Any]) -> Exception:
    error = met.get("exception")
    return error if isinstance(error, Exception) else InternalError(f"simulated: {met['message']}")
