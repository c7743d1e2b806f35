"""What the lane's unused window waited for: a cause for every call-second of it.

A place in the window with nothing ready for it could have been used by a rollout that was
elsewhere. Once a second what was unused in it is charged to where active rollouts are: a worker
class whose actions they await, a pause of their program, the program itself; several are charged in
proportion. Places beyond the number of those rollouts want more rollouts: they are charged to
admission, or to there being no more work. Memory, weight updates and ready calls that were not
issued have figures of their own (``LaneTotals``).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from stoker.coordinator.lane import Lane
from stoker.coordinator.rollouts import ActiveRollout
from stoker.model.events import Verb

PROGRAMS = "programs"
"""A program host runs them, or they are handed from part to part."""
PAUSES = "pauses"
"""Sleeps and timers of programs."""
ADMISSION = "admission"
NO_WORK = "no more work"


def class_cause(worker_class: str) -> str:
    """Return the cause that a class is: its actions are awaited, queued or running."""
    return f"class {worker_class}"


class Unused:
    """Charges one lane's unused window."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._first = self._before = lane.totals()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Call-seconds by cause, up to the last look."""

    def look(self, active: Iterable[ActiveRollout], *, more: bool) -> None:
        """Charge what was unused since the last look; ``more``: rollouts wait to be begun."""
        now = self._lane.totals()
        since, self._before = now.since(self._before), now
        if since.room_seconds <= 0:
            return
        places = since.room_seconds / since.seconds
        elsewhere = Counter(cause for one in active if (cause := cause_of(one)) is not None)
        rollouts = elsewhere.total()
        filled = min(1.0, rollouts / places)
        for cause, count in elsewhere.items():
            self.seconds[cause] += since.room_seconds * filled * count / rollouts
        if filled < 1.0:
            self.seconds[ADMISSION if more else NO_WORK] += since.room_seconds * (1.0 - filled)

    def shares(self) -> dict[str, float]:
        """Return by cause the share of the window that it left unused, largest first."""
        whole = self._before.since(self._first).window_seconds
        ordered = sorted(self.seconds.items(), key=lambda one: -one[1])
        return {cause: seconds / whole for cause, seconds in ordered} if whole else {}


def cause_of(rollout: ActiveRollout) -> str | None:
    """Return where a rollout is that is not on the lane; ``None``: it is, with a call at least.

    One that awaits actions of several classes counts for the first it asked for.
    """
    first, paused = "", True
    for call in rollout.calls.values():  # one plain loop: ten thousand rollouts are looked at
        if call.verb is Verb.GENERATE:
            return None
        first = first or call.worker_class
        paused = paused and (call.verb is Verb.SLEEP or call.verb is Verb.TIMER)
    if rollout.in_turn or not rollout.calls:
        return PROGRAMS
    if first:
        return class_cause(first)
    return PAUSES if paused else PROGRAMS
