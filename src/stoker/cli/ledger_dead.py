"""``stoker ledger dead``: dead letters listed, shown, queued again, dropped."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from stoker.broker.base import ActionView, DeadLettersRequest
from stoker.broker.operating import AuditEntry, AuditRequest, DeadLetterVerb, SettleDead
from stoker.cli.cancel import whoever
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunOption, RunsOption
from stoker.cli.output import answers, counted, remarks, write_json
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.coordinator.sharing import is_running
from stoker.errors import BadInput, RunOwned
from stoker.model.action import ActionState
from stoker.model.ids import ActionId

EXIT_REFUSED = 1
_CAUSE_SHOWN = 200
_CAUSES = " Causes: "
"""Begins the causes in what the ledger says of a dead letter."""

_HELP = """Actions that used up their attempts, with every cause.

An action that ended every worker it was given to becomes a dead letter, so
that it cannot go on doing so; its rollout is told, and sees a fault.

Examples:
  stoker ledger dead list --run run_1a2b
  stoker ledger dead requeue act_3c4d --run run_1a2b

Exit codes:
  0    done
  1    the ledger cannot be reached, or some could not be done
  2    no such run; nothing was changed
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)

ActionArgument = Annotated[str, typer.Argument(metavar="ACTION", help="Id of a dead letter.")]
ActionsArgument = Annotated[
    list[str], typer.Argument(metavar="ACTION...", help="Ids of dead letters.")
]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="For the audit.")]


@app.command("list")
def list_dead(
    run: RunOption, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False
) -> None:
    """List the dead letters of a run.

    Waiting: no coordinator has applied its result yet; such a one can be queued
    again. Applied: its rollout has seen the result, which never changes.

    Examples:
      stoker ledger dead list --run run_1a2b
      stoker ledger dead list --run run_1a2b --json

    Exit codes:
      0    listed, even when there are none
      1    the ledger cannot be reached
      2    no such run
      130  interrupted
    """
    found, _ = asyncio.run(_look(find_run(run, runs)))
    if as_json:
        write_json([_whole(view) for view in found])
        return
    console = answers()
    for view in found:  # no table: ids in two pieces could not be copied
        standing = f"{_standing(view)}, {counted(view.attempts, 'attempt')}"
        of = f"{_work(view)}, rollout {view.action.rollout_id}"
        console.print(cell(f"{view.action.action_id}  {standing}  {of}"), soft_wrap=True)
        if view.causes:
            console.print(cell(f"  {view.causes[-1]}", "dim", length=_CAUSE_SHOWN), soft_wrap=True)
    if not found:
        console.print("no dead letters")


