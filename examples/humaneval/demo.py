"""``make demo``: HumanEval in lock-step, with Stoker, and with Stoker killed half-way and resumed.

Needs no model and no accelerator: the device is simulated and says so. Everything else is real: the
tests run in boxes, actions pass through the ledger, a process is killed. Ends with 0 only when
every promise held: all problems solved in all passes, the killed run equal to the uninterrupted
one, no tool run twice, no box left behind.
"""

import argparse
import asyncio
import shutil
import sys
import time
from pathlib import Path

import passes
import report
from passes import Passed, PassFailed, Stage
from picture import draw
from problems import COUNT, DataMissing
from proof import Recorded, differences, read_run, run_twice
from report import Promise
from tasks import make_tasks, write_tasks

from stoker.cli.output import duration, remarks
from stoker.errors import EXIT_BAD_INPUT, BadInput, RunDirectoryUnusable, StokerError
from stoker.inference.profile import load_profile
from stoker.seams.entropy import fresh_id

EXIT_BROKEN = 1
EXIT_INTERRUPTED = 130
BATCHES = 2
"""Batches of the lock-step pass, unless --batch says otherwise."""


def main(arguments: list[str]) -> int:
    """Run the demo; return its exit code."""
    options = _parsed(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\ninterrupted; what was begun lies under " + str(options.runs), file=sys.stderr)
        return EXIT_INTERRUPTED
    except (DataMissing, PassFailed) as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, DataMissing) else EXIT_BROKEN
    except StokerError as error:
        print(f"demo: {error.message} [{error.code}]", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_BROKEN


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__)
    parser.add_argument("--problems", type=int, default=COUNT, metavar="N", help="first N only")
    parser.add_argument("--batch", type=int, metavar="B", help="rollouts in lock-step")
    parser.add_argument("--seed", type=int, default=7, help="seed of run and waits")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR")
    options = parser.parse_args(arguments)
    if not 2 <= options.problems <= COUNT:  # noqa: PLR2004 - half of one cannot be killed
        parser.error(f"--problems is {options.problems}; allowed: 2 to {COUNT}")
    options.batch = options.batch or -(-options.problems // BATCHES)
    if options.batch < 1:
        parser.error(f"--batch is {options.batch}; it must be at least 1")
    return options


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    directory = (options.runs / fresh_id("demo_")).absolute()
    tasks = make_tasks(seed=options.seed, counter=directory / "queue.log", count=options.problems)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise RunDirectoryUnusable(
            f"{directory} cannot be made ({error.strerror}); nothing was started; choose another "
            "place with --runs DIR"
        ) from error
    stage = Stage(
        directory=directory,
        tasks=tasks,
        console=remarks(),
        batch=options.batch,
        sets=[f"run.seed={options.seed}"],
    )
    write_tasks(stage.tasks_file, tasks)
    out = report.console()
    profile = load_profile(passes.HERE / "sim.toml")
    report.say_plan(out, count=len(tasks), batch=options.batch, profile=profile)

    report.say_pass(out, 1, "lock-step: sample all, run all tools, wait for the last, again")
    try:
        lockstep = stage.lockstep()
    except BadInput:  # this host cannot box: leave nothing behind
        shutil.rmtree(directory, ignore_errors=True)
        raise
    report.say_passed(out, lockstep)
    report.say_pass(out, 2, "Stoker: whatever is ready goes")
    steady = stage.steady()
    report.say_passed(out, steady)
    report.say_pass(out, 3, "Stoker, same seed: kill -9 half-way, then resume")
    resumed, killed = stage.killed()
    report.say_killed(out, killed)
    report.say_passed(out, resumed)

    records = asyncio.run(_records(steady, resumed))
    report.say_table(out, lockstep, steady)
    report.say_facts(out, steady, records[0])
    held = report.say_promises(out, _promises(stage, (lockstep, steady, resumed), records))
    picture = directory / "lanes.svg"
    lines = [lockstep.timeline, steady.timeline, resumed.timeline]
    title = f"{len(tasks)} HumanEval problems: sequences running on the simulated device"
    picture.write_text(draw(lines, title=title), "utf-8")
    report.say_next(out, steady, resumed, picture=picture, task=tasks[-1]["task_id"])
    out.print(f"\nAll of it took {duration(time.monotonic() - began)}.")
    return 0 if held else EXIT_BROKEN


async def _records(steady: Passed, resumed: Passed) -> tuple[Recorded, Recorded]:
    assert steady.run is not None
    assert resumed.run is not None
    return await read_run(steady.run), await read_run(resumed.run)


def _promises(
    stage: Stage, all_passed: tuple[Passed, Passed, Passed], records: tuple[Recorded, Recorded]
) -> list[Promise]:
    lockstep, steady, resumed = (passed.snapshot for passed in all_passed)
    count = len(stage.tasks)
    solved = [report.solved(all_passed[0]), *(record.solved for record in records)]
    failures = [f"; {record.first_failure}" for record in records if record.first_failure]
    unequal = differences(*records)
    twice = [sign for record in records for sign in run_twice(record, stage.counter)]
    actions = sum(record.actions for record in records)
    leaked = [one.boxes_leaked + one.boxes_alive for one in (lockstep, steady, resumed)]
    return [
        Promise(
            "solved",
            solved == [count] * 3,
            f"{_of(solved)} of {count}, in each pass{''.join(failures[:1])}",
        ),
        Promise(
            "killed and resumed equals uninterrupted",
            not unequal,
            unequal[0] if unequal else "tokens, observations, rewards",
        ),
        Promise(
            "no tool ran twice",
            not twice,
            twice[0] if twice else f"{actions} actions, one attempt each; the tool agrees",
        ),
        Promise("boxes leaked", leaked == [0, 0, 0], _of(leaked)),
    ]


def _of(numbers: list[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
