"""``stoker bench boxes`` measures real boxes and names its figures as DESIGN promises."""

import shutil

import pytest

from stoker.cli import bench_boxes, bench_boxes_containers, bench_boxes_warm
from support import sandbox

PROMISED = {
    "wall_overshoot_ms_p99", "cpu_overshoot_ms_p99", "flood_stop_ms_p99", "teardown_ms_p99",
    "sweep_seconds", "hundred_boxes_seconds",
}  # fmt: skip
WARM = {
    "warm_action_vs_fork", "warm_action_ms_p50", "actions_per_second_per_core",
    "armed_result_ms_p50", "hundred_warm_seconds", "warm_bare_action_ms_p50",
}  # fmt: skip
NOT_YET = {"qemu_fork_ms_p50", "qemu_files_fork_vs_fork", "smol_branch_ms_p50"}


def test_a_small_bench_measures_everything_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_COLD_RUNS", "_WALL_RUNS", "_LIMIT_RUNS", "_JUDGE_RUNS", "_TOGETHER", "_HUNDRED"):
        monkeypatch.setattr(bench_boxes, name, 2)
    monkeypatch.setattr(bench_boxes_containers, "_RUNS", 2)
    for name in ("_RUNS", "_TOGETHER_RUNS", "_HUNDRED"):
        monkeypatch.setattr(bench_boxes_warm, name, 2)
    said: list[object] = []
    document = bench_boxes.measure(runs=2, say=said.append, guests=False)
    assert document["bench"] == "boxes"
    assert {"cores", "load", "steal", "sync_ms_p50", "versions", "rung"} <= set(document["machine"])
    figures = document["figures"]
    assert set(figures) >= PROMISED
    assert set(document["notes"]) - (set() if sandbox.ROOT else WARM) == NOT_YET
    assert not NOT_YET & set(figures)
    for figure in figures.values():
        assert set(figure) == {"value", "unit", "target", "against", "runs", "low", "high"}
        assert figure["runs"] == 2
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert figures["sweep_seconds"]["low"] > 0
    assert len(said) == 2
    if sandbox.ROOT and shutil.which("runc"):
        assert set(figures) >= {"container_vs_runtime", "cold_box_vs_runtime"}
    if sandbox.ROOT:
        assert set(figures) >= {"cold_box_vs_launcher", *WARM}
        assert document["machine"]["rung"] == "a"
