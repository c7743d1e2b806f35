"""``stoker branch``: new rollouts that share the past of one that is there."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.broker.base import Append, AppendBatch, Attach, Ledger
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, counted, write_json
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.errors import BadInput, RunOwned
from stoker.model.events import JournalEvent
from stoker.model.ids import RolloutId, RunId

if TYPE_CHECKING:
    from stoker.coordinator.branch_requests import BranchRequest
    from stoker.coordinator.branching import Point, PointBranches
    from stoker.model.events import Admitted

COUNT_MAX = 1024


class Branches(msgspec.Struct, frozen=True, kw_only=True):
    """What was made."""

    run_id: RunId
    parent: RolloutId
    step: int
    """Model calls they share."""
    asked_step: int
    rollouts: tuple[RolloutId, ...]
    coordinator_lives: bool
    """Whether a coordinator makes them within a second; else they are on record already."""


def branch(
    run: RunArgument,
    rollout: Annotated[
        str, typer.Argument(metavar="ROLLOUT", help="Its id, the beginning of it, or its task.")
    ],
    at_step: Annotated[
        int,
        typer.Option("--at-step", metavar="K", help="How many model calls the branches share."),
    ],
    count: Annotated[
        int,
        typer.Option("--count", metavar="N", min=1, max=COUNT_MAX, help="How many branches."),
    ] = 1,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Make new rollouts that share another's past up to one of its steps.

    They share its first K model calls and everything up to the last result before
    the next one; that one is sampled anew, by seeds of their own. Nothing of the
    past is run again but actions in its environments, which are had again from
    their last checkpoint or baseline. Where other calls were outstanding at that
    step, the nearest one before it is taken, and said. A living coordinator takes
    them in within a second; otherwise resume the run to run them.

    Examples:
      stoker branch run_1a2b HumanEval/7 --at-step 2 --count 16
      stoker branch run_1a2b rol_0f3c --at-step 0 --json

    Exit codes:
      0    made, or asked for; on disk
      1    the ledger cannot be reached
      2    no such run or step, or a box is not to be had again; nothing was done
      130  interrupted
    """
    directory = find_run(run, runs)
    made = asyncio.run(_make(directory, rollout, at_step, count))
    if as_json:
        write_json(made)
        return
    moved = "" if made.step == at_step else f" (the nearest before {at_step})"
    what = counted(count, "branch")
    answers().print(
        cell(f"{what} of {made.parent} at step {made.step}{moved}: {', '.join(made.rollouts)}"),
        soft_wrap=True,
    )
    when = (
        "its coordinator takes them in now; should it end before, "
        if made.coordinator_lives
        else ""
    )
    told = f"{when}run them with: stoker run … --resume {made.run_id}"
    answers().print(cell(told), soft_wrap=True)


async def _make(run: RunDirectory, name: str, step: int, count: int) -> Branches:
    from stoker.cli.ledger_access import all_rollouts, journal_of, ledger_of
    from stoker.cli.show import chosen, row_of
    from stoker.coordinator.branch_requests import BranchRequest, ask, asking
    from stoker.coordinator.branching import PointBranches, point_at
    from stoker.coordinator.listing import admitted_of
    from stoker.coordinator.sharing import part_of_task

    run_id = run.record.run_id
    async with ledger_of(run) as ledger:
        with asking(run) as asked:
            known = await all_rollouts(ledger, run_id)
            there = asked | {admitted_of(one).rollout_id for one in known}
            parent = RolloutId(chosen([row_of(one) for one in known], name).rollout_id)
            events = await journal_of(ledger, run_id, parent)
            point = point_at(events, step)
            first = next(n for n in itertools.count() if _free(parent, point, n, count, there))
            branches = PointBranches(events, point, first)
            task_id = branches.past.parent.task.task_id
            _require_program(run, branches.past.parent)
            tried = branches.past.events(branches.branch(first, 0.0))
            await _require_environments(run, ledger, tried)
            request = BranchRequest(
                parent=parent, task_id=task_id, point=point, first=first, count=count
            )
            part = part_of_task(run, task_id)
            try:
                with part.owned():
                    await _write(run_id, ledger, part.partition.name, branches, request)
                lives = False
            except RunOwned:
                lives = True
            # Of branches on record it tells that they wait; a coordinator finds them made.
            ask(run, request)
    return Branches(
        run_id=run_id,
        parent=parent,
        step=point.step,
        asked_step=step,
        rollouts=request.rollouts,
        coordinator_lives=lives,
    )


def _free(parent: RolloutId, point: "Point", first: int, count: int, there: set[RolloutId]) -> bool:
    """Whether nobody has numbers ``first`` and on at that point."""
    from stoker.coordinator.branching import point_branch_id

    return there.isdisjoint(point_branch_id(parent, point, first + n) for n in range(count))


async def _write(
    run_id: RunId,
    ledger: Ledger,
    partition: str,
    branches: "PointBranches",
    request: "BranchRequest",
) -> None:
    """Journal the branches of a partition that is held."""
    from stoker.seams.clock import SystemClock
    from stoker.seams.entropy import fresh_id

    at = SystemClock().now().wall
    attached = await ledger.attach(
        Attach(run_id=run_id, partition=partition, incarnation=fresh_id("crd_"))
    )
    for number in range(request.first, request.first + request.count):
        one = branches.branch(number, at)
        append = Append(
            rollout_id=one.rollout_id, expected_seq=0, events=branches.past.encoded(one)
        )
        await ledger.append(
            AppendBatch(
                run_id=run_id,
                partition=partition,
                fence=attached.fence,
                appends=(append,),
                sync=True,
            )
        )


def _require_program(run: RunDirectory, parent: "Admitted") -> None:
    """Refuse a branch whose past the run's program cannot have.

    Raises:
        BadInput: the caller's: the run was restarted with another one since.
    """
    if parent.program_digest != run.record.program_digest:
        raise BadInput(
            f"rollout {parent.rollout_id} was made with another program than run "
            f"{run.record.run_id} has since its restart; nothing was branched"
        )


async def _require_environments(
    run: RunDirectory, ledger: Ledger, journal: Sequence[JournalEvent]
) -> None:
    """Refuse a branch whose environments cannot be had again.

    Raises:
        BadInput: the caller's: one cannot.
    """
    from stoker.config.tree import WorkerSettings
    from stoker.coordinator.rebuild import rebuild
    from stoker.coordinator.resuming import Resumer
    from stoker.journal.artifacts import ArtifactStore
    from stoker.model.events import Verb
    from stoker.seams.clock import SystemClock

    artifacts = ArtifactStore(run.artifacts)
    workers = WorkerSettings.model_validate(run.record.settings.get("workers", {}))
    standing = rebuild(journal, artifacts.get)
    rollout = await Resumer(ledger, artifacts, SystemClock(), workers).revive(standing)
    for delivered in standing.delivered:
        opens = standing.issued[delivered.path].verb is Verb.ENVIRONMENT
        if not opens or delivered.fault is not None:
            continue
        if not rollout.environments[delivered.path].restorable():
            raise BadInput(
                f"environment {delivered.path} cannot be had again at that step: an action in it "
                "is not replayable and no checkpoint came after; nothing was branched; name "
                "another step, or keep checkpoints in the program"
            )
