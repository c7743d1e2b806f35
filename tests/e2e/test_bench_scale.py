"""``stoker bench scale``, small: real runs of two sizes and of long histories, all ended again."""

import tempfile
from pathlib import Path

import pytest

from stoker.cli.bench_processes import processes
from stoker.cli.bench_scale import measure


@pytest.mark.slow
def test_a_small_bench_measures_everything_it_names_and_ends_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = measure(runs=1, rollouts=300, seconds=2.0, say=lambda _: None)
    values = {name: figure["value"] for name, figure in document["figures"].items()}
    assert all(value > 0 for value in values.values()), values
    assert 300 * 16_000 * 12 / 1e9 < values["histories_300_gb"] < 1.0, "the histories are there"
    assert processes("stoker.", str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
