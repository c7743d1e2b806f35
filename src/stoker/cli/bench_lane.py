"""``stoker bench lane``: the inference lane and admission in the simulator, beside their peers.

Everything runs on a virtual clock: the figures are of policies, not of this machine, and the same
seeds give the same figures on any. A peer is the best of its kind, tuned to each regime offline on
other seeds (its values stand in ``regimes``), and the mean of paired seeds is compared: a semaphore
held through tool waits (a thread pool for environments is one), staged queues, a KV cache pinned
through waits, and a limit by the KV usage that servers report. Our side has the same settings
everywhere.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import msgspec

from stoker.cli import bench_scale
from stoker.cli.bench_lane_peers import FACTORS, TUNED, Ratios, against, told
from stoker.cli.bench_lane_real import real_and_simulated
from stoker.cli.bench_machine import figure, machine
from stoker.config.tree import AdmissionSettings
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.closed import ideal, lock_step
from stoker.testing.simulator.policies import Adaptive, Semaphore
from stoker.testing.simulator.regimes import DEVICES, SHIFTING, STATIONARY, WAITS, Regime
from stoker.testing.simulator.trace import RolloutTrace, Shape, endless, lognormal, mixed, shifting
from stoker.testing.simulator.world import Outcome, Policy, simulate

_FIRST_SEED = 10
"""Seeds below it tuned the peers."""
_PEER_SEEDS = 4
"""Seeds on which the peers besides the semaphore run: they take as long as all else."""
_QUARTER_OFF_SEEDS = 2
"""Seeds on which every peer runs a quarter off its tuned value too: as long as all else again."""
_OVERSIZED = 1.25
_CLOSED = SimProfile(policy="scripted:none", a=0.25, c=0.02, window=64, name="turns")
_CLOSED_SHAPE = Shape(prompt=(1, 1), turns=(10, 10), sampled=(1, 1), observed=(1, 1))
_CLOSED_ROLLOUTS = 200
_OF_REAL_RUNS = (
    "real_vs_simulated_error",
    "cpu_per_step_10k_vs_100",
    "waiting_rollout_kb",
    "histories_10k_gb",
)
_STEADY_ACTIVE = (64, 200, 400, 800)
_STEADY_JUDGED = 400
_HEAVY = ("mixed", "lognormal")
_HEAVY_SHARE = 0.1
_CLIFF = tuple(
    regime
    for regime in STATIONARY
    if regime.device == "8B" and regime.waits in _HEAVY and regime.memory_share > _HEAVY_SHARE
)
"""Where a semaphore that is too big falls off a cliff."""
_TRACES = {"lognormal": lognormal, "published": lambda: mixed(60.0)}
"""Waits of work without memory limits; the second has the published shares of real tool calls."""

Say = Callable[[str], object]


class Paired(msgspec.Struct, frozen=True):
    """One seed of one regime under three policies."""

    regime: Regime
    ratio: float
    """Tokens a second of rollouts that ended ÷ the tuned semaphore's."""
    oversized: float | None
    """The same ÷ those of a semaphore a quarter too big, in the regimes judged by it."""
    p95: float
    """95th percentile of completion ÷ the tuned semaphore's."""
    parked_max: float
    peers: Ratios
    """Ours ÷ each peer's tokens a second, on the first seeds; on fewer, at a quarter off too."""


def measure(*, seeds: int, seconds: float, processes: int, real: bool, say: Say) -> dict[str, Any]:
    """Measure with so many paired seeds and return the bench document (DESIGN §9).

    ``real``: with a closed batch on the real clock, and ten thousand rollouts, too.
    """
    chosen = range(_FIRST_SEED, _FIRST_SEED + seeds)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        say("bench lane: closed batch and steady supply …")
        short = {
            trace: _without_limits(pool.map, trace, range(_FIRST_SEED, _FIRST_SEED + 2 * seeds))
            for trace in _TRACES
        }
        say(f"bench lane: {len(STATIONARY)} regimes, {seeds} seeds …")
        jobs = [(regime, seed, seconds) for regime in STATIONARY for seed in chosen]
        paired = list(pool.map(_paired, *zip(*jobs, strict=True)))
        say("bench lane: shifting work …")
        shifted = list(pool.map(_shifted, chosen))
    document: dict[str, Any] = {"bench": "lane", "machine": machine(), "clock": "virtual"}
    document["figures"] = {
        **short["lognormal"].figures(),
        **_against_semaphores(paired, shifted),
        **_against_others(paired),
    }
    document["traces"] = {trace: found.told() for trace, found in short.items()}
    document["regimes"] = _regimes(paired)
    off = [one for one in paired if any(len(each) > 1 for each in one.peers.values())]
    document["peers"] = told(
        {regime: [one.peers for one in off if one.regime == regime] for regime in STATIONARY}
    )
    if real:
        say("bench lane: a real run, minutes of real time …")
        took, simulated = real_and_simulated(
            _CLOSED, _CLOSED_SHAPE, lognormal(), rollouts=_CLOSED_ROLLOUTS, seed=_FIRST_SEED
        )
        document["figures"]["real_vs_simulated_error"] = figure(
            [abs(took / simulated - 1)], "share", 0.03, "the simulator, the same closed batch"
        )
        document["figures"] |= bench_scale.measure(runs=1, say=say)["figures"]
    else:
        document["notes"] = dict.fromkeys(_OF_REAL_RUNS, "needs real runs: --real")
    return document


