"""The peers of the lane's bench: the value each was tuned to in each regime, and a quarter off it.

A tuned value is found once, offline; what a user has is near it at best. So each peer is also run
at a quarter less and a quarter more of what it was tuned to, on the same work.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.testing.simulator.policies import Pinned, Semaphore, StagedQueues, UsageAimd
from stoker.testing.simulator.regimes import STATIONARY, Regime
from stoker.testing.simulator.world import Policy

TUNED = 1.0
FACTORS = (0.75, TUNED, 1.25)
"""Of the tuned value."""
_SPEED_MIN = 1e-9


def _scaled(count: int, factor: float) -> int:
    return max(1, round(factor * count))


def _staged(regime: Regime, factor: float) -> Policy:
    rollouts, calls = regime.staged
    return StagedQueues(_scaled(rollouts, factor), _scaled(calls, factor))


PEERS: dict[str, Callable[[Regime, float], Policy]] = {
    "semaphore": lambda regime, factor: Semaphore(_scaled(regime.semaphore, factor)),
    "staged": _staged,
    "pinned": lambda regime, factor: Pinned(
        factor * regime.pinned_share * regime.shape.context_mean
    ),
    "usage": lambda regime, factor: UsageAimd(factor * regime.usage_aim),
}
_TUNED_TO: dict[str, Callable[[Regime], object]] = {
    "semaphore": lambda regime: regime.semaphore,
    "staged": lambda regime: list(regime.staged),
    "pinned": lambda regime: regime.pinned_share,
    "usage": lambda regime: regime.usage_aim,
}

Ratios = dict[str, dict[float, float]]
"""Ours ÷ a peer's tokens a second, by peer and by factor of its tuned value."""


def against(
    regime: Regime,
    ours: float,
    speed: Callable[[Policy], float],
    *,
    factors: Iterable[float] = FACTORS,
    known: Mapping[tuple[str, float], float],
) -> Ratios:
    """Return ``ours`` ÷ what ``speed`` gives for each peer; ``known`` speeds are not run again."""
    return {
        name: {
            factor: ours / max(known.get((name, factor)) or speed(made(regime, factor)), _SPEED_MIN)
            for factor in factors
        }
        for name, made in PEERS.items()
    }


def told(found: Mapping[Regime, list[Ratios]]) -> dict[str, Any]:
    """Return, by regime and peer, what it was tuned to and the mean ratio at each factor of it."""
    return {
        regime.name: {
            name: {
                "tuned_to": _TUNED_TO[name](regime),
                "ours_divided_by_it": {
                    f"{factor:g}": statistics.mean(one[name][factor] for one in each)
                    for factor in each[0][name]
                },
            }
            for name in PEERS
        }
        for regime in STATIONARY
        if (each := found.get(regime))
    }
