"""The regimes in which admission is measured: a device, its work, and how short its memory is.

Sources: the profiles, waits and shares of memory of the facts page (``docs/design/0012``).
"""

import math
from collections.abc import Callable

import msgspec

from stoker.inference.profile import SimProfile
from stoker.testing.simulator.trace import (
    AGENTIC,
    SMALL,
    Shape,
    Waits,
    constant,
    lognormal,
    mean_wait,
    mixed,
)

DEVICES: dict[str, tuple[SimProfile, Shape]] = {
    "8B": (
        SimProfile(policy="scripted:none", a=0.008, c=1e-4, p=3e-5, window=128, name="8B"),
        AGENTIC,
    ),
    "small": (
        SimProfile(policy="scripted:none", a=0.025, c=2e-3, p=2e-5, window=64, name="small"),
        SMALL,
    ),
}
"""An 8B model on one H100-class card, and a small setting whose turns are ten tokens."""
WAITS: dict[str, Callable[[], Waits]] = {
    "lognormal": lognormal,
    "mixed": lambda: mixed(60.0),
    "constant": lambda: constant(4.6),
}


class Regime(msgspec.Struct, frozen=True):
    """One stationary regime, and what its peers were tuned to offline (seeds 0 and 1)."""

    device: str
    waits: str
    memory_share: float
    """KV cache ÷ working set at saturation."""
    semaphore: int
    staged: tuple[int, int]
    """Rollouts under way, and calls at the replica at once."""
    pinned_share: float
    """Size a rollout is counted with at least where its KV cache is pinned, in mean contexts."""
    usage_aim: float
    """KV usage a limit by it aims at."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.device} {self.waits} {self.memory_share:g}"

    @property
    def shape(self) -> Shape:
        """How large its rollouts are."""
        return DEVICES[self.device][1]

    @property
    def profile(self) -> SimProfile:
        """Return its device with as much memory as the regime gives it."""
        profile, shape = DEVICES[self.device]
        kv = self.memory_share * working_set(profile, shape, WAITS[self.waits]())
        return profile.model_copy(update={"kv_tokens": math.floor(kv)})


def working_set(profile: SimProfile, shape: Shape, waits: Waits) -> float:
    """Return the tokens of all contexts at saturation with unlimited memory."""
    sampled, new = sum(shape.sampled) / 2, sum(shape.observed) / 2
    window = profile.window
    turn = sampled * (profile.a + profile.c * window) + profile.p * window * new
    return (turn + mean_wait(waits)) * window / turn * shape.context_mean


SHIFTING = (500_000, 28)
"""Tokens of the KV cache for shifting work, and the fixed semaphore that was tuned to it."""
STATIONARY = (
    Regime("8B", "mixed", 0.1, 27, (27, 27), 0.25, 0.35),
    Regime("8B", "mixed", 0.2, 47, (47, 31), 0.4, 0.35),
    Regime("8B", "mixed", 0.35, 73, (73, 47), 0.6, 0.35),
    Regime("8B", "mixed", 0.5, 95, (95, 95), 0.9, 0.35),
    Regime("8B", "lognormal", 0.1, 20, (20, 13), 0.6, 0.2),
    Regime("8B", "constant", 0.2, 30, (30, 20), 0.9, 0.05),
    Regime("small", "mixed", 0.1, 46, (46, 46), 0.12, 0.12),
    Regime("small", "mixed", 0.5, 101, (101, 64), 0.6, 0.06),
)
"""Each semaphore is the best of four or five, 8 to 15 % apart; each staged pair, pinned share and
aim the best of four or five, on seeds 0 and 1."""
