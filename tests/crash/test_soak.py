"""The soak, as typed: a minute of blows, and the checker that must have nothing to say."""

import pytest

from stoker.cli.bench_soak import measure
from support.runs import tell


@pytest.mark.slow
def test_a_minute_of_blows_leaves_nothing_lost_twice_or_wrong() -> None:
    document = measure(minutes=1.0, seed=1, say=lambda text: tell(str(text)))
    assert document["findings"] == []
    assert document["figures"]["leaked"]["value"] == 0
    assert document["figures"]["kills"]["value"] > 10
    assert document["outcomes"]["completed"] > 0
