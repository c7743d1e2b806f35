"""What ``stoker bench lane`` measures with: ideal schedule, lock-step, regimes, and its names."""

from itertools import islice

import pytest

from stoker.cli import bench_lane, bench_lane_peers
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.closed import ideal, lock_step
from stoker.testing.simulator.policies import Semaphore, StagedQueues
from stoker.testing.simulator.regimes import SHIFTING, STATIONARY
from stoker.testing.simulator.trace import RolloutTrace, Shape, TurnTrace, endless, lognormal

PROFILE = SimProfile(policy="scripted:none", a=0.25, c=0.02, window=4)
TINY = STATIONARY[6]
"""The one whose turns are ten tokens."""
SHAPE = Shape(prompt=(1, 1), turns=(5, 5), sampled=(1, 1), observed=(1, 1))


@pytest.mark.parametrize("seed", range(4))
def test_the_ideal_lies_between_its_bounds_and_lock_step(seed: int) -> None:
    work = list(islice(endless(seed, SHAPE, lognormal()), 30))
    found, locked = ideal(PROFILE, work), lock_step(PROFILE, work)
    longest = max(trace.wait for trace in work) + 5 * (0.25 + 0.02)
    busy = 30 * 5 * (0.25 + 0.02 * 4) / 4
    assert max(longest, busy) <= found.seconds + 1e-9
    assert found.seconds <= locked.seconds
    assert found.active_share <= 1


def test_the_ideal_of_a_few_turns_is_what_one_writes_down() -> None:
    one = RolloutTrace(1, (TurnTrace(1, 1, 1.0), TurnTrace(1, 1, 2.0)))
    alone = ideal(PROFILE, [one])
    assert alone.seconds == pytest.approx(0.27 + 1.0 + 0.27 + 2.0)
    assert alone.active_seconds == pytest.approx(0.54)
    five = ideal(PROFILE, [one] * 5)  # four and then one, twice over
    assert five.active_seconds == pytest.approx(2 * (0.33 + 0.27))
    locked = lock_step(PROFILE, [one] * 5)
    assert locked.seconds == pytest.approx(2 * (0.33 + 0.27) + 1.0 + 2.0)


@pytest.mark.parametrize("trace", ["lognormal", "published"])
def test_a_closed_batch_is_near_its_ideal_and_a_steady_supply_near_capacity(trace: str) -> None:
    makespan, active = bench_lane._closed(1, trace)
    assert 1 <= makespan <= 1.05
    assert active >= 6
    throughput, idle_while_ready = bench_lane._steady(400, 10, trace)
    assert throughput >= 0.98
    assert idle_while_ready == 0


def test_every_regime_has_its_own_tuned_peer() -> None:
    assert len({regime.name for regime in STATIONARY}) == len(STATIONARY)
    for regime in STATIONARY:
        kv_tokens = regime.profile.kv_tokens
        assert kv_tokens is not None
        assert 0.3 < regime.semaphore * regime.shape.context_mean / kv_tokens < 3
        under_way, issued = regime.staged
        assert 0 < issued <= min(under_way, regime.profile.window)
        assert 0 < regime.pinned_share <= 2
        assert 0 < regime.usage_aim < 1
    assert SHIFTING[1] > 0


def test_every_peer_is_told_with_its_tuned_value_and_a_quarter_off_it() -> None:
    regime = STATIONARY[0]
    asked: list[object] = []

    def speed(policy: object) -> float:
        asked.append(policy)
        return 2.0

    found = bench_lane_peers.against(regime, 3.0, speed, known={("semaphore", 1.0): 6.0})
    counts = [one.count for one in asked if type(one) is Semaphore]
    assert counts == [20, 34], "27 is known: it is not run again"
    staged = [(one.count, one._issued) for one in asked if isinstance(one, StagedQueues)]
    assert staged == [(20, 20), (27, 27), (34, 34)]
    assert len(asked) == 2 + 3 * 3
    told = bench_lane_peers.told({regime: [found, found]})[regime.name]
    assert told["semaphore"] == {
        "tuned_to": 27,
        "ours_divided_by_it": {"0.75": 1.5, "1": 0.5, "1.25": 1.5},
    }
    assert told["staged"]["tuned_to"] == [27, 27]
    assert (told["pinned"]["tuned_to"], told["usage"]["tuned_to"]) == (0.25, 0.35)


def test_a_tiny_run_sets_every_peer_beside_ours_at_three_sizes() -> None:
    found = bench_lane._paired(TINY, 10, 40.0).peers
    assert set(found) == set(bench_lane_peers.PEERS)
    assert all(set(each) == {0.75, 1.0, 1.25} for each in found.values())
    assert all(ratio > 0 for each in found.values() for ratio in each.values())
    later = bench_lane._paired(TINY, 13, 40.0).peers
    assert {name: set(each) for name, each in later.items()} == {
        name: {1.0} for name in bench_lane_peers.PEERS
    }


@pytest.mark.slow
def test_the_document_has_the_promised_names() -> None:
    said: list[str] = []
    document = bench_lane.measure(seeds=1, seconds=400.0, processes=2, real=False, say=said.append)
    figures = document["figures"]
    assert set(figures) >= {
        "makespan_vs_ideal", "active_vs_lockstep", "steady_throughput_vs_capacity",
        "idle_while_ready_share", "stationary_vs_semaphore_min", "heavy_tail_vs_semaphore",
        "shifting_vs_semaphore", "vs_oversized_semaphore", "p95_vs_semaphore", "vs_staged_queues",
        "vs_usage_limit", "vs_pinned",
    }  # fmt: skip
    assert all(one["value"] > 0 for name, one in figures.items() if "_vs_" in name)
    assert set(document["regimes"]) == {regime.name for regime in STATIONARY}
    assert set(document["peers"]) == {regime.name for regime in STATIONARY}
    assert not set(document["notes"]) & set(figures)
