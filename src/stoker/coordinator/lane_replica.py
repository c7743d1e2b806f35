"""One replica as the lane sees it: how much room it has, and whether to trust it.

healthy → (three failures in a row) → resting → (a pause that doubles) → on probation → healthy at
the first success, or resting again. A success of a call issued before the rest counts too, so a
server that is merely full (429) is soon back. Without a rest, a replica that refuses at once would
always have room and swallow the tries of every call. On probation it gets one call, and twice as
many each time none has ended for a while: one hung call says little about a server.
"""

from enum import StrEnum

from stoker.inference.base import ReplicaInfo

FAILURES_MAX = 3
"""Failures in a row before a replica rests."""
REST_SECONDS = 1.0
"""First rest; each one after it without a success is twice as long."""
REST_SECONDS_MAX = 30.0
PROBE_SECONDS = 10.0
"""After so long on probation without an answer, twice as many calls are tried."""


class Health(StrEnum):
    """Whether a replica is given calls."""

    HEALTHY = "healthy"
    RESTING = "resting"
    PROBATION = "probation"
    """Is given few calls, to see."""


class LaneReplica:
    """Window and health of one replica."""

    __slots__ = (
        "_before",
        "_failures",
        "_probes",
        "_rests",
        "health",
        "held",
        "index",
        "spell",
        "window",
    )

    def __init__(self, info: ReplicaInfo) -> None:
        self.index = info.replica
        self.window = info.window
        self.held = 0
        """Room given out: calls running, and calls about to."""
        self.health = Health.HEALTHY
        self._failures = 0
        self._rests = 0
        self.spell = 0
        """Counts its rests, so that a timer of an earlier one is told apart."""
        self._probes = 0
        """Calls it may be given on probation."""
        self._before = 0
        """Calls in flight from before the probation."""

    @property
    def room(self) -> int:
        """Calls it could be given now."""
        if self.health is Health.RESTING:
            return 0
        if self.health is Health.PROBATION:
            probing = self.held - min(self._before, self.held)
            return max(0, min(self.window - self.held, self._probes - probing))
        return max(0, self.window - self.held)  # the window may have become smaller

    def succeeded(self) -> None:
        """Note an answer: whatever was wrong is over."""
        self._failures = self._rests = 0
        self.health = Health.HEALTHY

    def failed(self) -> float | None:
        """Note a failure; return for how long it rests from now, or ``None``."""
        self._failures += 1
        if self.health is Health.RESTING:
            return None
        if self.health is Health.HEALTHY and self._failures < FAILURES_MAX:
            return None
        self.health = Health.RESTING
        self._rests += 1
        self.spell += 1
        return min(REST_SECONDS_MAX, REST_SECONDS * 2.0 ** min(self._rests - 1, 16))

    def rested(self, spell: int) -> bool:
        """End rest ``spell`` with a probation, unless it is over; return whether that was done."""
        if self.health is not Health.RESTING or self.spell != spell:
            return False
        self.health = Health.PROBATION
        self._before = self.held
        self._probes = 1
        return True

    def probe_more(self, spell: int) -> bool:
        """Allow twice as many calls if the probation after rest ``spell`` still lasts."""
        if self.health is not Health.PROBATION or self.spell != spell:
            return False
        self._probes = min(self.window, 2 * self._probes)
        return True
