"""The lane where KV caches are short, in the simulator: nothing waits that could run."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.coordinator.residency import Residency
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.policies import Adaptive, Pinned, Semaphore, StagedQueues
from stoker.testing.simulator.trace import (
    AGENTIC,
    RolloutTrace,
    Shape,
    TurnTrace,
    constant,
    endless,
    lognormal,
    mixed,
)
from stoker.testing.simulator.world import Outcome, World, simulate
from stoker.testing.virtual_clock import run_virtual

SHAPE = Shape(prompt=(50, 400), turns=(1, 8), sampled=(1, 60), observed=(0, 300))


def _profile(**keys: object) -> SimProfile:
    plain = {"policy": "scripted:x", "a": 0.02, "c": 0.001, "p": 1e-4, "window": 8}
    return SimProfile.model_validate({**plain, **keys})


def _work(seed: int, count: int, median: float = 1.0) -> Iterator[RolloutTrace]:
    source = endless(seed, SHAPE, lognormal(median=median, p99=60 * median))
    return (next(source) for _ in range(count))


def _require_conserving(world: World, seed: int) -> None:
    """Look at the lane from outside: is there anything that waits and could run?"""
    lane, working = world.lane, world.lane.working
    ready, replicas = lane._ready, lane._replicas
    with_room = [index for index, replica in replicas.items() if replica.room > 0]
    if not with_room:
        return
    assert not len(ready._open), f"seed {seed}: an open call beside room"
    for index in with_room:
        assert not len(ready._at_home[index]), f"seed {seed}: a cached call beside room at home"
        memory = working.memory(index)
        assert memory is not None
        if lane.parked():
            assert memory.hot, f"seed {seed}: a parked call beside an empty cache"
            first = ready._parked.first()
            assert first is not None
            assert first.tokens > memory.free, f"seed {seed}: a parked call beside memory for it"


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    window=st.integers(1, 8),
    kv_tokens=st.integers(3000, 12_000),
    median=st.sampled_from((0.05, 1.0, 5.0)),
)
@settings(max_examples=12, deadline=None)
def test_a_ready_call_with_room_and_memory_never_waits(
    seed: int, replicas: int, window: int, kv_tokens: int, median: float
) -> None:
    """Random traces, looked at after every change; everything ends, and nothing stays counted."""
    profile = _profile(replicas=replicas, window=window, kv_tokens=kv_tokens)

    async def main() -> Outcome:
        world = World(profile, _work(seed, 40, median), Adaptive(), 0.0)
        done = asyncio.Event()

        async def looks() -> None:
            chance = random.Random(seed)
            while not done.is_set():
                _require_conserving(world, seed)
                await asyncio.sleep(chance.choice((0.0, 0.01, 0.05, 0.3)))

        watcher = asyncio.create_task(looks())
        outcome = await world.run(None)
        done.set()
        await watcher
        for index in range(replicas):
            memory = world.lane.working.memory(index)
            assert memory is not None
            assert (memory.hot_tokens, memory.residency._held) == (0, 0)
        return outcome

    outcome = run_virtual(main())
    assert outcome.completed == 40
    assert outcome.lane.idle_while_ready_seconds == 0


def test_the_same_seed_gives_the_same_run() -> None:
    profile = _profile(kv_tokens=4000)
    first, second = (simulate(profile, _work(7, 80), Adaptive()) for _ in range(2))
    assert first == second


def test_waiting_for_memory_has_its_own_cause() -> None:
    outcome = simulate(_profile(kv_tokens=3000), _work(3, 100), Adaptive())
    assert outcome.lane.kv_held_seconds > 0
    assert outcome.lane.idle_while_ready_seconds == 0
    unlimited = simulate(_profile(), _work(3, 100), Adaptive())
    assert unlimited.lane.kv_held_seconds == 0


def test_idle_time_is_charged_to_what_is_true_then() -> None:
    one = RolloutTrace(100, (TurnTrace(10, 0, 5.0), TurnTrace(10, 0, 7.0)))
    outcome = simulate(_profile(), iter([one]), Semaphore(1))
    assert outcome.idle_seconds == pytest.approx({"tools running": 12.0})
    assert sum(outcome.idle_seconds.values()) + outcome.lane.active_seconds == pytest.approx(
        outcome.seconds
    )


@pytest.mark.slow
def test_heavy_tails_over_a_tenth_of_the_working_set_beat_the_tuned_semaphore() -> None:
    """Facts: 1.14 in the mean of ten seeds; here two, against the best of three on the same two."""
    profile = _profile(a=0.008, c=1e-4, p=3e-5, window=128, kv_tokens=250_000)

    def speed(policy: Adaptive | Semaphore) -> float:
        runs = [
            simulate(profile, endless(seed, AGENTIC, mixed(60)), policy, until=700, warm=150)
            for seed in (10, 11)
        ]
        assert max(run.parked_max for run in runs) <= 150
        return sum(run.tokens_per_second for run in runs)

    ours, peers = speed(Adaptive()), {n: speed(Semaphore(n)) for n in (18, 21, 24)}
    print(f"ours {ours:.1f}, semaphores {peers}")  # noqa: T201 - the figures of a failing run
    assert ours >= 1.02 * max(peers.values())


def test_what_the_server_does_not_keep_is_found_out() -> None:
    """A fifth of the cache belongs to somebody else; the server's counts say so."""
    profile = _profile(a=0.008, c=1e-4, p=3e-5, window=128, kv_tokens=250_000)

    async def main() -> float:
        world = World(profile, endless(10, AGENTIC, constant(4.6)), Adaptive(), 0.0)
        memory = world.lane.working.memory(0)
        assert memory is not None
        memory.residency = Residency(312_000)
        await world.run(600)
        return memory.residency.kept

    assert run_virtual(main()) < 265_000


def test_pinned_contexts_are_never_prefilled_again_and_one_alone_always_starts() -> None:
    profile = _profile(kv_tokens=4000)
    largest = 400 + 8 * (60 + 300)  # what a rollout of SHAPE can come to
    outcome = simulate(profile, _work(3, 40), Pinned(largest))
    assert outcome.completed == 40
    assert outcome.prefilled_again == 0
    small = simulate(_profile(kv_tokens=largest), _work(3, 5), Pinned(2 * largest))
    assert small.completed == 5


def test_staged_queues_issue_no_more_than_their_pool() -> None:
    seen: list[int] = []

    class Watched(StagedQueues):
        def sample(self, world: World) -> None:
            seen.append(world.model.running)

    assert simulate(_profile(), _work(4, 60), Watched(20, 3)).completed == 60
    assert max(seen) == 3