class Short(msgspec.Struct, frozen=True):
    """What became of work without memory limits, by seed."""

    closed: list[tuple[float, float]]
    """Makespan ÷ ideal, active share ÷ lock-step."""
    steady: dict[int, list[tuple[float, float]]]
    """Throughput ÷ capacity and idle while ready, by rollouts active."""

    def figures(self) -> dict[str, Any]:
        """Return the figures that have a goal."""
        judged, named = self.steady[_STEADY_JUDGED], f"{_STEADY_JUDGED} active"
        makespans, active = zip(*self.closed, strict=True)
        throughput, idle = zip(*judged, strict=True)
        return {
            "makespan_vs_ideal": _mean(makespans, 1.02, "the ideal schedule of the same trace"),
            "active_vs_lockstep": _mean(active, 7.0, "lock-step"),
            "steady_throughput_vs_capacity": figure(throughput, "share", 0.98, named),
            "idle_while_ready_share": figure(idle, "share", 0.005, named),
        }

    def told(self) -> dict[str, Any]:
        """Return the means, for people."""
        return {
            "makespan_vs_ideal": statistics.mean(one for one, _ in self.closed),
            "active_vs_lockstep": statistics.mean(one for _, one in self.closed),
            "steady_throughput_vs_capacity": {
                str(active): statistics.mean(one for one, _ in found)
                for active, found in self.steady.items()
            },
        }


def _without_limits(each: Callable[..., Iterable[Any]], trace: str, seeds: range) -> Short:
    closed = each(_closed, seeds, [trace] * len(seeds))
    steady = {
        active: each(_steady, [active] * len(seeds), seeds, [trace] * len(seeds))
        for active in _STEADY_ACTIVE
    }
    return Short(list(closed), {active: list(found) for active, found in steady.items()})


def _against_semaphores(paired: Sequence[Paired], shifted: Sequence[float]) -> dict[str, Any]:
    """Return the figures against semaphores: of the worst regime, in means of paired seeds."""
    heavy = [r for r in STATIONARY if r.waits in _HEAVY]
    tenth = [r for r in heavy if r.memory_share == _HEAVY_SHARE]

    def worst(regimes: Iterable[Regime], of: str, *, highest: bool = False) -> list[float]:
        each = [[getattr(p, of) for p in paired if p.regime == regime] for regime in regimes]
        return (max if highest else min)(each, key=statistics.mean)

    tuned = "a semaphore tuned to each regime"
    return {
        "stationary_vs_semaphore_min": _mean(worst(STATIONARY, "ratio"), 0.97, tuned),
        "heavy_tail_vs_semaphore": _mean(worst(tenth, "ratio"), 1.08, tuned),
        "shifting_vs_semaphore": _mean(shifted, 1.3, "the best fixed semaphore"),
        "vs_oversized_semaphore": _mean(
            worst(_CLIFF, "oversized"), 1.3, "a semaphore a quarter too big"
        ),
        "p95_vs_semaphore": _mean(worst(heavy, "p95", highest=True), 1.25, tuned),
        "parked_seconds_max": figure([p.parked_max for p in paired], "s", 150.0, "stationary runs"),
    }


