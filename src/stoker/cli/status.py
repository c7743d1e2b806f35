"""``stoker status``: a run as it is now, or as it was when its coordinator last wrote it down."""

from pathlib import Path

import msgspec

from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, duration, write_json
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.coordinator.view import RunSnapshot
from stoker.errors import RunDirectoryUnusable
from stoker.seams.clock import SystemClock


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What can be told without asking the coordinator."""

    run_id: str
    run_directory: str
    coordinator_lives: bool
    age_seconds: float | None
    """Since the snapshot was written; ``None`` when there is none yet."""
    snapshot: RunSnapshot | None


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
    console.print(
        cell(_standing(found), "bold" if found.coordinator_lives else "yellow"), soft_wrap=True
    )
    if found.snapshot is not None:
        console.print(frame(found.snapshot, console.width))


def read_status(run: RunDirectory) -> Status:
    """Return the last written status of ``run``.

    Raises:
        RunDirectoryUnusable: the status file holds something else.
    """
    snapshot, age = _snapshot(run.status)
    return Status(
        run_id=run.record.run_id,
        run_directory=str(run.path),
        coordinator_lives=run.coordinator_lives(),
        age_seconds=age,
        snapshot=snapshot,
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


def _standing(found: Status) -> str:
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
