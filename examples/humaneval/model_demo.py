"""``make demo-model``: a small real model writes HumanEval answers, in this process, on the CPU.

SmolLM2-135M-Instruct samples through ``torch:``, its code runs in boxes, a traceback gives it a
second turn, a judge decides. How many tokens a turn may take follows from how fast this machine
samples, so that all of it ends within five minutes on two cores. The pass rate says little: the
model is a hundred times smaller than those people train. ``--solutions`` answers with the problems'
own solutions instead, which must all pass. Ends with 0 when every rollout came to its end (and,
with ``--solutions``, every answer passed).
"""

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from passes import HERE
from problems import COUNT, DataMissing, Problem, read_problems
from proof import Recorded, Told, read_run
from report import console
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tasks import checked, write_tasks

from stoker.cli.live import watching
from stoker.cli.output import duration, remarks, table
from stoker.cli.text import clean, shorten
from stoker.config.load import load_settings, process_environment
from stoker.coordinator.execute import execute
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import RunReport, RunRequest
from stoker.errors import EXIT_BAD_INPUT, BadInput, StokerError
from stoker.inference.base import Model
from stoker.inference.open import open_model, start_model
from stoker.model.events import Verb
from stoker.model.generation import GenerateRequest, Message, Role, Sampling
from stoker.model.ids import RolloutId
from stoker.model.outcome import OutcomeKind
from stoker.seams.entropy import fresh_id

EXIT_BROKEN = 1
PROBLEMS = 12
SMOL = "torch:smollm2"
SOLUTIONS = f"scripted:{HERE / 'solutions.py'}"
ASKED = "Complete this Python function. Answer with one Python code block.\n\n"
SECONDS_FOR_SAMPLING = 200.0
"""Of the five minutes; the rest is for loading, boxes and a machine that slows down."""
TURNS_MAX = 2
TOKENS_MIN, TOKENS_MAX = 48, 256
CALIBRATION_TOKENS = 8
WHY_CHARACTERS_MAX = 40


@dataclass(frozen=True)
class Budget:
    """How long an answer may be, and why."""

    tokens_max: int
    prompts_seconds: float = 0.0
    """As measured: the prompts of all problems."""
    tokens_per_second: float | None = None
    """As measured: all problems sampled together."""


