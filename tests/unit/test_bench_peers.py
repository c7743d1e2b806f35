"""Other queues in the ledger's bench: one line a turn, and a note where there is none."""

from pathlib import Path

import pytest

from stoker.cli.bench_ledger_peers import Peers

TURN = '{"cycles": %d, "seconds": 2.0, "versions": "it 1", "settings": "synced"}'


def environment(folder: Path, script: str) -> Path:
    """An environment whose Python is ``script``; ``$3`` is the peer's name."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder


def test_our_rate_is_set_against_the_best_queue_and_against_the_actor(tmp_path: Path) -> None:
    said: list[object] = []
    rates = "taskiq) n=200;; dramatiq) n=400;; procrastinate) n=20;; ray) n=2000;;"
    peers = Peers(
        environment(tmp_path, f"case $3 in {rates} esac; printf '{TURN}' $n"), said.append
    )
    for _ in range(3):
        peers.round()
    figures, notes = peers.figures([1600.0, 2000.0, 3000.0])
    assert notes == {}
    queue, actor = figures["cycles_vs_durable_queue"], figures["cycles_vs_ray_actor"]
    assert (queue["value"], queue["low"], queue["high"]) == (10.0, 8.0, 15.0)
    assert (queue["against"], queue["target"], queue["runs"]) == ("dramatiq", 8.0, 3)
    assert (actor["value"], actor["target"]) == (2.0, 2.0)
    assert figures["taskiq_cycles_per_second"]["against"] == "it 1: synced"
    assert len(said) == 12, "long work shows progress"


def test_without_an_environment_the_figures_are_left_out_with_the_remedy(tmp_path: Path) -> None:
    peers = Peers(tmp_path / "none", lambda _: None)
    peers.round()
    figures, notes = peers.figures([1.0])
    assert figures == {}
    assert set(notes) >= {"cycles_vs_durable_queue", "cycles_vs_ray_actor"}
    assert all("make bench-peers" in note for note in notes.values())


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("""echo '{"missing": "No module named taskiq"}'; exit 3""", "No module named taskiq"),
        ("echo it burns >&2; exit 1", "taskiq broke: it burns"),
        (f"printf '{TURN}' 0", "taskiq passed nothing through"),
        ("exit 1", "taskiq broke: without a word"),
    ],
)
def test_one_queue_that_is_missing_or_breaks_takes_the_comparison_with_it(
    script: str, note: str, tmp_path: Path
) -> None:
    fine = f"printf '{TURN}' 100"
    place = environment(tmp_path, f"if [ $3 = taskiq ]; then {script}; else {fine}; fi")
    peers = Peers(place, lambda _: None)
    peers.round()
    figures, notes = peers.figures([500.0])
    assert notes["cycles_vs_durable_queue"] == notes["taskiq_cycles_per_second"] == note
    assert "cycles_vs_durable_queue" not in figures
    assert figures["cycles_vs_ray_actor"]["value"] == 10.0
