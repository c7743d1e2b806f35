"""Puts a worker together from what it stands on.

A worker process (``service``) and a simulated one (``testing.simulator``) hand in another ledger,
other boxes, another clock; what is built of them is the same.
"""

from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from stoker.broker.base import Ledger
from stoker.config.classes import WorkerClassSettings
from stoker.config.tree import Settings
from stoker.errors import IsolationUnavailable
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.seams.clock import Clock

from .adapting import SlotControl
from .boxes import Boxes
from .contact import Contact
from .environments import Environments
from .executor import Executor
from .figures import IsolationFigures, Meters
from .hands import Hands
from .home import Home
from .loop import Worker
from .observation import Artifacts
from .ready import Ahead
from .reports import Reports
from .states import States
from .tools import Tools

CALL_BASELINE = "python"
_READY = 2
"""Boxes made ahead of a class that does not say how many, where they take next to nothing."""
"""Baseline of the boxes of stateless tools."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Ground:
    """What a worker stands on."""

    settings: Settings
    classes: dict[str, WorkerClassSettings]
    """Those it serves."""
    meters: Meters
    ledger: Ledger
    home: Home
    boxes: Boxes
    artifacts: Artifacts
    states: States
    clock: Clock
    log: FilteringBoundLogger


def make_ahead(boxes: Boxes, classes: dict[str, WorkerClassSettings]) -> None:
    """Have ``boxes`` keep as many waiting as the classes ask for, a few where one asks nothing."""
    ahead = {}
    for name, one in classes.items():
        # A queue of the team's own ends its consumers as it likes: what waits would be left behind.
        unsaid = 0 if one.by_ticket else _READY
        most = unsaid if one.ready is None else one.ready
        if most:
            ahead[name] = Ahead(most, one.ready_idle, light=one.ready is None)
    boxes.ready.ahead = ahead


def policies_of(
    settings: Settings, classes: dict[str, WorkerClassSettings]
) -> dict[str, ExecutionPolicy]:
    """Return the execution policy of each class."""
    shared = settings.sandbox.accept_shared_kernel
    return {name: one.policy(accept_shared_kernel=shared) for name, one in classes.items()}


def meters_of(
    classes: dict[str, WorkerClassSettings], *, cores: int, now: float, adapt: bool = True
) -> Meters:
    """Return the slots of each class, one per core where it names none; ``adapt``: or control."""
    meters = Meters({name: one.slots or cores for name, one in classes.items()}, now)
    for name, one in classes.items():
        meter = meters.classes[name]
        if adapt and one.slots_max is not None:
            start = max(one.slots_min, min(one.slots_max, meter.slots))
            meter.control = SlotControl(
                start=start, least=one.slots_min, most=one.slots_max, now=now
            )
            meter.slots = meter.control.slots
    return meters


async def note_isolation(
    boxes: Boxes, policies: dict[str, ExecutionPolicy], meters: Meters
) -> None:
    """Note what isolation each class gets.

    Raises:
        IsolationUnavailable: a class cannot have what it asks for.
    """
    for name, policy in policies.items():
        try:
            offer = (await boxes.backend(policy)).offer
        except IsolationUnavailable as error:
            raise IsolationUnavailable(f"worker class {name}: {error.message}") from error
        meters.classes[name].isolation = IsolationFigures(
            isolation=offer.isolation.value,
            rung=offer.rung.value,
            shared_kernel=offer.shared_kernel,
        )


def assemble(ground: Ground) -> Worker:
    """Return the worker; it has spoken to nobody yet."""
    environments = Environments(ground.boxes)
    known = ground.settings.sandbox.baselines.get(CALL_BASELINE)
    baseline = Baseline(name=CALL_BASELINE, environment=known.environment if known else {})
    policies = policies_of(ground.settings, ground.classes)
    tools = Tools(ground.boxes, environments, policies, baseline, ground.states)
    executor = Executor(tools, environments, ground.artifacts)

    def hands(reports: Reports, contact: Contact) -> Hands:
        return Hands(
            reports=reports,
            executor=executor,
            environments=environments,
            contact=contact,
            meters=ground.meters,
            clock=ground.clock,
            log=ground.log,
        )

    return Worker(
        ledger=ground.ledger,
        home=ground.home,
        boxes=ground.boxes,
        make_hands=hands,
        meters=ground.meters,
        clock=ground.clock,
        log=ground.log,
    )
