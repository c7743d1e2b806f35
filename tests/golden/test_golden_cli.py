"""Help texts and the live view as they look. To rewrite the files: ``python`` this file."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from stoker.cli.live import frame
from stoker.cli.main import main
from support.snapshots import SNAPSHOT

FILES = Path(__file__).resolve().parent / "files"
HELP = {
    "help": ["--help"],
    "help_run": ["run", "--help"],
    "help_worker": ["worker", "--help"],
    "help_ledger": ["ledger", "--help"],
    "help_runs_prune": ["runs", "prune", "--help"],
    "help_baselines": ["baselines", "--help"],
    "help_baselines_prune": ["baselines", "prune", "--help"],
    "help_baselines_prepare": ["baselines", "prepare", "--help"],
    "help_status": ["status", "--help"],
    "help_cancel": ["cancel", "--help"],
    "help_show": ["show", "--help"],
    "help_branch": ["branch", "--help"],
    "help_doctor": ["doctor", "--help"],
    "help_conformance": ["conformance", "--help"],
    "help_bench": ["bench", "--help"],
    "help_config": ["config", "--help"],
    "help_export": ["export", "--help"],
    "help_replay": ["replay", "--help"],
    "help_ledger_stats": ["ledger", "stats", "--help"],
    "help_ledger_check": ["ledger", "check", "--help"],
    "help_ledger_backup": ["ledger", "backup", "--help"],
    "help_ledger_restore": ["ledger", "restore", "--help"],
    "help_ledger_compact": ["ledger", "compact", "--help"],
    "help_ledger_dead": ["ledger", "dead", "--help"],
    "help_ledger_dead_requeue": ["ledger", "dead", "requeue", "--help"],
    "help_bench_step": ["bench", "step", "--help"],
    "help_bench_scale": ["bench", "scale", "--help"],
    "help_bench_boxes": ["bench", "boxes", "--help"],
    "help_config_show": ["config", "show", "--help"],
    "help_config_check": ["config", "check", "--help"],
    "help_config_schema": ["config", "schema", "--help"],
}


def help_text(arguments: list[str]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), plain_terminal():
        assert main(arguments) == 0
    return trimmed(shown.getvalue())


def live_text(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(frame(SNAPSHOT, width))
    assert isinstance(console.file, io.StringIO)
    return trimmed(console.file.getvalue())


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


@contextlib.contextmanager
def plain_terminal() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def everything() -> dict[str, str]:
    texts = {name: help_text(arguments) for name, arguments in HELP.items()}
    return texts | {f"live_{width}": live_text(width) for width in (80, 120)}


@pytest.mark.parametrize("name", sorted([*HELP, "live_80", "live_120"]))
def test_it_looks_as_it_did(name: str) -> None:
    made = help_text(HELP[name]) if name in HELP else live_text(int(name.removeprefix("live_")))
    kept = (FILES / f"{name}.txt").read_text(encoding="utf-8")
    assert made == kept, f"if it is meant: PYTHONPATH=tests python {__file__}"


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for file, text in everything().items():
        (FILES / f"{file}.txt").write_text(text, encoding="utf-8")
    sys.exit(0)
