"""Builds the demo's task file: one task for each HumanEval problem, with everything it needs.

Beside the problem a task carries the *waits*: seconds the trusted ``queue`` tool takes each time,
drawn from the task's seed. They are log-normal (median 0.3 s, 99 % under 8 s, cut at 8 s), which is
the shape of published tool times, and then scaled, so that three passes fit in a coffee break.
``python tasks.py FILE`` writes the file by itself.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

from problems import Problem, read_problems

WAIT_MEDIAN_SECONDS = 0.3
WAIT_SIGMA = 1.41
WAIT_SECONDS_MAX = 8.0
WAIT_SCALE = 0.5
"""All waits are multiplied by this; printed wherever they are shown."""
WAITS_PER_TASK = 1
"""One for each run of the tests."""
ASKED = (
    "Complete the function. You may run the tests with the tool run_tests; answer with the whole "
    "file when you are done.\n\n"
)


def make_tasks(*, seed: int, counter: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Return the first ``count`` tasks; the queue tool notes each of its runs in ``counter``."""
    problems = list(read_problems().values())[:count]
    return [_task(problem, seed, counter) for problem in problems]


def write_tasks(path: Path, tasks: list[dict[str, Any]]) -> None:
    """Write a task file as ``stoker run`` reads it."""
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")


def waits_of(task_id: str, seed: int) -> list[float]:
    """Return the scaled waits of a task, seconds."""
    drawn = random.Random(f"waits {seed} {task_id}")
    mean = math.log(WAIT_MEDIAN_SECONDS)
    full = (drawn.lognormvariate(mean, WAIT_SIGMA) for _ in range(WAITS_PER_TASK))
    return [round(WAIT_SCALE * min(WAIT_SECONDS_MAX, seconds), 3) for seconds in full]


def checked(problem: Problem) -> dict[str, str]:
    """Return what a task needs to have its answer tried and judged."""
    return {
        "entry_point": problem.entry_point,
        "check": f"from solution import *\n\n{problem.check.strip()}\n\n"
        f"check({problem.entry_point})\nprint('all tests passed')\n",
        "tests": problem.tests,
    }


def _task(problem: Problem, seed: int, counter: Path) -> dict[str, Any]:
    return {
        "task_id": problem.task_id,
        "seed": seed,
        "data": {
            "prompt": ASKED + problem.prompt,
            **checked(problem),
            "waits": waits_of(problem.task_id, seed),
            "counter": str(counter),
        },
    }


def main() -> None:
    """Write a task file; the queue tool will note its runs beside it."""
    parser = argparse.ArgumentParser(description="Write HumanEval as a task file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=None, help="first so many only")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    counter = options.file.absolute().with_name("queue.log")
    write_tasks(options.file, make_tasks(seed=options.seed, counter=counter, count=options.count))


if __name__ == "__main__":
    main()
