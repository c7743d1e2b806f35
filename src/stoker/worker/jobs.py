"""One lease in a worker's hands, and the gate that lets a suspect run alone.

A job is *waiting* (for its environment's turn, for the gate), *starting* (asked the ledger),
*running* (effects possible) or *reporting*. It can be stopped until it reports: a finished result
is always handed in, and the ledger decides what it is worth.
"""

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stoker.broker.base import Held, Lease
from stoker.model.ids import WorkerId


class Phase(enum.Enum):
    """Where a job stands."""

    WAITING = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    REPORTING = enum.auto()


class StopReason(enum.StrEnum):
    """Why a job ends without a result."""

    CANCEL = "cancel"
    """The coordinator does not want it any more; report that it was let go."""
    LOST = "lost"
    """The lease is somebody else's; say nothing."""
    FENCED = "fenced"
    """Out of contact; killed before somebody else may begin."""
    RELEASE = "release"
    """Not begun; given back."""
    KILLED = "killed"
    """The worker is told to end at once."""


@dataclass(eq=False, slots=True)
class Job:
    """One delivery of one action."""

    lease: Lease
    worker_id: WorkerId
    """The incarnation it was leased by."""
    received_at: float
    """Monotonic time of its arrival."""
    phase: Phase = Phase.WAITING
    stopped: StopReason | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    entered: bool = False
    """Its task runs: a task cancelled before its first step would skip every ``finally``."""

    @property
    def held(self) -> Held:
        """Its lease as the ledger is asked about it."""
        return Held(action_id=self.lease.action.action_id, fence=self.lease.fence)

    def left_seconds(self, now: float) -> float:
        """Return what is left until the action's deadline."""
        return self.lease.deadline_seconds - (now - self.received_at)

    def stop(self, reason: StopReason) -> None:
        """End it without a result, unless it already reports one. Never waits."""
        if self.stopped is not None or self.phase is Phase.REPORTING:
            return
        self.stopped = reason
        if self.task is not None and self.entered:
            self.task.cancel()


class Gate:
    """Lets many jobs run side by side, or one suspect of a poison quite alone (I5)."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._running = 0
        self._alone = False
        self._suspects = 0

    @property
    def closed(self) -> bool:
        """Whether a suspect runs or waits to."""
        return self._suspects > 0

    @asynccontextmanager
    async def passing(self, *, alone: bool) -> AsyncIterator[None]:
        """Be inside the gate. **Cancellation:** one that waits leaves no trace."""
        if alone:
            self._suspects += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_pass(alone=alone))
                self._running += 1
                self._alone = alone
            try:
                yield
            finally:
                # No await between here and the bookkeeping: a cancelled job must not keep the gate.
                self._running -= 1
                self._alone = False if alone else self._alone
        finally:
            if alone:
                self._suspects -= 1
            await asyncio.shield(self._announce())

    def _may_pass(self, *, alone: bool) -> bool:
        if alone:
            return self._running == 0
        return not self._alone and self._suspects == 0

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()
