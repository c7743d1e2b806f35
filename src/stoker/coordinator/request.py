"""What it takes to execute a run, and what comes back."""

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.config.tree import Settings
from stoker.coordinator.partition import WHOLE, Partition
from stoker.coordinator.view import RunSnapshot
from stoker.model.ids import RunId


class Changed(enum.StrEnum):
    """What to do when a resumed run's program, model or limits differ from the recorded ones."""

    REFUSE = "refuse"
    """Say what differs and stop (default)."""
    RESTART = "restart"
    """Rollouts that are not finished start anew under a new epoch; recorded."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run to execute or resume."""

    program: Path
    """Python file with the rollout."""
    program_name: str | None
    """Which rollout in it; ``None`` when there is just one."""
    tasks: Path
    """JSON lines; each ``{"task_id": …, "data": {…}}`` or a bare object."""
    model: str
    """``scripted:FILE``, ``sim:PROFILE``, ``torch:FOLDER`` or ``http://HOST:PORT[,…]``; just
    a name where ``execute`` is given the model itself."""
    settings: Settings
    runs_directory: Path
    """Parent of run directories."""
    resume: RunId | None = None
    """Go on with this run, which there must be."""
    run_id: RunId | None = None
    """Go on with this run, or begin it; ``None``: begin one under a fresh id."""
    partition: Partition = WHOLE
    """Which part of the run is executed; others are their own coordinators' (``run_id``)."""
    changed: Changed = Changed.REFUSE


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    snapshot: RunSnapshot
    resumable: bool
    """Work is left: ``stoker run … --resume RUN`` goes on."""


Observer = Callable[[RunSnapshot], None]
"""Called about four times a second with a fresh snapshot; must not block."""


class StopSignal:
    """How a person ends a run early: first drain, then stop. Both leave it resumable."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether no new rollouts should be admitted."""
        return self._draining.is_set()

    @property
    def stopping(self) -> bool:
        """Whether the coordinator should end now."""
        return self._stopping.is_set()

    def drain(self) -> None:
        """Admit nothing new; finish what is active."""
        self._draining.set()

    def stop(self) -> None:
        """End now; unfinished rollouts are resumed later."""
        self._draining.set()
        self._stopping.set()

    async def wait_stopping(self) -> None:
        """Return once ``stop`` was called."""
        await self._stopping.wait()
