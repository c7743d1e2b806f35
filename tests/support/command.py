"""The command line as typed: a fresh process, its answers, and what it left behind."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.source import ROOT

SECONDS_MAX = 120
STOKER = Path(sys.executable).parent / "stoker"

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="1m")
async def simple(ctx, task):
    turn = await ctx.generate(ctx.chat(task.data["prompt"]))
    return 1.0 if turn.text == "hello" else 0.0
"""
TASKS = '{"task_id": "a", "data": {"prompt": "hi"}}\n{"task_id": "b", "data": {"prompt": "ho"}}\n'
MODEL = '{"task_id": "*", "turns": ["hello"]}\n'


class Answer(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str


def lay_out(folder: Path) -> Path:
    """Write a program, two tasks and a model into ``folder``."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "tasks.jsonl").write_text(TASKS)
    (folder / "model.jsonl").write_text(MODEL)
    return folder


def stoker(folder: Path, *arguments: str, **environ: str) -> Answer:
    """Run ``stoker`` in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
    done = subprocess.run(
        [STOKER, *arguments], cwd=folder, env={**kept, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)


def run_arguments(*more: str) -> list[str]:
    """Return a run of the laid out program that needs no worker."""
    base = ["run", "program.py", "--tasks", "tasks.jsonl", "--model", "scripted:model.jsonl"]
    return [*base, "--set", "workers.count=0", *more]


def files_below(folder: Path) -> dict[str, bytes | None]:
    """Return path → content of everything below ``folder``; ``None`` for directories."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts and not path.is_socket()
    }


def processes_about(folder: Path) -> dict[int, str]:
    """Return pid → command line of living processes that name ``folder``."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(entry.name) != os.getpid():
            found[int(entry.name)] = line
    return found


def wait_until_quiet(folder: Path) -> None:
    """End the ledger's owner, which would serve whoever comes next for a while yet.

    Whatever else names ``folder`` is ended too, and an owner that it started meanwhile.
    """
    while found := processes_about(folder):
        for pid in found:
            with suppress(ProcessLookupError):  # it ended by itself
                _end(pid)


def _end(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGTERM)
        ready, _, _ = select.select([descriptor], [], [], SECONDS_MAX)
        assert ready, f"process {pid} did not end"
    finally:
        os.close(descriptor)


def skip_reason() -> str:
    """Return why the installed command cannot be run, or nothing."""
    return "" if STOKER.exists() else f"no command at {STOKER}; run: pip install -e {ROOT.name}"
