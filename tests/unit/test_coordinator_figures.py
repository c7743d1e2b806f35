"""Latencies: exact while they are few, bounded when they are many."""

import random

import pytest

from stoker.coordinator import figures
from stoker.coordinator.figures import Latencies


def test_none_have_no_percentile() -> None:
    assert Latencies().percentile(0.5) is None


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_sorted_durations(seed: int) -> None:
    chance = random.Random(seed)
    durations = [chance.expovariate(1.0) for _ in range(chance.randrange(1, 400))]
    latencies = Latencies()
    for seconds in durations:
        latencies.add(seconds)
    ordered = sorted(durations)
    for share in (0.0, 0.5, 0.99, 1.0):
        expected = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        assert latencies.percentile(share) == expected


def test_many_are_sampled_evenly_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_LATENCIES_MAX", 100)
    latencies = Latencies()
    chance = random.Random(1)
    for number in chance.sample(range(10_000), 10_000):
        latencies.add(float(number))
        assert len(latencies._ordered) < 100
    assert latencies.percentile(0.5) == pytest.approx(5_000, rel=0.35)