def _against_others(paired: Sequence[Paired]) -> dict[str, Any]:
    """Return the figures against the other peers: of the worst regime, in means of paired seeds."""

    def worst(peer: str, regimes: Iterable[Regime]) -> list[float]:
        each = [
            [p.peers[peer][TUNED] for p in paired if p.regime == r and p.peers] for r in regimes
        ]
        return min(each, key=statistics.mean)

    tenth = [r for r in STATIONARY if r.memory_share == _HEAVY_SHARE]
    return {
        "vs_staged_queues": _mean(worst("staged", STATIONARY), None, "staged queues, tuned"),
        "vs_usage_limit": _mean(worst("usage", STATIONARY), None, "a limit by KV usage, tuned"),
        "vs_pinned": _mean(worst("pinned", tenth), None, "KV pinned through waits, tuned"),
    }


def _mean(values: Sequence[float], target: float | None, against: str) -> dict[str, Any]:
    """Return a figure that is the mean of paired seeds."""
    made = figure(values, "ratio", target, against)
    return {**made, "value": statistics.mean(values)}


def _regimes(paired: Sequence[Paired]) -> dict[str, Any]:
    found = {}
    for regime in STATIONARY:
        mine = [one for one in paired if one.regime == regime]
        found[regime.name] = {
            "ratio": statistics.mean(one.ratio for one in mine),
            "low": min(one.ratio for one in mine),
            "high": max(one.ratio for one in mine),
            "p95": statistics.mean(one.p95 for one in mine),
            "parked_seconds_max": max(one.parked_max for one in mine),
        }
    return found


def _closed(seed: int, trace: str) -> tuple[float, float]:
    """Return makespan ÷ ideal, and active share ÷ lock-step, of 200 rollouts of 10 turns."""
    work = list(islice(endless(seed, _CLOSED_SHAPE, _TRACES[trace]()), _CLOSED_ROLLOUTS))
    ours = simulate(_CLOSED, iter(work), Adaptive())
    share = ours.lane.active_seconds / ours.seconds
    best, locked = ideal(_CLOSED, work), lock_step(_CLOSED, work)
    return ours.seconds / best.seconds, share / locked.active_share


def _steady(active: int, seed: int, trace: str) -> tuple[float, float]:
    """Return throughput ÷ capacity and idle-while-ready with so many always active."""
    settings = AdmissionSettings(mode="fixed", active_max=active)
    work = endless(seed, _CLOSED_SHAPE, _TRACES[trace]())
    run = simulate(_CLOSED, work, Adaptive(settings), until=200, warm=80)
    capacity = _CLOSED.window / (_CLOSED.a + _CLOSED.c * _CLOSED.window)
    done = run.lane.device_tokens / run.lane.seconds
    return done / capacity, run.lane.idle_while_ready_seconds / run.lane.seconds


def _paired(regime: Regime, seed: int, seconds: float) -> Paired:
    def run(policy: Policy) -> Outcome:
        work = endless(seed, regime.shape, WAITS[regime.waits]())
        return simulate(regime.profile, work, policy, until=seconds, warm=seconds / 4)

    ours, tuned = run(Adaptive()), run(Semaphore(regime.semaphore))
    speed = ours.tokens_per_second
    known = {("semaphore", TUNED): tuned.tokens_per_second}
    oversized = None
    if regime in _CLIFF:
        peer = run(Semaphore(round(_OVERSIZED * regime.semaphore)))
        known["semaphore", _OVERSIZED] = peer.tokens_per_second
        oversized = speed / max(peer.tokens_per_second, 1e-9)
    peers: Ratios = {}
    if seed < _FIRST_SEED + _PEER_SEEDS:
        factors = FACTORS if seed < _FIRST_SEED + _QUARTER_OFF_SEEDS else (TUNED,)
        peers = against(
            regime, speed, lambda one: run(one).tokens_per_second, factors=factors, known=known
        )
    return Paired(
        regime,
        speed / tuned.tokens_per_second,
        oversized,
        _p95(ours) / _p95(tuned),
        ours.parked_max,
        peers,
    )


def _shifted(seed: int) -> float:
    """Return the best fixed semaphore's makespan ÷ ours, on short and long tasks in turn."""
    kv_tokens, permits = SHIFTING
    profile = DEVICES["8B"][0].model_copy(update={"kv_tokens": kv_tokens})
    work: list[RolloutTrace] = shifting(seed, mixed(60.0))
    ours, fixed = (simulate(profile, iter(work), p) for p in (Adaptive(), Semaphore(permits)))
    return fixed.seconds / ours.seconds


def _p95(outcome: Outcome) -> float:
    return outcome.durations[int(0.95 * len(outcome.durations))]
