"""``stoker worker``: one more worker for a run, in the foreground."""

import os
import sys
from typing import Annotated

import typer

from stoker.cli.options import RUNS_DIRECTORY, RunOption, RunsOption


def worker(
    run: RunOption,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Stable name; one living worker has it.")
    ],
    runs: RunsOption = RUNS_DIRECTORY,
) -> None:
    """Run actions of a run until it ends or Ctrl-C."""
    from stoker.coordinator.record import find_run

    found = find_run(run, runs)
    where = ["--run-directory", str(found.path), "--settings", str(found.settings)]
    command = [sys.executable, "-m", "stoker.worker.main", *where, "--name", name]
    # The worker takes this process's place: signals and its exit code are its own.
    os.execv(sys.executable, command)  # noqa: S606 - our own module