def main(arguments: list[str]) -> int:
    """Run the demo; return its exit code."""
    options = _parsed(arguments)
    try:
        return asyncio.run(_run(options))
    except DataMissing as error:
        print(f"demo-model: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except StokerError as error:
        print(f"demo-model: {error.message} [{error.code}]", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_BROKEN


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="model_demo.py", description=__doc__)
    parser.add_argument("--problems", type=int, metavar="N", help="first N only")
    parser.add_argument("--model", default=SMOL, metavar="SPEC", help="as stoker run takes it")
    parser.add_argument("--solutions", action="store_true", help="the problems' own answers")
    parser.add_argument("--tokens", type=int, metavar="T", help="a turn's limit; else measured")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR")
    options = parser.parse_args(arguments)
    options.problems = options.problems or (COUNT if options.solutions else PROBLEMS)
    if not 1 <= options.problems <= COUNT:
        parser.error(f"--problems is {options.problems}; allowed: 1 to {COUNT}")
    if options.solutions:
        options.model, options.tokens = SOLUTIONS, options.tokens or 16_384
    return options


async def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    out = console()
    problems = list(read_problems().values())[: options.problems]
    settings = load_settings([HERE / "stoker.toml"], process_environment(), []).settings
    author = "the problems' own solutions" if options.solutions else options.model
    out.print(Text(f"HumanEval, {len(problems)} problems, answered by {author}", "bold"))
    model = open_model(options.model, base=Path.cwd(), settings=settings.model)
    await start_model(model)
    try:
        budget = Budget(options.tokens) if options.tokens else await calibrated(model, problems)
        say_budget(out, model, budget, started=time.monotonic() - began)
        directory = (options.runs / fresh_id("model_")).absolute()
        directory.mkdir(parents=True)
        tasks = directory / "tasks.jsonl"
        write_tasks(tasks, [_task(one, budget.tokens_max) for one in problems])
        request = RunRequest(
            program=HERE / "model_program.py",
            program_name=None,
            tasks=tasks,
            model=options.model,
            settings=settings,
            runs_directory=directory,
        )
        with watching(remarks()) as observer:
            report = await execute(request, observer=observer, model=model)
    finally:
        await model.close()
    run = RunDirectory(Path(report.snapshot.run_directory))
    held = say_results(out, report, await read_run(run), options)
    say_next(out, run, problems[0].task_id, seconds=time.monotonic() - began)
    return 0 if held else EXIT_BROKEN


async def calibrated(model: Model, problems: list[Problem]) -> Budget:
    """Return a budget after timing the prompts of all problems at once, then some steps of theirs.

    The second time their beginnings are in the cache, so that what is timed is sampling alone.
    """
    prompts = await _seconds(model, problems, 1)
    steps = await _seconds(model, problems, CALIBRATION_TOKENS)
    step = steps / CALIBRATION_TOKENS
    left = SECONDS_FOR_SAMPLING - TURNS_MAX * prompts
    fits = int(left / (TURNS_MAX * step))
    return Budget(max(TOKENS_MIN, min(TOKENS_MAX, fits)), prompts, len(problems) / step)


async def _seconds(model: Model, problems: list[Problem], tokens: int) -> float:
    asked = [
        model.generate(
            0,
            GenerateRequest(
                request_id=f"calibrate-{tokens}-{number}",
                rollout_id=RolloutId("rol_calibrate"),
                task_id=one.task_id,
                step=0,
                messages=(Message(role=Role.USER, content=ASKED + one.prompt),),
                tools=(),
                sampling=Sampling(temperature=0.0, tokens_max=tokens),
                seed=0,
            ),
        )
        for number, one in enumerate(problems)
    ]
    began = time.monotonic()
    await asyncio.gather(*asked)
    return time.monotonic() - began


def _task(problem: Problem, tokens_max: int) -> dict[str, object]:
    return {
        "task_id": problem.task_id,
        "data": {
            "prompt": ASKED + problem.prompt,
            "start": problem.prompt,
            "tokens_max": tokens_max,
            **checked(problem),
        },
    }


def say_budget(out: Console, model: Model, budget: Budget, *, started: float) -> None:
    """Say what will sample, how fast it is and how long a turn may be."""
    for notice in model.info().notices:
        out.print(Text(f"  {notice}", "dim"))
    measured = ""
    if budget.tokens_per_second is not None:
        measured = (
            f"measured here: prompts {duration(budget.prompts_seconds)}, then "
            f"{budget.tokens_per_second:.0f} tokens a second; "
        )
    out.print(
        f"  ready after {duration(started)}; {measured}a turn may take {budget.tokens_max} tokens\n"
    )


def say_results(
    out: Console, report: RunReport, recorded: Recorded, options: argparse.Namespace
) -> bool:
    """Say what became of each problem; return whether everything came to its end."""
    snapshot = report.snapshot
    ended = snapshot.outcomes.get(OutcomeKind.COMPLETED, 0)
    total = len(recorded.rollouts)
    if not options.solutions:
        out.print(results(recorded))
    out.print()
    out.print(f"{recorded.solved} of {total} passed their tests", soft_wrap=True)
    if not options.solutions:
        out.print(
            Text("illustrative: the model is tiny, one sample a problem, short answers", "dim")
        )
    tokens = sum(told.tokens for told in recorded.rollouts.values())
    out.print(f"{tokens} tokens in {duration(snapshot.seconds)}; boxes leaked: "
              f"{snapshot.boxes_leaked + snapshot.boxes_alive}")  # fmt: skip
    if ended != total:
        out.print(Text(f"BROKEN {total - ended} rollouts did not complete", "bold red"))
    if options.solutions and recorded.solved != total:
        out.print(Text(f"BROKEN {recorded.first_failure}", "bold red"))
        return False
    return ended == total


def results(recorded: Recorded) -> Table:
    """Return a table: what the model wrote for each problem and what came of it."""
    made = table("problem", ">turns", ">tokens", "", "why")
    for task, told in recorded.rollouts.items():
        turns = sum(verb is Verb.GENERATE for _, verb, _ in told.calls)
        passed = told.outcome is not None and told.outcome.reward == 1.0
        made.add_row(
            task,
            str(turns),
            str(told.tokens),
            Text("passed", "green") if passed else Text("failed", "dim"),
            shorten(clean(_why(told)), WHY_CHARACTERS_MAX),
        )
    return made


def _why(told: Told) -> str:
    """Return the last line of what the judge saw."""
    for path, verb, _ in told.calls:
        verdict = told.results.get(path, (None, None, None))[2]
        if verb is Verb.SCORE and verdict is not None and verdict.detail:
            return str(verdict.detail.strip().splitlines()[-1])
    return ""


def say_next(out: Console, run: RunDirectory, task: str, *, seconds: float) -> None:
    """Say where the run lies and how to look closer."""
    try:
        shown = run.path.relative_to(Path.cwd())
    except ValueError:
        shown = run.path
    command = Path(sys.executable).with_name("stoker")
    where = os.path.relpath(command) if command.exists() else "stoker"
    out.print(Text("\ntry next:", "dim"))
    out.print(f"  {where} show {shown} {task}", soft_wrap=True)
    out.print(f"  {where} export {shown} --out rows.jsonl", soft_wrap=True)
    out.print(f"\nAll of it took {duration(seconds)}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
