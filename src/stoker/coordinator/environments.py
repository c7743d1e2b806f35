"""One environment of a rollout as the coordinator sees it: who holds it, and how to rebuild it.

An environment lives in one worker's box. When that worker is lost the box is gone; a rebuilt one is
the next *generation*: opened from its last checkpoint, or the baseline, then every action that
finished after it run again in order. That
is allowed only while all of them are replayable; otherwise the environment is lost, never silently
the bare baseline. Where boxes reach further than themselves (a destination, a writable mount), an
action's work there would be done again: no action of such a class is replayable.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from stoker.config.tree import WorkerSettings
from stoker.coordinator.calls import Call
from stoker.model.checkpoint import Checkpoint
from stoker.model.ids import (
    ActionId,
    CallPath,
    EnvironmentId,
    RolloutId,
    WorkerId,
    environment_id,
)
from stoker.rollout.arguments import BoxArguments, EnvironmentArguments

GENERATIONS_MAX = 4
"""Lives of one environment; one that keeps taking its workers down is not rebuilt for ever."""


@dataclass(slots=True)
class Restoration:
    """A rebuild under way."""

    reason: str
    steps: deque[Call]
    """Finished calls still to be run again, in order; the opening comes first."""
    parked: list[Call] = field(default_factory=list)
    """Calls whose action was lost; submitted again when the environment stands."""
    spent: list[ActionId] = field(default_factory=list)
    """Actions run for the rebuild, acknowledged with its end."""
    running: ActionId | None = None


@dataclass(slots=True)
class Environment:
    """One environment."""

    opening: Call
    """The call that opened it."""
    environment_id: EnvironmentId
    worker_class: str
    generation: int = 0
    holder: WorkerId | None = None
    log: list[Call] = field(default_factory=list)
    """Finished calls that changed it, in order."""
    replayable: bool = True
    """Every call in ``log`` may be run again."""
    restoration: Restoration | None = None
    lost: bool = False
    saved: Checkpoint | None = None
    """Where another generation begins; ``None``: at the baseline."""
    outside: bool = False
    """Its boxes reach further than themselves: nothing that ran there is run again."""

    @property
    def path(self) -> CallPath:
        """Path of the call that opened it."""
        return self.opening.path

    def restorable(self) -> bool:
        """Whether another generation may be built."""
        whole = self.replayable or (self.saved is not None and not self.log)
        return whole and not self.lost and self.generation + 1 < GENERATIONS_MAX

    def ran(self, call: Call) -> None:
        """Note a finished call that changed it."""
        arguments = msgspec.msgpack.decode(call.arguments, type=BoxArguments)
        self.log.append(call)
        self.replayable &= arguments.replayable

    def keep(self, saved: bytes) -> None:
        """Begin other generations at a checkpoint that was taken after everything in the log."""
        self.saved = msgspec.msgpack.decode(saved, type=Checkpoint)
        self.log.clear()
        self.replayable = not self.outside


def opened(rollout_id: RolloutId, opening: Call, workers: WorkerSettings) -> Environment:
    """Return the record of the environment that ``opening`` opens."""
    arguments = msgspec.msgpack.decode(opening.arguments, type=EnvironmentArguments)
    name = arguments.worker_class or workers.environment_class
    known = workers.classes.get(name)
    outside = known is not None and known.reaches_outside
    begins = arguments.begins
    return Environment(
        opening=opening,
        environment_id=environment_id(rollout_id, opening.path),
        worker_class=name,
        replayable=not outside,
        saved=None if begins is msgspec.UNSET else begins.checkpoint,
        outside=outside,
    )
