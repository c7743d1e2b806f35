"""Ids and jitter: never the same twice, save where a simulation gives a seed."""

from stoker.seams.entropy import fresh_id, jittered, nonce, seeded


def _drawn() -> tuple[str, str, float]:
    return fresh_id("run_"), fresh_id("run_"), jittered(8.0)


def test_a_seed_gives_the_same_ids_and_jitter_within_its_block_alone() -> None:
    with seeded(7):
        first = _drawn()
    with seeded(7):
        assert _drawn() == first
    with seeded(8):
        assert _drawn() != first
    assert _drawn() != _drawn()


def test_a_nonce_follows_no_seed() -> None:
    with seeded(7):
        first = nonce()
    with seeded(7):
        assert nonce() != first


def test_ids_have_twelve_digits_and_jitter_its_bounds() -> None:
    assert len(fresh_id("wrk_")) == len("wrk_") + 12
    assert all(4.0 <= jittered(8.0) <= 12.0 for _ in range(1000))
