"""``stoker ledger``: what the durable hand-off of a run holds, and whether it is sound."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Group, RenderableType

from stoker.broker.base import Capabilities, StatsReply
from stoker.broker.client import LedgerClient
from stoker.cli import ledger_dead
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunOption, RunsOption
from stoker.cli.output import answers, counted, duration, remarks, size, table, write_json
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.model.ids import RunId

EXIT_UNSOUND = 1
_OWNERS = ("commits_total", "transitions_total", "syncs_total")
"""What the owner of a file counts anew."""

_HELP = """The durable hand-off of a run.

Looks into the ledger of a run that is running, finished or dead, and keeps it
in order. An owner process is started for a question where none lives, and it
ends by itself.

Examples:
  stoker ledger stats --run run_1a2b
  stoker ledger check --run run_1a2b
  stoker ledger dead list --run run_1a2b

Exit codes:
  0    done
  1    the ledger cannot be reached, or does not fit together
  2    no such run, or it cannot be done; nothing was changed
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)
app.add_typer(ledger_dead.app, name="dead")
Answer = TypeVar("Answer")


@app.command("stats")
def stats(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> None:
    """Count what the ledger holds: queues, workers, results, commits.

    Queues by worker class with the age of the oldest, living workers with their
    leases, and totals since the ledger was made (of a file, commits, transitions
    and syncs since its owner started). What would make a PostgreSQL server a
    better home, such as ending long transactions, is said on stderr.

    Examples:
      stoker ledger stats --run run_1a2b
      stoker ledger stats --run run_1a2b --json

    Exit codes:
      0    counted
      1    the ledger cannot be reached
      2    no such run
      130  interrupted
    """
    found, capabilities = _ask(find_run(run, runs), _counted)
    if as_json:
        write_json(found)
    else:
        answers().print(stats_view(found, capabilities.engine))
    for advice in capabilities.advice:
        remarks().print(cell(advice, "yellow"), soft_wrap=True)


async def _counted(ledger: LedgerClient, _: RunId) -> tuple[StatsReply, Capabilities]:
    return await ledger.stats(), await ledger.capabilities()


@app.command("check")
def check(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> int:
    """Check file, rows, journals and content; exit code 1 when something is wrong.

    Works on a copy beside the ledger, so a living one goes on undisturbed and a
    dead one is not opened. The database is sound; every row keeps the
    invariants; journals have no gaps, decode, answer calls once, and end with an
    outcome; what is named by digest is in the artifact store, undamaged.

    Examples:
      stoker ledger check --run run_1a2b
      stoker ledger check --run run_1a2b --json

    Exit codes:
      0    everything fits
      1    something does not, and is listed; or the ledger cannot be reached
      2    no such run, or a ledger of a newer stoker
      130  interrupted
    """
    from stoker.cli.ledger_check import check_run

    found = asyncio.run(check_run(find_run(run, runs)))
    if as_json:
        write_json(found)
        return EXIT_UNSOUND if found.problems else 0
    console = answers()
    rows = f"{counted(found.actions, 'row')} in {size(found.database_bytes)}"
    rows += f" (schema {found.schema_version})"
    if not found.schema_version:
        rows = "rows lie in PostgreSQL (for them: pg_amcheck)"
    console.print(
        f"{counted(found.rollouts, 'rollout')} ({found.finished} finished), "
        f"{counted(found.entries, 'journal entry')}, "
        f"{counted(found.outstanding, 'action')} outstanding; {rows}, "
        f"{counted(found.artifacts, 'artifact')} of {size(found.artifact_bytes)}; "
        f"{counted(len(found.problems), 'problem')}",
        soft_wrap=True,
    )
    for problem in found.problems:
        console.print(cell(problem, "red"), soft_wrap=True)
    return EXIT_UNSOUND if found.problems else 0


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tar file to write; must be new.")],
    run: RunOption,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Write everything of a run into one file, while it goes on.

    The file holds a consistent copy of the database, every artifact, tasks and
    settings: enough to resume the run elsewhere. Program and model are not in it.
    It is complete and on disk when the command ends, or not there at all.

    Examples:
      stoker ledger backup run_1a2b.tar --run run_1a2b

    Exit codes:
      0    written
      1    the ledger cannot be reached
      2    no such run, or the file exists or cannot be written; nothing was kept
      130  interrupted; nothing was kept
    """
    from stoker.coordinator.backups import back_up

    found = asyncio.run(back_up(find_run(run, runs), file))
    if as_json:
        write_json(found)
        return
    answers().print(
        f"{cell(found.file)}: run {cell(found.run_id)}, database {size(found.database_bytes)}, "
        f"{counted(found.artifacts, 'artifact')} of {size(found.artifact_bytes)}",
        soft_wrap=True,
    )


@app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What backup wrote.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Run directory to make; new or empty.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Make a run directory of a backup, with a ledger of a new identity.

    What the original did after the backup is unknown to the copy. So workers and
    coordinators of the original are refused, what they held is decided anew, and
    external actions that had not ended become ambiguous: they may have run since.

    Examples:
      stoker ledger restore run_1a2b.tar runs/run_1a2b

    Exit codes:
      0    restored; resume the run with stoker run … --resume DIR
      1    the restored ledger cannot be opened; nothing was kept
      2    no backup, a damaged one, or the directory is taken; nothing was kept
      130  interrupted; nothing was kept
    """
    from stoker.coordinator.backups import restore as restore_backup

    found = restore_backup(file, directory)
    if as_json:
        write_json(found)
        return
    answers().print(
        f"{cell(found.directory)}: run {cell(found.run_id)}, "
        f"{counted(found.artifacts, 'artifact')}; its ledger is {cell(found.lineage)}, made of a "
        f"copy of {cell(found.copied_from)}",
        soft_wrap=True,
    )
    answers().print(cell(f"go on with: stoker run … --resume {found.directory}"), soft_wrap=True)


@app.command("compact")
def compact(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> None:
    """Give the unused pages of a ledger's file back to the disk.

    Nothing is forgotten: ids and fences of ended actions stay for ever, so that
    none comes back. The file is rewritten in one transaction, and everybody waits
    meanwhile; so it is refused while work is in workers' hands.

    Examples:
      stoker ledger compact --run run_1a2b

    Exit codes:
      0    done; sizes before and after are shown
      1    the ledger cannot be reached, is busy, or has no room to be rewritten
      2    no such run, or it has no ledger
      130  interrupted
    """
    found = _ask(find_run(run, runs), lambda ledger, _: ledger.compact())
    if as_json:
        write_json(found)
    else:
        answers().print(f"{size(found.bytes_before)} before, {size(found.bytes_after)} after")


def stats_view(found: StatsReply, engine: str) -> RenderableType:
    """Return the ledger's counters as tables."""
    classes = table("class", ">queued", ">oldest", ">leased", ">started", ">parked", ">slots")
    for name, one in sorted(found.classes.items()):
        counts = [str(count) for count in (one.leased, one.started, one.parked, one.slots)]
        oldest = duration(one.oldest_queued_seconds) if one.queued else "-"
        classes.add_row(cell(name), str(one.queued), oldest, *counts)
    workers = table("worker", "incarnation", "slots", ">leases", ">silent")
    for worker in found.workers:
        slots = ", ".join(f"{name} {count}" for name, count in sorted(worker.slots.items()))
        if not (slots or worker.leases):
            continue  # nobody: a worker that ended took its own place, so that its leases are over
        silent = duration(worker.silent_seconds)
        workers.add_row(
            cell(worker.name), cell(worker.worker_id), cell(slots), str(worker.leases), silent
        )
    totals = table("total", ">count")
    for name in StatsReply.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, int):
            since = " since its owner started" if name in _OWNERS and engine == "sqlite" else ""
            totals.add_row(name.removesuffix("_total").replace("_", " ") + since, str(value))
    for status, count in sorted(found.completions_total.items()):
        totals.add_row(f"completed {status}", str(count))
    runs = table("run", ">queued", ">leased", ">parked")
    for name, run in sorted(found.runs.items()):
        runs.add_row(cell(name), str(run.queued), str(run.leased), str(run.parked))
    filled = [made for made in (classes, runs, workers) if made.row_count]
    return Group(*(part for made in filled for part in (made, "")), totals)


def _ask(run: RunDirectory, ask: Callable[[LedgerClient, RunId], Awaitable[Answer]]) -> Answer:
    from stoker.cli.ledger_access import ledger_of

    async def answer() -> Answer:
        async with ledger_of(run) as ledger:
            return await ask(ledger, run.record.run_id)

    return asyncio.run(answer())
