"""The rules of the working set, one by one, over one replica of 10,000 tokens."""

from stoker.coordinator.working_set import AGED_EVERY_SECONDS, AGED_SECONDS, WorkingSet
from stoker.inference.base import ReplicaInfo
from stoker.model.ids import RolloutId

KV = 10_000


def _working(window: int = 100, kv: int | None = KV) -> WorkingSet:
    return WorkingSet([ReplicaInfo(replica=0, window=window, kv_tokens=kv)])


class _Calls:
    """Turns of rollouts, each with one history named after it."""

    def __init__(self, working: WorkingSet) -> None:
        self.working = working
        self.number = 0

    def begin(self, name: str, tokens: int, now: float = 0.0) -> int:
        self.working.ready(name, RolloutId(name), tokens, now)
        self.number += 1
        self.working.issue(self.number, name, 0)
        return self.number

    def turn(self, name: str, tokens: int, now: float = 0.0, cached: int | None = None) -> None:
        call = self.begin(name, tokens, now)
        self.working.answer(call, name, 0, prompt=tokens, sampled=0, cached=cached, now=now)


def test_without_known_memory_nothing_is_held() -> None:
    working = _working(kv=None)
    assert not working.limits
    assert working.may_start(0.0, 10**6)
    working.ready("a", RolloutId("a"), 10**9, 0.0)
    assert working.fits("a", 0)


def test_slots_with_memory_of_their_own_are_never_held_for() -> None:
    working = WorkingSet([ReplicaInfo(replica=0, window=4, kv_tokens=KV, kv_by_slot=True)])
    assert not working.limits
    assert working.may_start(0.0, 4)


def test_a_cached_context_goes_and_an_evicted_one_needs_room() -> None:
    working = _working()
    calls = _Calls(working)
    calls.turn("a", 6000)
    working.ready("a", RolloutId("a"), 6100, 1.0)
    assert working.is_cached("a", 0)
    calls.turn("a", 6100, 1.0)
    running = calls.begin("b", 9000, 2.0)  # pushes most of a out
    working.ready("a", RolloutId("a"), 6200, 3.0)
    assert not working.is_cached("a", 0)
    assert not working.fits("a", 0)
    working.abort(running, "b", 0)
    assert working.fits("a", 0)


def test_a_context_too_large_for_what_is_free_still_goes_when_nothing_else_is_hot() -> None:
    working = _working()
    working.ready("a", RolloutId("a"), 3 * KV, 0.0)
    assert working.fits("a", 0)


def test_a_new_rollout_is_counted_with_the_size_it_will_reach() -> None:
    working = _working()
    assert working.context_mean == KV / 16
    started = 0
    while working.may_start(0.0, started):
        working.start(RolloutId(f"r{started}"))
        started += 1
    assert started == int(KV / (1.2 * working.context_mean))
    working.finish(RolloutId("r0"))
    assert working.may_start(0.0, 0)


def test_sizes_are_learnt_from_rollouts_that_finished() -> None:
    working = _working()
    calls = _Calls(working)
    for number in range(200):
        working.start(RolloutId(f"r{number}"))
        calls.turn(f"r{number}", 1000)
        calls.turn(f"r{number}", 3000)
        working.finish(RolloutId(f"r{number}"))
    assert 1990 < working.context_mean <= 2000
    started = 0
    while working.may_start(0.0, 0):
        working.start(RolloutId(f"new{started}"))
        started += 1
    assert started == int(KV / (0.65 * working.context_mean))


def test_a_full_lane_takes_no_new_rollout() -> None:
    working = _working(window=4)
    assert working.may_start(0.0, 3)
    assert not working.may_start(0.0, 4)


def test_memory_of_a_replica_that_is_ill_is_nobody_s() -> None:
    def started(ill: set[int]) -> int:
        infos = [ReplicaInfo(replica=n, window=100, kv_tokens=KV) for n in range(2)]
        working, count = WorkingSet(infos), 0
        while working.may_start(0.0, 0, ill):
            working.start(RolloutId(f"r{count}"))
            count += 1
        return count

    assert started({1}) == started({0}) == started(set()) // 2


def test_one_that_waits_longer_than_it_is_kept_is_not_counted() -> None:
    working = _working()
    memory = working.memory(0)
    assert memory is not None
    calls = _Calls(working)
    calls.turn("a", 4000, 0.0)
    memory.keep = 5.0
    working.pass_to(4.9)
    assert memory.hot_tokens == 4000
    assert working.changes_at(4.9, None) == 5.0
    working.pass_to(5.0)
    assert memory.hot_tokens == 0
    assert working.is_cached("a", 0)  # still there, and counted again once it is ready
    working.ready("a", RolloutId("a"), 4000, 6.0)
    assert working.is_cached("a", 0)
    assert memory.hot_tokens == 4000


def test_a_parked_call_that_waited_long_returns_now_and_then() -> None:
    working = _working()
    assert not working.aged(0.0, AGED_SECONDS - 1)
    assert working.aged(0.0, AGED_SECONDS)
    working.forced(AGED_SECONDS)
    assert not working.aged(0.0, AGED_SECONDS + AGED_EVERY_SECONDS - 1)
    assert working.aged(0.0, AGED_SECONDS + AGED_EVERY_SECONDS)


def test_after_new_weights_nothing_counts_as_cached() -> None:
    working = _working()
    calls = _Calls(working)
    calls.turn("a", 4000)
    running = calls.begin("b", 3000)
    working.flush()
    assert not working.is_cached("a", 0)
    memory = working.memory(0)
    assert memory is not None
    assert memory.hot_tokens == 3000
    working.answer(running, "b", 0, prompt=3000, sampled=10, cached=0, now=1.0)
    assert working.is_cached("b", 0)


def test_nothing_is_left_of_rollouts_that_ended_however_they_did() -> None:
    working = _working()
    calls = _Calls(working)
    memory = working.memory(0)
    assert memory is not None
    for number in range(50):
        name = f"r{number}"
        working.start(RolloutId(name))
        if number % 5 == 0:
            working.finish(RolloutId(name))
            continue
        call = calls.begin(name, 100 * number)
        if number % 3 == 0:
            working.finish(RolloutId(name))  # while it runs
        if number % 2 == 0:
            working.abort(call, name, 0)
        else:
            working.answer(call, name, 0, prompt=100, sampled=1, cached=0, now=1.0)
        working.finish(RolloutId(name))
    assert (memory.hot_tokens, len(memory.hot), len(memory.waiting)) == (0, 0, 0)
    assert (working._new, working._contexts, working._rollouts) == (0, {}, {})
    assert memory.residency._held == 0
