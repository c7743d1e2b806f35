"""``stoker run``: execute or resume a run, watch it, and say how it ended.

The first Ctrl-C drains (nothing new is admitted), the second stops, the third kills; the first two
leave the run resumable. SIGTERM and a closed terminal stop.
"""

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from stoker.cli.options import (
    RUNS_DIRECTORY,
    ConfigOption,
    JsonOption,
    RunsOption,
    SetOption,
    complete_run,
)
from stoker.cli.output import answers, remarks, write_json
from stoker.errors import ProgramInvalid

if TYPE_CHECKING:
    from stoker.config.tree import Settings
    from stoker.coordinator.partition import Partition
    from stoker.coordinator.request import Observer, RunReport, RunRequest, StopSignal

EXIT_RESUMABLE = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(  # noqa: PLR0917 - typer's options are parameters
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM[:NAME]", help="Python file with the rollout.")
    ],
    tasks: Annotated[Path, typer.Option("--tasks", metavar="FILE", help="JSON lines.")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="SPEC",
            help="scripted:FILE, sim:PROFILE, torch:FOLDER or http://HOST:PORT[,…].",
        ),
    ],
    config: ConfigOption = None,
    sets: SetOption = None,
    runs: RunsOption = RUNS_DIRECTORY,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with this run.", autocompletion=complete_run
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="RUN",
            help="Begin the run of this id, or go on with it.",
            autocompletion=complete_run,
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition", metavar="I/N", help="Only this part of N, from 0; others run theirs."
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="DIR", help="Share this ledger and its workers."),
    ] = None,
    changed: Annotated[
        str,
        typer.Option(
            "--changed",
            metavar="refuse|restart",
            help="What to do when a resumed run's program, model or limits differ.",
        ),
    ] = "refuse",
    as_json: JsonOption = False,
) -> int:
    """Execute a run: every task, every rollout, to a typed outcome.

    Each task of the file becomes a group of rollouts of the program; the model is
    asked, tools run in boxes, and every result is journalled before it is used. A
    crash loses nothing: the same command with --resume goes on where it stood.
    Ctrl-C drains (nothing new is admitted), a second one stops, a third kills.

    Several coordinators share one run when each is given the same --run-id and
    its own --partition. The first begins the run, the same command resumes its
    part; --resume without --partition goes on with all that nobody runs.

    Runs that name one --ledger share its workers, in fair parts; its quotas are
    settings (ledger.leased_per_run_max). The first run's classes hold for all.

    Examples:
      stoker run repair.py --tasks tasks.jsonl --model scripted:model.jsonl
      stoker run repair.py:main --tasks tasks.jsonl --model sim:device.toml
      stoker run repair.py --tasks t.jsonl --model sim:gpu.toml --resume run_1a2b
      stoker run r.py --tasks t.jsonl --model sim:g --run-id s7 --partition 1/4

    Exit codes:
      0    every rollout has its outcome, whatever it is
      1    a part broke under way; the run can be resumed
      2    the input cannot be used; nothing was started, nothing is left behind
      3    stopped with work left; the run can be resumed
      130  interrupted by a third Ctrl-C; the run can be resumed
    """
    # Deferred: other commands should not wait for the coordinator to be imported.
    from stoker.cli.live import watching
    from stoker.cli.report import summary
    from stoker.config.load import load_settings, process_environment
    from stoker.seams.faultpoints import arm

    arm(process_environment())
    shared = [f"ledger.directory={json.dumps(str(ledger.resolve()))}"] if ledger else []
    resolved = load_settings(config or [], process_environment(), [*(sets or []), *shared])
    which = Which(resume=resume, run_id=run_id, partition=partition)
    request = make_request(
        program, tasks, model, resolved.settings, runs=runs, which=which, changed=changed
    )
    console = remarks()
    with watching(console) as observer:
        report = asyncio.run(
            execute(request, observer, console, all_parts=bool(resume) and partition is None)
        )
    if as_json:
        write_json(report)
    else:
        answers().print(summary(report), soft_wrap=True)  # ids and commands stay whole
    return EXIT_RESUMABLE if report.resumable else 0


