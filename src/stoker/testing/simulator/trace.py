"""Work for the simulator: rollouts as sizes and waits, drawn from a seed.

A rollout samples and waits; what its tools and its program do is their time alone. The same seed
gives the same work whatever policy runs it: comparisons are paired.
"""

import math
import random
from collections.abc import Callable, Iterator

import msgspec

Waits = Callable[[random.Random], float]
"""Draws one wait between an answer and the next model call, seconds."""


class TurnTrace(msgspec.Struct, frozen=True):
    """One model call and the wait after it."""

    sampled: int
    """Tokens sampled."""
    observed: int
    """Tokens its tool adds to the next prompt."""
    wait: float
    """Seconds until that prompt is ready."""


class RolloutTrace(msgspec.Struct, frozen=True):
    """One rollout."""

    prompt: int
    """Tokens of the first prompt."""
    turns: tuple[TurnTrace, ...]

    @property
    def wait(self) -> float:
        """Seconds it waits altogether."""
        return sum(turn.wait for turn in self.turns)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How large rollouts are: each figure is drawn evenly from its two bounds."""

    prompt: tuple[int, int]
    turns: tuple[int, int]
    sampled: tuple[int, int]
    observed: tuple[int, int]
    wait_factor: float = 1.0

    def draw(self, chance: random.Random, waits: Waits) -> RolloutTrace:
        """Return one rollout."""
        return RolloutTrace(
            chance.randint(*self.prompt),
            tuple(
                TurnTrace(
                    chance.randint(*self.sampled),
                    chance.randint(*self.observed),
                    self.wait_factor * waits(chance),
                )
                for _ in range(chance.randint(*self.turns))
            ),
        )

    @property
    def context_mean(self) -> float:
        """Tokens of a context at a turn, mean over turns."""
        grown = _mid(self.sampled) + _mid(self.observed)
        squares = sum(n * n for n in range(self.turns[0], self.turns[1] + 1))
        counts = sum(range(self.turns[0], self.turns[1] + 1))
        return _mid(self.prompt) + _mid(self.sampled) + grown * (squares / counts - 1) / 2


def _mid(bounds: tuple[int, int]) -> float:
    return (bounds[0] + bounds[1]) / 2


AGENTIC = Shape(prompt=(1000, 4000), turns=(8, 20), sampled=(200, 500), observed=(200, 2000))
"""Rollouts of a coding agent: contexts grow to a mean of some 12,000 tokens."""
SMALL = Shape(prompt=(1000, 4000), turns=(10, 10), sampled=(10, 10), observed=(200, 2000))
"""Ten turns of ten tokens each."""
SHORT = Shape(
    prompt=(1000, 2000), turns=(6, 12), sampled=(100, 250), observed=(100, 300), wait_factor=0.3
)
LONG = Shape(prompt=(2000, 6000), turns=(12, 20), sampled=(200, 600), observed=(500, 3500))


def lognormal(*, median: float = 1.0, p99: float = 60.0, cut: float = 60.0) -> Waits:
    """Return waits with a heavy tail, cut at a tool's timeout."""
    mu, sigma = math.log(median), math.log(p99 / median) / 2.3263
    return lambda chance: min(cut, chance.lognormvariate(mu, sigma))


def mixed(cut: float) -> Waits:
    """Return waits with the published shares of real tool calls, cut at a timeout."""
    parts = ((0.61, 0.01, 1.0), (0.27, 1.0, 10.0), (0.08, 10.0, 60.0), (0.04, 60.0, 1100.0))

    def draw(chance: random.Random) -> float:
        at = chance.random()
        for share, low, high in parts:
            if at < share:
                return float(min(cut, low * (high / low) ** chance.random()))
            at -= share
        return cut

    return draw


def constant(seconds: float) -> Waits:
    """Return waits that are all the same: rollouts march in step."""
    return lambda _chance: seconds


def endless(seed: int, shape: Shape, waits: Waits) -> Iterator[RolloutTrace]:
    """Return rollouts without end."""
    chance = random.Random(seed)  # noqa: S311 - work that its seed repeats
    while True:
        yield shape.draw(chance, waits)


def shifting(
    seed: int, waits: Waits, *, rounds: int = 2, short: int = 600, long: int = 200
) -> list[RolloutTrace]:
    """Return rounds of many short rollouts and then some long ones."""
    chance = random.Random(seed)  # noqa: S311 - work that its seed repeats
    return [
        shape.draw(chance, waits)
        for _ in range(rounds)
        for shape, count in ((SHORT, short), (LONG, long))
        for _ in range(count)
    ]


def mean_wait(waits: Waits, *, draws: int = 20_000) -> float:
    """Return the mean of ``waits``, by drawing."""
    chance = random.Random(0)  # noqa: S311 - as above
    return sum(waits(chance) for _ in range(draws)) / draws
