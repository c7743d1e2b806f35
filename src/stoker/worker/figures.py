"""What a worker looks like from outside: plain counters, and the record written once a second.

Taking a snapshot costs no scan of jobs. Busy shares are integrals of busy slots over time, so that
they mean the same whatever the interval between two looks.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from stoker.model.completion import Completion
from stoker.model.faults import FaultSide

from .adapting import SlotChange, SlotControl, SlotTotals


class IsolationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What isolation a class got on this host."""

    isolation: str
    rung: str
    shared_kernel: bool


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker class, now."""

    slots: int
    busy: int
    finished: int
    """Completions reported since the worker started."""
    busy_share: float
    """Busy slot seconds ÷ slot seconds since the worker started."""
    execution_seconds: float = 0.0
    """Run time of all finished actions together."""
    statuses: dict[str, int] = {}
    """Completions by status."""
    isolation: IsolationFigures | None = None


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, now."""

    worker_id: str
    name: str
    pid: int
    state: str
    """``starting``, ``working``, ``draining`` or ``ended``."""
    classes: dict[str, ClassFigures]
    boxes_alive: int
    boxes_leaked: int
    """Boxes that could not be removed; expected value 0."""
    boxes_ready: int = 0
    """Boxes made ahead that wait for use."""
    boxes_taken: int = 0
    """Boxes that had waited when they were asked for, since the worker started."""
    boxes_made: int = 0
    """Boxes that were made when they were asked for."""
    boxes_swept: int = 0
    """Boxes of dead incarnations removed at the start."""
    environments: int = 0
    """Environments held."""
    faults: dict[str, int] = {}
    """Completions with a fault, by ``side:code``."""
    memory_short: bool = False
    """No more work is taken on: the reserve of memory is reached."""
    stale: int = 0
    """Results whose lease was no longer ours."""
    fenced: int = 0
    """Times the worker killed its own boxes for want of contact."""


class ClassMeter:
    """Slots of one class, and how long they were busy."""

    def __init__(self, slots: int, now: float) -> None:
        self.slots = slots
        self.busy = 0
        self.finished = 0
        self.execution_seconds = 0.0
        self.statuses: Counter[str] = Counter()
        self.isolation: IsolationFigures | None = None
        self.control: SlotControl | None = None
        """Changes ``slots``; ``None``: they are fixed."""
        self.faults = 0
        self.queued_seconds = 0.0
        """Waits for a worker of what was finished, summed."""
        self._slot_seconds = 0.0
        self._changed = now
        self._busy_seconds = 0.0

    @property
    def free(self) -> int:
        """Slots nobody uses."""
        return max(0, self.slots - self.busy)

    def take(self, now: float) -> None:
        """One more slot is in use."""
        self._settle(now)
        self.busy += 1

    def give(self, now: float) -> None:
        """One slot is free again."""
        assert self.busy > 0, "a slot was given back twice"
        self._settle(now)
        self.busy -= 1

    def adapt(self, now: float, *, memory_short: bool, pressure: float | None) -> SlotChange | None:
        """Let the control look; return what it changed."""
        if self.control is None:
            return None
        self._settle(now)
        totals = SlotTotals(
            finished=self.finished,
            faults=self.faults,
            busy_seconds=self._busy_seconds,
            queued_seconds=self.queued_seconds,
        )
        change = self.control.observe(totals, now, memory_short=memory_short, pressure=pressure)
        self.slots = self.control.slots
        return change

    def figures(self, now: float) -> ClassFigures:
        """Return this class, now."""
        self._settle(now)
        span = self._slot_seconds
        return ClassFigures(
            slots=self.slots,
            busy=self.busy,
            finished=self.finished,
            busy_share=min(1.0, self._busy_seconds / span) if span > 0 else 0.0,
            execution_seconds=self.execution_seconds,
            statuses=dict(self.statuses),
            isolation=self.isolation,
        )

    def _settle(self, now: float) -> None:
        self._busy_seconds += self.busy * max(0.0, now - self._changed)
        self._slot_seconds += self.slots * max(0.0, now - self._changed)
        self._changed = now


class Meters:
    """All counters of one worker process, over its incarnations."""

    def __init__(self, slots: Mapping[str, int], now: float) -> None:
        self.classes = {name: ClassMeter(count, now) for name, count in slots.items()}
        self.faults: Counter[str] = Counter()
        self.stale = 0
        self.fenced = 0
        self.swept = 0
        self.listeners: list[Callable[[str, Completion], None]] = []
        """Told of every reported result."""

    def completed(self, worker_class: str, completion: Completion) -> None:
        """Count one reported result."""
        meter = self.classes.get(worker_class)
        if meter is not None:
            meter.finished += 1
            meter.execution_seconds += completion.timings.run_seconds
            meter.queued_seconds += completion.timings.queue_seconds
            fault = completion.fault
            meter.faults += fault is not None and fault.side is FaultSide.INFRASTRUCTURE
            meter.statuses[completion.status.value] += 1
        if completion.fault is not None:
            self.faults[f"{completion.fault.side.value}:{completion.fault.code}"] += 1
        for listener in self.listeners:
            listener(worker_class, completion)
