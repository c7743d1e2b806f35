"""One replica as the lane sees it: how much room it has, and whether to trust it.

healthy → (three failures in a row) → resting → (a pause that doubles) → on probation, one call at
a time → healthy at the first success, or resting again. A success of a call issued before the rest
counts too, so a server that is merely full (429) is soon back. Without a rest, a replica that
refuses at once would always have room and swallow the tries of every call.
"""

from enum import StrEnum

from stoker.inference.base import ReplicaInfo

FAILURES_MAX = 3
"""Failures in a row before a replica rests."""
REST_SECONDS = 1.0
"""First rest; each one after it without a success is twice as long."""
REST_SECONDS_MAX = 30.0


class Health(StrEnum):
    """Whether a replica is given calls."""

    HEALTHY = "healthy"
    RESTING = "resting"
    PROBATION = "probation"
    """Is given one call at a time."""


class LaneReplica:
    """Window and health of one replica."""

    __slots__ = ("_failures", "_rests", "health", "held", "index", "running", "window")

    def __init__(self, info: ReplicaInfo) -> None:
        self.index = info.replica
        self.window = info.window
        self.held = 0
        """Room given out: calls running, and calls about to."""
        self.running = 0
        self.health = Health.HEALTHY
        self._failures = 0
        self._rests = 0

    @property
    def room(self) -> int:
        """Calls it could be given now."""
        if self.health is Health.RESTING:
            return 0
        if self.health is Health.PROBATION:
            return max(0, 1 - self.held)
        return self.window - self.held

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
        return min(REST_SECONDS_MAX, REST_SECONDS * 2.0 ** min(self._rests - 1, 16))

    def rested(self) -> None:
        """End a rest, unless a success ended it before."""
        if self.health is Health.RESTING:
            self.health = Health.PROBATION