@app.command("show")
def show(
    action: ActionArgument,
    run: RunOption,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: every cause, and what operators did to it.

    One that was queued again or dropped still has its audit entries.

    Examples:
      stoker ledger dead show act_3c4d --run run_1a2b

    Exit codes:
      0    shown
      1    the ledger cannot be reached
      2    no such run, or it is no dead letter of this run
      130  interrupted
    """
    views, entries = asyncio.run(_look(find_run(run, runs)))
    view = next((one for one in views if one.action.action_id == action), None)
    audit = [entry for entry in entries if entry.action_id == action]
    if view is None and not audit:
        raise BadInput(
            f"{action} is no dead letter of {run}; it has {counted(len(views), 'dead letter')}, "
            f"which `stoker ledger dead list --run {run}` lists"
        )
    if as_json:
        write_json({"dead_letter": view and _whole(view), "audit": audit})
        return
    console = answers()
    if view is not None:
        said = view.completion.fault.message if view.completion and view.completion.fault else ""
        for label, text in (
            ("action", view.action.action_id),
            ("rollout", f"{view.action.rollout_id}, call {view.action.path}"),
            ("work", _work(view)),
            ("result", f"{_standing(view)}: {said.partition(_CAUSES)[0]}"),  # they follow
            *(("cause", cause) for cause in view.causes),
        ):
            console.print(f"{label:<9}", cell(text), soft_wrap=True)
    for entry in audit:
        console.print(f"{entry.what:<9}", cell(f"by {entry.who}: {entry.detail}"), soft_wrap=True)


@app.command("requeue")
def requeue(
    actions: ActionsArgument,
    run: RunOption,
    runs: RunsOption = RUNS_DIRECTORY,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> int:
    """Queue dead letters again, with fresh attempts and deadlines.

    Only while no coordinator has applied the result: a result that a rollout has
    seen never changes. So the run must not be running; resume it afterwards, and
    its rollouts wait for the new result. For an applied one, run its task again
    in a new run.

    Examples:
      stoker ledger dead requeue act_3c4d --run run_1a2b --reason "more memory"

    Exit codes:
      0    all are queued again; resume the run
      1    the ledger cannot be reached, or some could not be; each says why
      2    no such run, or it is running; nothing was changed
      130  interrupted
    """
    found = find_run(run, runs)
    if is_running(found):
        raise RunOwned(
            f"a coordinator of {found.path.name} lives and may be applying these results; nothing "
            "was changed; stop the run, requeue, and resume it"
        )
    return _settle(found, DeadLetterVerb.REQUEUE, actions, reason, as_json=as_json)


@app.command("drop")
def drop(
    actions: ActionsArgument,
    run: RunOption,
    runs: RunsOption = RUNS_DIRECTORY,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> int:
    """Forget the input and result of dead letters that were applied.

    What stays is the id and its fences, so that nothing late is ever taken for
    it, and an audit entry.

    Examples:
      stoker ledger dead drop act_3c4d act_5e6f --run run_1a2b

    Exit codes:
      0    all are dropped
      1    the ledger cannot be reached, or some could not be; each says why
      2    no such run; nothing was changed
      130  interrupted
    """
    return _settle(find_run(run, runs), DeadLetterVerb.DROP, actions, reason, as_json=as_json)


def _work(view: ActionView) -> str:
    return f"{view.action.tool} ({view.action.effect}) of class {view.action.worker_class}"


def _standing(view: ActionView) -> str:
    return "applied" if view.state is ActionState.ACKNOWLEDGED else "waiting"


async def _look(
    run: RunDirectory,
) -> tuple[tuple[ActionView, ...], tuple[AuditEntry, ...]]:
    from stoker.cli.ledger_access import ledger_of

    run_id = run.record.run_id
    async with ledger_of(run) as ledger:
        views = (await ledger.dead_letters(DeadLettersRequest(run_id=run_id))).actions
        return views, (await ledger.audit(AuditRequest(run_id=run_id))).entries


def _settle(
    run: RunDirectory, verb: DeadLetterVerb, actions: list[str], reason: str, *, as_json: bool
) -> int:
    refused = asyncio.run(_settled(run, verb, tuple(map(ActionId, actions)), reason))
    done = [action for action in actions if action not in refused]
    if as_json:
        write_json({"done": done, "refused": refused})
    else:
        word = "requeued" if verb is DeadLetterVerb.REQUEUE else "dropped"
        for action in done:
            answers().print(cell(f"{word} {action}"), soft_wrap=True)
        if done and verb is DeadLetterVerb.REQUEUE:
            again = f"run again with: stoker run … --resume {run.record.run_id}"
            answers().print(cell(again), soft_wrap=True)
        for action, why in refused.items():
            remarks().print(cell(f"not {word} {action}: {why}", "yellow"), soft_wrap=True)
    return EXIT_REFUSED if refused else 0


async def _settled(
    run: RunDirectory, verb: DeadLetterVerb, actions: tuple[ActionId, ...], reason: str
) -> dict[ActionId, str]:
    from stoker.cli.ledger_access import ledger_of

    request = SettleDead(
        run_id=run.record.run_id,
        verb=verb,
        action_ids=actions,
        who=whoever(),
        reason=reason,
    )
    async with ledger_of(run) as ledger:
        return (await ledger.settle_dead(request)).refused


def _whole(record: msgspec.Struct) -> Mapping[str, Any]:
    """Return every field of a record: on the wire and in the ledger those at rest are left out."""
    fields = msgspec.structs.asdict(record).items()
    return {name: _whole(v) if isinstance(v, msgspec.Struct) else v for name, v in fields}
