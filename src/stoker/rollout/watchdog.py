"""The watchdog: says which program line holds a host.

A thread looks ten times a second whether one step has lasted too long and then says so once, with
the line from the main thread's frames. A step that holds the interpreter lock keeps the thread from
looking; for that, Python's own C watchdog writes every stack to the log a little later, re-armed
at each look.
"""

import faulthandler
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

from stoker.model.ids import RolloutId
from stoker.rollout.position import executing
from stoker.seams.clock import Clock

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0


class Step(NamedTuple):
    """One step of one rollout, as it began."""

    rollout_id: RolloutId
    file: str
    began: float
    """Monotonic seconds."""
    limit: float
    """Seconds it may last."""


class Watchdog:
    """Watches the thread that made it."""

    def __init__(
        self, stuck_seconds: float, clock: Clock, tell: Callable[[Step, float, str], None]
    ) -> None:
        self._stuck_seconds = stuck_seconds
        self._clock = clock
        self._tell = tell
        self._watched = threading.get_ident()
        self._step: Step | None = None

    def start(self) -> None:
        """Begin to look, on a daemon thread."""
        self._arm()  # now: a program may hold the interpreter before the first look
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def begins(self, rollout_id: RolloutId, file: str, limit: float | None = None) -> None:
        """A step of the program in ``file`` begins; ``limit`` overrides the usual bound."""
        limit = limit or self._stuck_seconds
        self._step = Step(rollout_id, file, self._clock.monotonic(), limit)

    def ends(self) -> None:
        """The step is over."""
        self._step = None

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._stuck_seconds + _GRACE_SECONDS)

    def _look(self) -> None:
        told: Step | None = None
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            self._arm()
            step = self._step
            if step is None or step is told:
                continue
            lasted = self._clock.monotonic() - step.began
            if lasted >= step.limit:
                frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - its purpose
                where = executing(frame, step.file)
                if self._step is step:  # else it ended while we looked
                    told = step
                    self._tell(step, lasted, where)
