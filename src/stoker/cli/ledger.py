"""``stoker ledger``: what the durable hand-off of a run holds, and whether it is sound."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import typer
from rich.console import Group, RenderableType

from stoker.broker.base import ActionView, DeadLettersRequest, Ledger, StatsReply
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunOption, RunsOption
from stoker.cli.output import answers, duration, table, write_json
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.model.ids import RunId

EXIT_UNSOUND = 1

_HELP = """The durable hand-off of a run.

Looks into the ledger of a run that is running, finished or dead. An owner
process is started for the question where none lives, and ends by itself.
Nothing is changed.

Examples:
  stoker ledger stats --run run_1a2b
  stoker ledger check --run run_1a2b

Exit codes:
  0    answered
  1    the ledger cannot be reached, or does not fit together
  2    no such run
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)
Answer = TypeVar("Answer")


@app.command("stats")
def stats(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> None:
    """Count what the ledger holds: queues, workers, results, commits.

    Queues by worker class with the age of the oldest, living workers with their
    leases, and totals since the ledger was made.

    Examples:
      stoker ledger stats --run run_1a2b
      stoker ledger stats --run run_1a2b --json

    Exit codes:
      0    counted
      1    the ledger cannot be reached
      2    no such run
      130  interrupted
    """
    found = _ask(find_run(run, runs), _stats)
    if as_json:
        write_json(found)
    else:
        answers().print(stats_view(found))


@app.command("check")
def check(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> int:
    """Read every journal and action; exit code 1 when something does not fit.

    Entries decode, the first admits the rollout, calls are answered once, nothing
    follows an outcome, and what waits for a result is still in the ledger.

    Examples:
      stoker ledger check --run run_1a2b
      stoker ledger check --run run_1a2b --json

    Exit codes:
      0    everything fits
      1    something does not, and is listed; or the ledger cannot be reached
      2    no such run
      130  interrupted
    """
    from stoker.cli.ledger_check import check as check_all

    found = _ask(find_run(run, runs), check_all)
    if as_json:
        write_json(found)
    else:
        console = answers()
        console.print(
            f"{found.rollouts} rollouts ({found.finished} finished), {found.entries} journal "
            f"entries, {found.outstanding} actions outstanding, {len(found.problems)} problems"
        )
        for problem in found.problems:
            console.print(cell(problem, "red"))
    return EXIT_UNSOUND if found.problems else 0


@app.command("dead")
def dead(run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False) -> None:
    """List dead letters: actions that used up their attempts, with every cause.

    An action that ended every worker it was given to becomes one, so that it
    cannot go on doing so; its rollout was told.

    Examples:
      stoker ledger dead --run run_1a2b
      stoker ledger dead --run run_1a2b --json

    Exit codes:
      0    listed, even when there are none
      1    the ledger cannot be reached
      2    no such run
      130  interrupted
    """
    found = _ask(find_run(run, runs), _dead)
    if as_json:
        write_json(found)
        return
    made = table("action", "rollout", "class", "tool", ">attempts", ">deliveries", "causes")
    for view in found:
        made.add_row(
            cell(view.action.action_id),
            cell(view.action.rollout_id),
            cell(view.action.worker_class),
            cell(view.action.tool),
            str(view.attempts),
            str(view.deliveries),
            cell("; ".join(view.causes), length=200),
        )
    answers().print(made if found else "no dead letters")


def stats_view(found: StatsReply) -> RenderableType:
    """Return the ledger's counters as tables."""
    classes = table("class", ">queued", ">oldest", ">leased", ">started", ">parked", ">slots")
    for name, one in sorted(found.classes.items()):
        counts = [str(count) for count in (one.leased, one.started, one.parked, one.slots)]
        oldest = duration(one.oldest_queued_seconds) if one.queued else "-"
        classes.add_row(cell(name), str(one.queued), oldest, *counts)
    workers = table("worker", "incarnation", "slots", ">leases", ">silent")
    for worker in found.workers:
        slots = ", ".join(f"{name} {count}" for name, count in sorted(worker.slots.items()))
        silent = duration(worker.silent_seconds)
        workers.add_row(
            cell(worker.name), cell(worker.worker_id), cell(slots), str(worker.leases), silent
        )
    totals = table("total", ">count")
    for name in StatsReply.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, int):
            totals.add_row(name.removesuffix("_total").replace("_", " "), str(value))
    for status, count in sorted(found.completions_total.items()):
        totals.add_row(f"completed {status}", str(count))
    filled = [made for made in (classes, workers) if made.row_count]
    return Group(*(part for made in filled for part in (made, "")), totals)


async def _stats(ledger: Ledger, run_id: RunId) -> StatsReply:
    del run_id
    return await ledger.stats()


async def _dead(ledger: Ledger, run_id: RunId) -> tuple[ActionView, ...]:
    return (await ledger.dead_letters(DeadLettersRequest(run_id=run_id))).actions


def _ask(run: RunDirectory, ask: Callable[[Ledger, RunId], Awaitable[Answer]]) -> Answer:
    from stoker.cli.ledger_access import ledger_of

    async def answer() -> Answer:
        async with ledger_of(run) as ledger:
            return await ask(ledger, run.record.run_id)

    return asyncio.run(answer())
