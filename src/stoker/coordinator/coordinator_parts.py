"""What a coordinator is built on."""

from dataclasses import dataclass, field

from stoker.broker.base import Ledger
from stoker.coordinator.admission import Admission
from stoker.coordinator.appender import Appender
from stoker.coordinator.budget import Budget
from stoker.coordinator.checking import Checker
from stoker.coordinator.events import EventRouter
from stoker.coordinator.feed import GroupFeed
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.flow import Flow
from stoker.coordinator.lane import Lane
from stoker.coordinator.plan import Plan
from stoker.coordinator.request import StopSignal
from stoker.coordinator.resuming import Resumer
from stoker.model.ids import Fence
from stoker.observe.log import RolloutLine
from stoker.seams.clock import Clock


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a coordinator is built on; ``assembly`` makes it."""

    ledger: Ledger
    fence: Fence
    appender: Appender
    lane: Lane
    admission: Admission
    resumer: Resumer
    plan: Plan
    figures: RunFigures
    clock: Clock
    stop: StopSignal
    flow: Flow
    router: EventRouter
    checker: Checker
    budget: Budget
    feed: GroupFeed | None = None
    """The trainer that takes complete groups, where there is one."""
    lines: list[RolloutLine] = field(default_factory=list)
    """Finished rollouts since somebody last took them."""
