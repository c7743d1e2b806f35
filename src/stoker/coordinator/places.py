"""In which order ready model calls go: by arrival, less what makes them urgent, in seconds.

A call of a group that is nearly complete, and one whose rollout began under older weights, count as
having come earlier; a rollout's first call as having come later. Since the credit is bounded, so is
who can overtake: nobody that came ``CREDIT_SECONDS_MAX`` later. That is all the ageing there is.
"""

from collections import Counter

from stoker.coordinator.rollouts import ActiveRollout

GROUP_SECONDS = 10.0
"""Credit of the last rollout that its group waits for; less while more are left."""
STALE_SECONDS = 5.0
"""Credit for each policy version its tokens are behind …"""
STALE_SECONDS_MAX = 20.0
"""… and the most it gets for that."""
NEW_SECONDS = 10.0
"""A first call counts as having come so much later."""
CREDIT_SECONDS_MAX = GROUP_SECONDS + STALE_SECONDS_MAX + NEW_SECONDS


def place(now: float, number: int, *, first: bool, credit: float = 0.0) -> tuple[float, int]:
    """Return the place of a call that is ready at ``now``: smaller goes first.

    ``number``: its rollout's; ``first``: of that rollout; ``credit``: in seconds.
    """
    return (now + NEW_SECONDS if first else now - credit), number


class Places:
    """Orders calls of one run."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._ended: Counter[str] = Counter()
        self._newest = 0

    def order(self, rollout: ActiveRollout, now: float) -> tuple[float, ...]:
        """Return the place of a call that is ready now: smaller goes first."""
        if not rollout.policy_versions:
            return place(now, rollout.order, first=True)
        ended = self._ended[rollout.admitted.group_id] / max(1, self._group_size - 1)
        self._newest = max(self._newest, *rollout.policy_versions)
        behind = self._newest - min(rollout.policy_versions)
        credit = GROUP_SECONDS * ended + min(STALE_SECONDS_MAX, STALE_SECONDS * behind)
        return place(now, rollout.order, first=False, credit=credit)

    def ended(self, rollout: ActiveRollout) -> None:
        """A rollout of a group has its outcome."""
        group = rollout.admitted.group_id
        self._ended[group] += 1
        if self._ended[group] >= self._group_size:
            del self._ended[group]
