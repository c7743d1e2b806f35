"""``stoker cancel``: end a run, or one rollout of it, from another terminal."""

import asyncio
import os
import pwd
from typing import Annotated

import typer

from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, write_json
from stoker.cli.show import chosen, list_rollouts
from stoker.cli.status import read_status
from stoker.cli.text import cell
from stoker.coordinator.cancelling import CancelRequest, ask
from stoker.coordinator.record import find_run
from stoker.errors import BadInput
from stoker.model.ids import RolloutId

REASON_MAX = 200


def cancel(
    run: RunArgument,
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="ROLLOUT", help="Its id, the beginning of it, or its task."),
    ] = None,
    runs: RunsOption = RUNS_DIRECTORY,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Told with the outcome.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """End a run, or one rollout of it, for good.

    Every rollout that has no outcome yet ends as cancelled, with the reason and
    without a reward; its actions are called off and its boxes removed. What has
    an outcome keeps it. A living coordinator does so within a second, a dead one
    when the run is resumed. To stop a run and go on later, interrupt it instead.

    Examples:
      stoker cancel run_1a2b
      stoker cancel run_1a2b HumanEval/7 --reason "wrong tests"

    Exit codes:
      0    asked for, on disk
      1    the ledger cannot be reached
      2    no such run or rollout, or it has ended already; nothing was changed
      130  interrupted
    """
    if len(reason) > REASON_MAX:
        raise BadInput(f"--reason is longer than {REASON_MAX} characters; nothing was changed")
    directory = find_run(run, runs)
    rows = asyncio.run(list_rollouts(directory))
    status = read_status(directory)
    row = None if rollout is None else chosen(rows, rollout)
    if row is not None and row.outcome is not None:
        raise BadInput(
            f"rollout {row.rollout_id} is {row.outcome.kind} already; nothing was changed"
        )
    if row is None and status.snapshot is not None and status.snapshot.state == "finished":
        raise BadInput(f"run {status.run_id} has finished; nothing was changed")
    rollout_id = None if row is None else RolloutId(row.rollout_id)
    ask(directory, CancelRequest(rollout_id=rollout_id, reason=reason or f"asked by {whoever()}"))
    if as_json:
        write_json({"rollout_id": rollout_id, "coordinator_lives": status.coordinator_lives})
        return
    what = "all that is left" if row is None else row.rollout_id
    when = (
        "its coordinator does it now"
        if status.coordinator_lives
        else f"no coordinator lives; it takes effect with: stoker run … --resume {status.run_id}"
    )
    answers().print(cell(f"cancel asked for: {what} of {status.run_id}; {when}"), soft_wrap=True)


def whoever() -> str:
    """Return the name of who runs this command."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user of a container that no file names
        return f"uid {os.getuid()}"
