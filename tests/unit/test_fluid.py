"""The fluid model of one replica, and the fit of what its steps cost."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.coordinator.fluid import StepCost, TurnShape, keep_seconds, turn_rate
from stoker.coordinator.step_cost import StepCosts

COST = StepCost(0.008, 0.0001, 0.00003)


def _shape(kv_tokens: float, **keys: float) -> TurnShape:
    given = {"sampled": 350.0, "new": 1100.0, "context": 12_700.0, **keys}
    return TurnShape(window=128, kv_tokens=kv_tokens, **given)


@given(
    kv=st.floats(2e4, 1e7),
    held=st.floats(0, 300),
    missed=st.floats(0, 1),
    sampled=st.floats(1, 1000),
    prefill=st.floats(0, 1e-3),
)
def test_the_rate_fills_memory_or_the_window(
    kv: float, held: float, missed: float, sampled: float, prefill: float
) -> None:
    """Put back into the model's own two equations, the rate is right."""
    cost, shape = StepCost(0.01, 0.0002, prefill), _shape(kv, sampled=sampled)
    rate = turn_rate(cost, shape, held, missed)
    fixed = sampled * cost.a
    each = sampled * cost.c + prefill * (shape.new + missed * shape.context)
    running = rate * fixed / (1 - rate * each) if rate * each < 1 else math.inf
    assert running == pytest.approx(shape.window, rel=1e-4) or running <= shape.window
    memory = shape.context * (running + rate * held)
    if running < shape.window * 0.999:
        assert memory == pytest.approx(kv, rel=1e-3)
    else:
        assert memory <= kv * 1.001


def test_short_memory_keeps_short_waits_and_enough_keeps_all() -> None:
    """Facts: best times near 5 s at a tenth of the working set, 11 s at a fifth, then all."""
    chance = random.Random(1)
    parts = ((0.61, 0.01, 1.0), (0.27, 1.0, 10.0), (0.08, 10.0, 60.0), (0.04, 60.0, 60.0))
    waits = [
        low * (high / low) ** chance.random()
        for share, low, high in parts
        for _ in range(int(share * 2000))
    ]
    kept = [keep_seconds(COST, _shape(kv), waits) for kv in (250e3, 500e3, 1.2e6)]
    assert 2 < kept[0] < 8
    assert kept[0] < kept[1] < 20
    assert kept[2] >= max(waits)


def test_the_best_time_does_not_depend_on_the_size_of_contexts() -> None:
    waits = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0] * 20
    of_size = [
        keep_seconds(COST, _shape(300e3, context=context, new=0.0), waits)
        for context in (6000.0, 12_000.0, 24_000.0)
    ]
    assert len(set(of_size)) == 1


def test_without_any_wait_everything_is_kept() -> None:
    assert keep_seconds(COST, _shape(1e6), []) == math.inf


def test_the_cost_of_a_step_is_learnt_from_the_times_of_calls() -> None:
    chance = random.Random(2)
    costs = StepCosts()
    for _ in range(300):
        batch, steps, prefilled = (
            chance.randint(1, 64),
            chance.randint(50, 500),
            chance.randint(0, 9000),
        )
        seconds = COST.a * steps + COST.c * steps * batch + COST.p * prefilled
        costs.seen(
            steps=steps,
            sampled=steps * batch,
            prefilled=prefilled,
            seconds=seconds * chance.uniform(0.98, 1.02),
        )
    fitted = costs.cost()
    assert fitted is not None
    assert fitted.a == pytest.approx(COST.a, rel=0.05)
    assert fitted.c == pytest.approx(COST.c, rel=0.1)
    assert fitted.p == pytest.approx(COST.p, rel=0.1)


@given(
    st.lists(st.tuples(*[st.integers(0, 5000)] * 3, st.floats(0, 100)), min_size=30, max_size=60)
)
def test_no_cost_is_ever_below_zero(calls: list[tuple[int, int, int, float]]) -> None:
    costs = StepCosts()
    for steps, sampled, prefilled, seconds in calls:
        costs.seen(steps=steps, sampled=sampled, prefilled=prefilled, seconds=seconds)
    fitted = costs.cost()
    assert fitted is None or min(fitted.a, fitted.c, fitted.p) >= 0


def test_few_calls_say_nothing() -> None:
    costs = StepCosts()
    for _ in range(29):
        costs.seen(steps=10, sampled=10, prefilled=10, seconds=1.0)
    assert costs.cost() is None