class Which(NamedTuple):
    """Which run, and which part of it, as typed."""

    resume: str | None = None
    run_id: str | None = None
    partition: str | None = None


def make_request(
    program: str,
    tasks: Path,
    model: str,
    settings: "Settings",
    *,
    runs: Path,
    which: Which,
    changed: str,
) -> "RunRequest":
    """Return what was asked for, checked as far as files go.

    Raises:
        BadInput: the caller's: something named does not exist or cannot be used.
    """
    from stoker.coordinator.partition import WHOLE, partition_of
    from stoker.coordinator.record import find_run
    from stoker.coordinator.request import Changed, RunRequest
    from stoker.model.ids import RunId

    if changed not in set(Changed):
        allowed = ", ".join(Changed)
        raise typer.BadParameter(f"--changed is {changed!r}; allowed: {allowed}")
    path, name = program_of(program)
    directory = find_run(which.resume, runs).path if which.resume is not None else None
    return RunRequest(
        program=path,
        program_name=name,
        tasks=tasks,
        model=model,
        settings=settings,
        runs_directory=directory.parent if directory is not None else runs,
        resume=RunId(directory.name) if directory is not None else None,
        run_id=RunId(which.run_id) if which.run_id is not None else None,
        partition=partition_of(which.partition) if which.partition is not None else WHOLE,
        changed=Changed(changed),
    )


def program_of(text: str) -> tuple[Path, str | None]:
    """Divide ``FILE[:NAME]``; a file whose own name holds a colon wins.

    Raises:
        ProgramInvalid: there is no such file.
    """
    if Path(text).is_file():
        return Path(text), None
    file, colon, name = text.rpartition(":")
    if colon and Path(file).is_file():
        return Path(file), name
    raise ProgramInvalid(f"There is no program file {file if colon else text}.")


async def execute(
    request: "RunRequest",
    observer: "Observer | None",
    console: Console,
    *,
    all_parts: bool = False,
) -> "RunReport":
    """Execute ``request`` with signals turned into drain and stop.

    ``all_parts``: of a divided run, every part that nobody executes.
    """
    from stoker.coordinator.divided import execute_all
    from stoker.coordinator.execute import execute as coordinate
    from stoker.coordinator.request import StopSignal

    stop = StopSignal()
    loop = asyncio.get_running_loop()
    # What our parent had ignored stays ignored: nohup, and background jobs of a script.
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in taken:
        if number is signal.SIGINT:
            loop.add_signal_handler(number, interrupted, stop, console, loop)
        else:
            loop.add_signal_handler(number, stop.stop)
    try:
        if parts := _parts_left(request) if all_parts else ():
            return await execute_all(request, parts, observer=observer, stop=stop)
        return await coordinate(request, observer=observer, stop=stop)
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


def _parts_left(request: "RunRequest") -> "tuple[Partition, ...]":
    """Return the parts of the resumed run that nobody executes; nothing where it is not divided."""
    from stoker.coordinator.divided import resumable
    from stoker.coordinator.record import find_run

    assert request.resume is not None, "only a run that is there has parts"
    run = find_run(request.resume, request.runs_directory)
    return resumable(run) if run.record.partition_count > 1 else ()


def interrupted(stop: "StopSignal", console: Console, loop: asyncio.AbstractEventLoop) -> None:
    """Take one Ctrl-C."""
    if not stop.draining:
        stop.drain()
        console.print("draining: nothing new is admitted; Ctrl-C again stops now (resumable)")
        return
    stop.stop()
    console.print("stopping; the run can be resumed")
    loop.remove_signal_handler(signal.SIGINT)  # the next one is Python's own: it ends everything
