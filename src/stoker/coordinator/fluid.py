"""How long to keep a waiting rollout's cached context: a fluid model of one replica. Pure.

A context kept for ``t`` seconds of a wait costs memory ``E[min(wait, t)]`` long, and is prefilled
again with probability ``P(wait > t)``. With b sequences running, a turn takes

    sampled · (a + c·b) + p·b · (new + P(wait > t) · context)   seconds,

so turns come at ``rate = b ÷ turn``, and memory bounds b: ``context · (b + rate·E[min]) ≤ kv``.
The best ``t`` is the one with the highest rate. It does not depend on the size of contexts (both
costs grow with it) and rises with p · kv.

Source: docs/design/0012; checked there against simulation.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

_CANDIDATES = 22
_SHORTEST_SECONDS = 0.2
_GAIN_MIN = 1.002
"""Keeping longer must be worth this much: the curve is flat near its top."""


class StepCost(msgspec.Struct, frozen=True):
    """A step of the device takes a + c · decoding sequences + p · prefilled tokens, seconds."""

    a: float
    c: float
    p: float


class TurnShape(msgspec.Struct, frozen=True, kw_only=True):
    """Mean tokens of one turn, and what a replica has for them."""

    sampled: float
    new: float
    """Prompt tokens that no earlier turn had."""
    context: float
    """Tokens of the context at a turn."""
    window: int
    kv_tokens: float


def keep_seconds(cost: StepCost, shape: TurnShape, waits: Iterable[float]) -> float:
    """Return for how long to keep a waiting context, seconds; infinite: until it is evicted."""
    ordered = sorted(waits)
    if not ordered:
        return math.inf
    sums = [0.0, *accumulate(ordered)]
    best, best_rate = 0.0, 0.0
    for seconds in _candidates(ordered):
        rate = turn_rate(cost, shape, *_kept(ordered, sums, seconds))
        if rate > best_rate * _GAIN_MIN:
            best, best_rate = seconds, rate
    return best


def turn_rate(cost: StepCost, shape: TurnShape, held_seconds: float, missed: float) -> float:
    """Return turns a second when a wait holds memory ``held_seconds`` and ``missed`` are lost."""
    fixed = shape.sampled * cost.a
    each = shape.sampled * cost.c + cost.p * (shape.new + missed * shape.context)
    contexts = shape.kv_tokens / shape.context
    # contexts = b + held · b ÷ (fixed + b · each), solved for b.
    linear = fixed + held_seconds - contexts * each
    if each > 0:
        root = math.sqrt(linear * linear + 4 * each * contexts * fixed)
        running = (root - linear) / (2 * each)
    else:
        running = contexts * fixed / linear if linear > 0 else contexts
    running = min(running, shape.window)
    turn = fixed + running * each
    return running / turn if turn > 0 else 0.0


def _kept(ordered: Sequence[float], sums: Sequence[float], seconds: float) -> tuple[float, float]:
    """Return E[min(wait, seconds)] and P(wait > seconds)."""
    within = bisect_right(ordered, seconds)
    longer = len(ordered) - within
    held = sums[within] + (seconds * longer if longer else 0.0)
    return held / len(ordered), longer / len(ordered)


def _candidates(ordered: Sequence[float]) -> list[float]:
    longest = max(ordered[-1], 2 * _SHORTEST_SECONDS)
    ratio = (longest / _SHORTEST_SECONDS) ** (1 / (_CANDIDATES - 1))
    return [0.0, *(_SHORTEST_SECONDS * ratio**n for n in range(_CANDIDATES - 1)), math.inf]
