"""The ideal of a closed batch, and lock-step: what the lane's makespan is held against.

Both are exact for work without memory limits whose turns take one device step each. The ideal has
no overhead and no limit: all rollouts start at once, and a free device takes what is ready, first
come first served, up to its window.
"""

import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from stoker.inference.profile import SimProfile
from stoker.testing.simulator.trace import RolloutTrace


class Makespan(msgspec.Struct, frozen=True):
    """How long a batch took, and for how much of it the device worked."""

    seconds: float
    active_seconds: float

    @property
    def active_share(self) -> float:
        """Share of the time in which the device worked."""
        return self.active_seconds / self.seconds


def ideal(profile: SimProfile, work: Sequence[RolloutTrace]) -> Makespan:
    """Return the greedy schedule of ``work`` without any overhead."""
    returns: list[tuple[float, int, int]] = []
    """(when its next call is ready, rollout, its next turn), soonest first."""
    ready = deque((number, 0) for number in range(len(work)))
    now = active = end = 0.0
    while ready or returns:
        if not ready:
            now = max(now, returns[0][0])
        while returns and returns[0][0] <= now:
            _, rollout, turn = heapq.heappop(returns)
            ready.append((rollout, turn))
        batch = [ready.popleft() for _ in range(min(len(ready), profile.window))]
        step = profile.a + profile.c * len(batch)
        now += step
        active += step
        for rollout, turn in batch:
            back = now + work[rollout].turns[turn].wait
            end = max(end, back)
            if turn + 1 < len(work[rollout].turns):
                heapq.heappush(returns, (back, rollout, turn + 1))
    return Makespan(end, active)


def lock_step(profile: SimProfile, work: Sequence[RolloutTrace]) -> Makespan:
    """Return the schedule in which all rollouts take a turn, then all tools run, and so on."""
    seconds = active = 0.0
    for turn in range(max(len(trace.turns) for trace in work)):
        going = [trace.turns[turn] for trace in work if turn < len(trace.turns)]
        full, rest = divmod(len(going), profile.window)
        step = full * (profile.a + profile.c * profile.window)
        step += profile.a + profile.c * rest if rest else 0.0
        active += step
        seconds += step + max(one.wait for one in going)
    return Makespan(seconds, active)
