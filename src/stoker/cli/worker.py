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
    """Run actions of a run until it ends or Ctrl-C.

    One more worker beside those that the run started, with the classes, limits
    and isolation of the run's settings. It first ends whatever an earlier worker
    of its name left behind, then leases actions as long as there is a
    coordinator.

    Examples:
      stoker worker --run run_1a2b --name extra-1
      stoker worker --run /data/runs/run_1a2b --name extra-2

    Exit codes:
      0    the run ended, or Ctrl-C: what it held is given back
      1    it broke; what it held goes to other workers
      2    no such run, or no isolation this host can give; nothing was started
      130  interrupted before it had begun
    """
    from stoker.coordinator.record import find_run

    found = find_run(run, runs)
    where = ["--run-directory", str(found.path), "--settings", str(found.settings)]
    command = [sys.executable, "-m", "stoker.worker.main", *where, "--name", name]
    # The worker takes this process's place: signals and its exit code are its own.
    os.execv(sys.executable, command)  # noqa: S606 - our own module
