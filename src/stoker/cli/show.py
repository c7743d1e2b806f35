"""``stoker show``: the rollouts of a run, or one rollout's journal as a readable timeline."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.broker.base import JournalRequest, RolloutSummary
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, counted, duration, table, write_json
from stoker.cli.status import remark_unfinished
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.errors import ArtifactDamaged, BadInput
from stoker.model.events import Admitted, Finished, JournalEvent, decode_event
from stoker.model.ids import RolloutId
from stoker.model.outcome import Outcome
from stoker.model.value import Value

if TYPE_CHECKING:
    from stoker.cli.summaries import Read

_STYLES = {"completed": "green", "truncated": "yellow", "failed": "red", "ambiguous": "magenta"}
_NAMED_MAX = 3


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in the list."""

    rollout_id: str
    task: str
    index: int
    branch_of: str | None
    """Rollout it branched off; ``None``: the run itself began it."""
    outcome: Outcome | None
    """``None``: not finished."""
    steps: int | None
    actions: int | None
    seconds: float | None
    entries: int
    """Of its journal."""


def show(
    run: RunArgument,
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="ROLLOUT", help="Its id, the beginning of it, or its task."),
    ] = None,
    as_tree: Annotated[
        bool, typer.Option("--tree", help="Where the rollout and its boxes began.")
    ] = False,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show a run's rollouts, or everything one of them did.

    Without ROLLOUT a line for each: outcome, reward, steps, actions, time. With
    it the whole story from the journal, in the order in which results were
    delivered: what was asked, what came back, attempts, waits, faults. Large
    results are shortened; nothing an agent wrote reaches the terminal as control
    characters. With --tree whose branch it is, and for each environment step,
    parent, generation, and the digests of what it began with.

    Examples:
      stoker show run_1a2b
      stoker show run_1a2b HumanEval/7
      stoker show run_1a2b rol_0f3c --json
      stoker show run_1a2b rol_0f3c --tree

    Exit codes:
      0    shown
      1    the ledger cannot be reached
      2    no such run or rollout, or the name may be any of several
      130  interrupted
    """
    directory = find_run(run, runs)
    if rollout is None:
        if as_tree:
            raise BadInput("--tree shows one rollout: name it after the run; nothing was shown")
        rows = asyncio.run(list_rollouts(directory))
        remark_unfinished(directory)
        if as_json:
            write_json({"run_id": directory.record.run_id, "rollouts": rows})
        else:
            _print_rows(rows)
        return
    from stoker.cli.timeline import document, timeline

    events = asyncio.run(read_journal(directory, rollout))
    read = reader(directory)
    if as_tree:
        from stoker.cli.tree import lineage, tree

        told = lineage(events, read)
        if as_json:
            write_json(told)
        else:
            answers().print(tree(told))
    elif as_json:
        write_json(document(events, read))
    else:
        answers().print(timeline(events, read))


async def list_rollouts(run: RunDirectory) -> list[RolloutRow]:
    """Return the rollouts of ``run`` in order of admission."""
    from stoker.cli.ledger_access import all_rollouts, ledger_of

    async with ledger_of(run) as ledger:
        return [row_of(one) for one in await all_rollouts(ledger, run.record.run_id)]


async def read_journal(run: RunDirectory, name: str) -> list[JournalEvent]:
    """Return the journal of the rollout called ``name``.

    Raises:
        BadInput: the caller's: no rollout, or more than one, is called that.
    """
    from stoker.cli.ledger_access import all_rollouts, ledger_of

    async with ledger_of(run) as ledger:
        run_id = run.record.run_id
        rows = [row_of(one) for one in await all_rollouts(ledger, run_id)]
        rollout_id = RolloutId(chosen(rows, name).rollout_id)
        reply = await ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout_id))
        return [decode_event(stored) for stored in reply.events]


def reader(run: RunDirectory) -> "Read":
    """Return what reads values of ``run``, from the journal or the artifact store."""
    from stoker.journal.artifacts import ArtifactStore

    store = ArtifactStore(run.artifacts)

    def read(value: Value) -> bytes | None:
        if value.inline is not None:
            return value.inline
        try:
            return store.get(value)
        except ArtifactDamaged:  # the rest of the story is still worth telling
            return None

    return read


def chosen(rows: list[RolloutRow], name: str) -> RolloutRow:
    """Return the rollout called ``name``: its id, the beginning of it, or its task.

    Raises:
        BadInput: the caller's: no rollout, or more than one, is called that.
    """
    exact = [row for row in rows if row.rollout_id == name]
    found = exact or [row for row in rows if row.task == name or row.rollout_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise BadInput(
            f"this run has no rollout {name!r}; it has {counted(len(rows), 'rollout')}, which "
            "`stoker show RUN` lists"
        )
    several = ", ".join(row.rollout_id for row in found[:_NAMED_MAX])
    more = " …" if len(found) > _NAMED_MAX else ""
    raise BadInput(
        f"{name!r} may be any of {len(found)} rollouts: {several}{more}; name one by its id"
    )


def row_of(summary: RolloutSummary) -> RolloutRow:
    """Return the line of a rollout."""
    first = decode_event(summary.first)
    last = decode_event(summary.last) if summary.last is not None else None
    admitted = first if isinstance(first, Admitted) else None
    finished = last if isinstance(last, Finished) else None
    return RolloutRow(
        rollout_id=summary.rollout_id,
        task=admitted.task.task_id if admitted else "",
        index=admitted.index if admitted else 0,
        branch_of=_parent(admitted),
        outcome=finished.outcome if finished else None,
        steps=finished.steps if finished else None,
        actions=finished.actions if finished else None,
        seconds=finished.at - admitted.at if finished and admitted else None,
        entries=summary.seq,
    )


def _parent(admitted: Admitted | None) -> str | None:
    if admitted is None or admitted.branched is msgspec.UNSET:
        return None
    return admitted.branched.parent


def _print_rows(rows: list[RolloutRow]) -> None:
    made = table("rollout", "task", ">#", "outcome", ">reward", ">steps", ">actions", ">time")
    made.columns[0].no_wrap = True  # an id in two pieces could not be copied
    for row in rows:
        kind = str(row.outcome.kind) if row.outcome else "open"
        made.add_row(
            cell(row.rollout_id),
            cell(row.task, length=40),
            "branch" if row.branch_of else str(row.index),
            cell(f"{kind}{_reason(row.outcome)}", _STYLES.get(kind, "dim"), length=60),
            "" if row.outcome is None or row.outcome.reward is None else f"{row.outcome.reward:g}",
            "" if row.steps is None else str(row.steps),
            "" if row.actions is None else str(row.actions),
            duration(row.seconds),
        )
    answers().print(made)


def _reason(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    why = outcome.reason or (outcome.fault.code if outcome.fault else "")
    return f" ({why})" if why else ""
