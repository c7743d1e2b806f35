"""The PostgreSQL bench, small: every figure is there; no speed is asserted."""

import pytest

from stoker.cli import bench_ledger_postgres
from support.postgres import server


def test_the_postgres_bench_measures_every_figure_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_ledger_postgres, "CYCLES", 256)
    monkeypatch.setattr(bench_ledger_postgres, "OUTSTANDING", 32)
    monkeypatch.setattr(bench_ledger_postgres, "CHURN_BATCHES", 4)
    said: list[str] = []
    document = bench_ledger_postgres.measure(server("on").url(), runs=1, say=said.append)
    figures = document["figures"]
    assert set(figures) == {
        "gateway_cycles_per_second",
        "raw_sql_cycles_per_second",
        "gateway_vs_raw_postgres",
        "cycles_vs_raw_postgres",
        "two_gateways_vs_one",
        "gateway_transitions_per_commit",
        "gateway_cpu_us_per_cycle",
        "raw_sql_client_cpu_us_per_cycle",
        "churn_rate_end_vs_warm",
        "churn_size_end_vs_warm",
        "churn_action_bytes_end_vs_warm",
    }
    assert figures["gateway_cycles_per_second"]["value"] > 0
    assert figures["gateway_transitions_per_commit"]["value"] > 5
    assert len(said) == 2, "long work shows progress"
