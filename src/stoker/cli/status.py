"""``stoker status``: a run as it is now, or as it was when its coordinator last wrote it down."""

from pathlib import Path

import msgspec

from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, counted, duration, remarks, write_json
from stoker.cli.text import cell
from stoker.coordinator.branch_requests import waiting
from stoker.coordinator.record import RunDirectory, RunRecord, find_run
from stoker.coordinator.sharing import parts_of
from stoker.coordinator.view import RunSnapshot
from stoker.coordinator.whole import merged
from stoker.errors import RunDirectoryUnusable
from stoker.seams.clock import SystemClock


class PartitionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a divided run."""

    partition: str
    """``0/2``."""
    process: int | None
    """Its living coordinator."""
    state: str | None
    """As it was written last; ``None``: it never was."""
    age_seconds: float | None


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What can be told without asking the coordinator."""

    run_id: str
    run_directory: str
    coordinator_lives: bool
    """Of a divided run: some coordinator."""
    age_seconds: float | None
    """Since the snapshot was written, of a divided run the oldest; ``None``: there is none yet."""
    snapshot: RunSnapshot | None
    partitions: tuple[PartitionStatus, ...] = ()
    """Of a divided run."""
    branches_waiting: int = 0
    """Branches that ``stoker branch`` asked for and no coordinator has taken in yet."""


def status(
    run: RunArgument, runs: RunsOption = RUNS_DIRECTORY, as_json: JsonOption = False
) -> None:
    """Say how a run is: living, finished or dead.

    Shows what the coordinator last wrote down, which it does once a second: the
    four figures of the lane, queues by worker class, outcomes, faults. Asks
    nobody, so it works while the run is busy, and after it died.

    Examples:
      stoker status run_1a2b
      stoker status run_1a2b --json

    Exit codes:
      0    the status is shown, whatever it says
      1    the run directory cannot be read
      2    no such run, or its status file holds something else
      130  interrupted
    """
    found = read_status(find_run(run, runs))
    if as_json:
        write_json(found)
        return
    from stoker.cli.live import frame

    console = answers()
    for line in _standing(found):
        console.print(cell(line, "bold" if found.coordinator_lives else "yellow"), soft_wrap=True)
    if found.branches_waiting:
        console.print(cell(_branches_standing(found), "yellow"), soft_wrap=True)
    if found.snapshot is not None:
        console.print(frame(found.snapshot, console.width))


def read_status(run: RunDirectory) -> Status:
    """Return the last written status of ``run``.

    Raises:
        RunDirectoryUnusable: the status file holds something else.
    """
    record = run.record
    parts = parts_of(run)
    found = [_snapshot(part.status) for part in parts]
    holders = [part.holder() for part in parts]
    partitions = tuple(
        PartitionStatus(
            partition=str(part.partition),
            process=int(holder) if holder.isdecimal() else None,
            state=snapshot.state if snapshot is not None else None,
            age_seconds=age,
        )
        for part, holder, (snapshot, age) in zip(parts, holders, found, strict=True)
    )
    written = sorted(((age, one) for one, age in found if one and age is not None), reverse=True)
    return Status(
        run_id=record.run_id,
        run_directory=str(run.path),
        coordinator_lives=any(holders),
        age_seconds=written[0][0] if written else None,
        snapshot=_whole(record, [one for _, one in written], lives=any(holders)),
        partitions=() if len(parts) == 1 else partitions,
        branches_waiting=waiting(run),
    )


def remark_unfinished(run: RunDirectory) -> None:
    """Say on stderr which parts of a divided run have not finished: whatever is shown lacks some
    of theirs.
    """  # noqa: D205 - one thought
    if run.record.partition_count > 1:
        found = read_status(run)
        for one in found.partitions:
            if one.state != "finished" or one.process is not None:
                remarks().print(cell(_partition_standing(found.run_id, one), "yellow"))


def _whole(record: RunRecord, written: list[RunSnapshot], *, lives: bool) -> RunSnapshot | None:
    """Return the run's snapshot; ``written`` has those of its partitions, the latest last."""
    if record.partition_count == 1 or not written:
        return written[0] if written else None
    snapshot = merged(written)
    state = snapshot.state
    if state != "finished" or len(written) < record.partition_count:
        state = ("running" if state == "finished" else state) if lives else "stopped"
    asked = record.settings.get("run", {})
    group_size = asked.get("group_size", 1) + asked.get("spare", 0)
    return msgspec.structs.replace(
        snapshot,
        state=state,
        tasks_total=record.tasks_count,
        rollouts_total=record.tasks_count * group_size,
    )


def _snapshot(path: Path) -> tuple[RunSnapshot | None, float | None]:
    try:
        content = path.read_bytes()
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None, None
    try:
        snapshot = msgspec.json.decode(content, type=RunSnapshot)
    except msgspec.MsgspecError as error:
        raise RunDirectoryUnusable(f"{path} is no status of a run: {error}.") from error
    return snapshot, max(0.0, SystemClock().now().wall - written)


def _standing(found: Status) -> list[str]:
    if found.partitions:
        return [_partition_standing(found.run_id, one) for one in found.partitions]
    return [_run_standing(found)]


def _run_standing(found: Status) -> str:
    if found.age_seconds is None or found.snapshot is None:
        begun = "its coordinator is starting" if found.coordinator_lives else "it never started"
        return f"{found.run_id}: no status has been written; {begun}"
    age = duration(found.age_seconds)
    if found.coordinator_lives:
        return f"{found.run_id}: its coordinator lives; as of {age} ago"
    if found.snapshot.state == "finished":
        return f"{found.run_id}: finished; as of {age} ago"
    return (
        f"{found.run_id}: no coordinator lives (it was {found.snapshot.state}, {age} ago); "
        f"go on with: stoker run … --resume {found.run_id}"
    )


def _branches_standing(found: Status) -> str:
    wait = f"{counted(found.branches_waiting, 'branch')} asked for by stoker branch"
    if found.coordinator_lives:
        return f"{wait}: its coordinator takes them in, within a second"
    return f"{wait}: to be run when the run goes on: stoker run … --resume {found.run_id}"


def _partition_standing(run_id: str, one: PartitionStatus) -> str:
    age = f"as of {duration(one.age_seconds)} ago" if one.state else "no status has been written"
    if one.process is not None:
        return f"{run_id} {one.partition}: process {one.process} lives; {age}"
    if one.state == "finished":
        return f"{run_id} {one.partition}: finished; {age}"
    was = f"it was {one.state}, {age}" if one.state else "it never started"
    return (
        f"{run_id} {one.partition}: no coordinator lives ({was}); "
        f"go on with: stoker run … --resume {run_id} --partition {one.partition}"
    )
