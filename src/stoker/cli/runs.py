"""``stoker runs``: what ended runs take on the disk, and what of it may go."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import RUNS_DIRECTORY, JsonOption
from stoker.cli.output import answers, size, table, write_json
from stoker.cli.text import cell
from stoker.config.units import seconds
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.storage import judge, prune, sweep
from stoker.seams.clock import SystemClock

_HELP = """The runs below a directory, as a whole.

Each run is a directory of its own; what it leaves stays until it is pruned.

Examples:
  stoker runs prune --dry-run

Exit codes:
  0    done
  1    a run could not be removed whole
  2    the input cannot be used; nothing was removed
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Make ``prune`` a command of a group, where others will stand."""


@app.command("prune")
def prune_runs(
    runs: Annotated[
        Path, typer.Option("--runs", metavar="DIR", help="Where runs lie.")
    ] = RUNS_DIRECTORY,
    older: Annotated[
        str, typer.Option("--older", metavar="AGE", help="Exported longer ago than this (7d).")
    ] = "0s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove runs that are finished and exported, with everything they left.

    A run goes whole, with ledger, artifacts and logs, or not at all. It stays
    while it is running, unfinished, not exported since it finished (stoker
    export), in use by somebody, or on a ledger that it shares with others.

    Examples:
      stoker runs prune --dry-run
      stoker runs prune --older 7d --runs /data/runs

    Exit codes:
      0    every run that may go is gone; the others are shown with the reason
      1    a run could not be removed whole
      2    the age cannot be read; nothing was removed
      130  interrupted; a run that was being removed is no run any more
    """
    age = _age(older)
    if not dry_run:
        sweep(runs)
    before = SystemClock().now().wall - age
    found = []
    for record in sorted(runs.glob("*/run.json")):
        run = RunDirectory(record.parent)
        judged = judge(run, before)
        found.append(judged)
        if not judged.kept and not dry_run:
            prune(run)
    if as_json:
        write_json(found)
        return
    made = table("run", ">size", "what becomes of it")
    for one in found:
        gone = "would be removed" if dry_run else "removed"
        made.add_row(
            cell(one.run),
            size(one.size_bytes),
            cell(f"stays: {one.kept}") if one.kept else cell(gone, "green"),
        )
    answers().print(made if found else f"no runs in {runs}")


def _age(text: str) -> float:
    try:
        return float(str(seconds(text)))
    except ValueError as error:
        raise typer.BadParameter(f"--older is {text!r}: {error}") from error
