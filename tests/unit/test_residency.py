"""The LRU model of a KV cache, against the simulated server's own cache and what a server says."""

from hypothesis import example, given
from hypothesis import strategies as st

from stoker.coordinator.residency import KEPT_SHARE, Residency
from stoker.inference.prefix_cache import Prefix, PrefixCache

KV = 1000
MOVES = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 300)), max_size=60)


# A token more than was needed, and a context on the edge is half gone.
@example([("a", 159), ("b", 239), ("b", 300), ("a", 54), ("a", 300), ("b", 1)])
@given(MOVES)
@example([("a", 1), ("a", 209), ("a", 295), ("c", 5), ("f", 37), ("f", 203), ("f", 300), ("a", 7)])
def test_it_holds_what_a_server_with_the_same_memory_holds(moves: list[tuple[str, int]]) -> None:
    """One turn after another: run with the prompt, end, keep the context; evictions in between."""
    ours, theirs = Residency(KV), PrefixCache()
    sizes: dict[str, int] = {}
    for number, (history, new) in enumerate(moves):
        tokens = min(KV, sizes.get(history, 0) + new)
        prefix = theirs.find(history, b"")
        there = prefix.tokens if prefix is not None else 0
        whole = sizes.get(history, 0)
        assert ours.is_cached(history) == (there > 0 and there >= KEPT_SHARE * whole)
        if prefix is not None:
            theirs.take(prefix)
        theirs.shrink(KV - tokens)
        ours.run(number, history, tokens)
        ours.end(number)
        theirs.put(Prefix(history, b"", tokens))
        ours.keep(history, tokens)
        sizes[history] = tokens


def _turn(residency: Residency, call: int, history: str, tokens: int, found: bool | None) -> None:  # noqa: FBT001 - a test's shorthand
    residency.run(call, history, tokens)
    residency.end(call, found=found)
    residency.keep(history, tokens)


def test_a_context_missing_at_some_depth_bounds_what_is_kept() -> None:
    residency = Residency(KV)
    for number in range(9):
        _turn(residency, number, f"r{number}", 100, None)
    assert residency.is_cached("r0")  # 900 tokens deep
    _turn(residency, 10, "r0", 100, found=False)
    assert residency.kept == 950  # one miss is not believed whole
    for number in range(11, 30):
        residency.run(number, "r8", 100)  # one deep: a miss there has another reason
        residency.end(number, found=True)
        residency.keep("r8", 100)
    assert 950 < residency.kept < 1000


def test_what_is_found_where_it_should_be_gone_raises_the_bound_up_to_what_is_there() -> None:
    residency = Residency(KV)
    residency.kept = 300.0
    for number in range(6):
        _turn(residency, number, f"r{number}", 100, None)
    residency.run(6, "r2", 100)  # believed gone: no word about it
    residency.end(6, found=True)
    assert residency.kept == 300
    residency.keep("r2", 150)
    residency.keep("r6", 200)  # r2 has lost a third
    residency.run(7, "r2", 150)
    residency.end(7, found=True)
    assert residency.kept == 306
    for number in range(8, 2000):
        _turn(residency, number, "r2", 100, found=True)
    assert residency.kept == KV


def test_a_server_that_keeps_nothing_is_not_taken_for_a_small_one() -> None:
    residency = Residency(KV)
    for number in range(200):  # ten rollouts in turn; prefix caching is off
        _turn(residency, number, f"{number % 10}", 50, found=False)
    assert not residency.is_cached("9")
    assert residency.kept == KV, "running sequences have all of it"
    _turn(residency, 200, "9", 100, found=True)  # it was something else: a flush, a restart
    assert residency.is_cached("9")
