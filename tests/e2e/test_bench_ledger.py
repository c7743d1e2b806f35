from pathlib import Path

import pytest

from stoker.cli import bench_ledger

NO_PEERS = Path("there are none")


def test_the_ledger_bench_measures_every_figure_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ledger, "CYCLES", 600)
    monkeypatch.setattr(bench_ledger, "OUTSTANDING", 64)
    monkeypatch.setattr(bench_ledger, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(bench_ledger, "_SETTLE_SECONDS", 0.0)
    said: list[str] = []
    document = bench_ledger.measure(runs=2, queued=300, peers=NO_PEERS, say=said.append)
    figures = document["figures"]
    assert set(figures) == {
        "append_log_cycles_per_second",
        "cancel_ms_p99",
        "cycles_vs_append_log",
        "cycles_per_second",
        "recovery_seconds",
        "backlog_rate_ratio",
        "idle_cpu_share",
        "single_cycle_p50_syncs",
        "transitions_per_commit",
    }
    assert figures["cycles_per_second"]["runs"] == 2
    assert figures["cycles_per_second"]["value"] > 0
    assert figures["transitions_per_commit"]["value"] > 5, "what is ready goes in one commit"
    assert len(said) == 3, "long work shows progress"
    assert {"cycles_vs_durable_queue", "cycles_vs_ray_actor"} <= set(document["notes"])


def test_a_deep_queue_that_is_not_wanted_is_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_ledger, "CYCLES", 64)
    monkeypatch.setattr(bench_ledger, "OUTSTANDING", 8)
    monkeypatch.setattr(bench_ledger, "_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(bench_ledger, "_SETTLE_SECONDS", 0.0)
    document = bench_ledger.measure(runs=1, queued=0, peers=NO_PEERS, say=lambda _: None)
    assert "recovery_seconds" not in document["figures"]
    assert document["notes"]["recovery_seconds"] == "--queued 0"
