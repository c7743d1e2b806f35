"""Contact with the ledger: when a worker must stop believing in its leases. Pure, but for time.

The ledger ends a lease after ``lease_seconds`` of silence. A worker counts from the moment it
*sent* the last request that was answered, which is never later than the moment the ledger counts
from, and gives up after two thirds: its boxes are dead before anybody else may begin the same work
(I3, I12).
"""

FENCE_SHARE = 2 / 3
"""Share of a lease without contact after which a worker kills its own boxes."""
BEAT_SHARE = 1 / 3
"""Share of a lease between two heartbeats."""
WATCH_SHARE = 1 / 12
"""Share of a lease between two looks at the own clock."""


class Contact:
    """When the ledger last answered, and when this process last looked at its clock."""

    def __init__(self, lease_seconds: float, now: float) -> None:
        self.lease_seconds = lease_seconds
        self._heard_for = now
        self._looked = now

    def heard(self, sent_at: float) -> None:
        """Note that a request sent at ``sent_at`` was answered."""
        self._heard_for = max(self._heard_for, sent_at)

    def silence(self, now: float) -> float:
        """Return for how long nothing that was sent has been answered, seconds."""
        return max(0.0, now - self._heard_for)

    def look(self, now: float) -> float:
        """Note that this process runs; return for how long it did not, seconds."""
        gap = max(0.0, now - self._looked)
        self._looked = now
        return gap

    def trusted(self, now: float) -> bool:
        """Return whether leases may still be believed: effects may begin and go on."""
        return self.silence(now) <= self.lease_seconds * FENCE_SHARE

    def verdict_holds(self, sent_at: float, now: float) -> bool:
        """Return whether the answer to a request sent at ``sent_at`` is still worth anything.

        A process that was stopped after asking may read an old *ok* when it goes on (B2).
        """
        return now - sent_at <= self.lease_seconds * FENCE_SHARE
