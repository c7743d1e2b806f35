"""Puts a coordinator together from what it stands on.

A run in processes (``execute``) and a simulated one (``testing.simulator``) hand in another ledger,
other hosts, another clock; what is built of them is the same.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from stoker.broker.base import Attach, Ledger
from stoker.config.tree import Settings
from stoker.coordinator.actions import ActionFactory
from stoker.coordinator.admission import Admission
from stoker.coordinator.appender import Appender
from stoker.coordinator.budget import Budget
from stoker.coordinator.checking import Checker
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.coordinator_parts import Parts
from stoker.coordinator.dispatch import Dispatcher
from stoker.coordinator.events import EventRouter
from stoker.coordinator.feed import GroupFeed
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.flow import Flow
from stoker.coordinator.flow_parts import FlowParts
from stoker.coordinator.hosts import HostLink, HostPool
from stoker.coordinator.lane import Lane
from stoker.coordinator.places import Places
from stoker.coordinator.plan import Plan
from stoker.coordinator.request import StopSignal
from stoker.coordinator.resuming import Resumer
from stoker.inference.base import Model, Pausing
from stoker.journal.artifacts import ArtifactStore
from stoker.observe.log import Log
from stoker.observe.metrics import Metrics
from stoker.seams.clock import Clock
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

ATTACHED = declare("coordinator.attached", "the run is ours; nothing was read or admitted")


@dataclass(slots=True, kw_only=True, frozen=True)
class Ground:
    """What a coordinator stands on."""

    settings: Settings
    plan: Plan
    ledger: Ledger
    model: Model
    pool: HostPool
    spawn: Callable[[int], Awaitable[HostLink]]
    """Starts a program host beside the pool's, for check replays."""
    artifacts: ArtifactStore
    metrics: Metrics
    log: Log
    clock: Clock
    stop: StopSignal
    feed: GroupFeed | None = None
    """The trainer that takes complete groups, where there is one."""


async def assemble(ground: Ground, stack: AsyncExitStack) -> Coordinator:
    """Attach to the ledger and return the coordinator of the plan; ``stack`` closes its parts.

    Raises:
        StokerError: the ledger cannot be reached.
    """
    settings, plan, clock = ground.settings, ground.plan, ground.clock
    name = plan.partition.name
    attached = await ground.ledger.attach(
        Attach(run_id=plan.run_id, partition=name, incarnation=fresh_id("crd_"))
    )
    reach(ATTACHED)
    appender = Appender(ground.ledger, plan.run_id, attached.fence, partition=name)
    stack.push_async_callback(appender.close)
    figures = RunFigures(ground.metrics)
    lane = Lane.of_run(ground.model, settings, clock, figures.answered, plan.partition)
    if isinstance(ground.model, Pausing):
        ground.model.watch_pauses(lane.pause, lane.resume)
    flow = _flow(ground, appender, figures, lane)
    resumer = Resumer(ground.ledger, ground.artifacts, clock, settings.workers)
    checks = settings.program.check_replays
    coordinator = Coordinator(
        Parts(
            ledger=ground.ledger,
            fence=attached.fence,
            appender=appender,
            lane=lane,
            admission=Admission(settings.admission, clock, plan.partition),
            resumer=resumer,
            checker=Checker(ground.spawn, resumer, plan.run_id, checks, figures, ground.log),
            budget=Budget(settings.budget, plan.partition),
            plan=plan,
            figures=figures,
            clock=clock,
            stop=ground.stop,
            flow=flow,
            feed=ground.feed,
            router=EventRouter(flow),
        )
    )
    flow.owner = ground.pool.listener = coordinator
    return coordinator


def _flow(ground: Ground, appender: Appender, figures: RunFigures, lane: Lane) -> Flow:
    artifacts = ground.artifacts
    flow = Flow(
        FlowParts(
            appender=appender,
            artifacts=artifacts,
            factory=ActionFactory(ground.settings, artifacts),
            figures=figures,
            clock=ground.clock,
            log=ground.log,
        )
    )
    flow.hosts = ground.pool
    flow.dispatcher = Dispatcher(lane, artifacts, flow.arrived, Places(ground.plan.group_size))
    return flow
