"""Many episodes in namespace boxes while workers are killed: nothing of any box may be left.

Each episode opens a box, leaves a process of its own session behind in it, writes and runs. A
worker is killed with SIGKILL after about every two hundred of them, at a moment in their work; the
coordinator starts it again, and that incarnation sweeps. What is counted at the end is what the
kernel has, not what the ledger of boxes says.
"""

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.sandbox.cgroups import find_tree
from stoker.sandbox.host import ROOT_WORK
from stoker.sandbox.marks import mark_of
from support import runs_errands as errands
from support.runs import Rig, rig, tell, until, wait_gone
from support.runs_records import read

pytestmark = pytest.mark.skipif(
    not errands.namespaces_work(), reason="no namespace boxes here: stoker doctor says why"
)

MARK = str(80_000 + os.getpid())
"""Seconds that what an episode leaves behind would sleep; others may run this beside us."""
PROGRAM = f"""
import os

import stoker


@stoker.rollout(version="1", timeout="20m")
async def episode(ctx, task):
    box = await ctx.environment(files={{"kept": task.task_id}}, worker_class="boxed")
    while "gate" in task.data and not await ctx.local(os.path.exists, task.data["gate"]):
        await ctx.sleep(0.2)
    left = await box.run(
        ["sh", "-c", "trap '' TERM; (setsid sh -c 'trap \\"\\" TERM; sleep {MARK}' &); cat kept"]
    )
    return float(left.text == task.task_id)
"""
WORKERS = 4
"""So many that one killed again has lived long enough not to be given up as broken."""
EVERY = 200
TAIL = 3
LONG = 10_000
SETTINGS = {
    "workers": {
        "count": WORKERS,
        "classes": {"boxed": {"isolation": "namespace", "slots": 2, "attempts": 20}},
    },
    "admission": {"mode": "fixed", "active_max": 24},
}


def test_what_an_episode_leaves_would_be_found() -> None:
    sleeper = subprocess.Popen(["sleep", MARK])
    try:
        assert bodies(set()) == [f"process {sleeper.pid}"]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert bodies(set()) == []


@pytest.mark.root
@pytest.mark.parametrize(
    ("episodes", "seed"), [(400, 1), pytest.param(LONG, 2, marks=pytest.mark.slow)]
)
def test_episodes_under_kills_leave_nothing(episodes: int, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tasks = [{"task_id": f"e{number:05}", "data": {}} for number in range(episodes)]
    for task in tasks[-TAIL:]:  # they keep the run, and their boxes, until every kill was done
        task["data"] = {"gate": str(tmp_path / "gate")}
    kills = 0
    with rig(tmp_path, program=PROGRAM, model=errands.MODEL, tasks=tasks, settings=SETTINGS) as one:
        one.start()
        until(lambda: len(one.pids("worker")) == WORKERS, f"workers\n{one.said()}")
        for due in moments(draw, episodes):
            wait_for(one, due)
            if not kills:  # what is looked for at the end is there while they work
                until(lambda: kinds(one) >= {"mount", "group", "folder"}, "boxes")
            pid = one.signal("worker", signal.SIGKILL, draw.randrange(WORKERS))
            assert wait_gone(pid)
            kills += 1
        one.open_gate()
        report = one.finish()
        records = read(one.run.path)
        left = bodies(marks(one))
    tell(f"seed {seed}: {kills} kills, {records.outcomes}, sweeps {sorted(sweeps(one))[-5:]}")
    assert records.outcomes["completed"] + records.outcomes["failed"] == episodes
    assert records.outcomes["completed"] >= episodes * 0.95
    assert {r.outcome.reward for r in records.rollouts.values()} <= {1.0, None}
    assert report["snapshot"]["boxes_leaked"] == 0
    assert left == []


def moments(draw: random.Random, episodes: int) -> Iterator[int]:
    """Yield after how many episodes a worker dies: every two hundred or so, never at the end."""
    due = draw.randrange(EVERY // 4, EVERY)
    while due < episodes * 9 // 10:
        yield due
        due += draw.randrange(EVERY // 2, EVERY * 3 // 2)


def wait_for(one: Rig, due: int) -> None:
    """Wait until so many episodes have ended."""
    until(lambda: done(one) >= due or one.ended_early(), f"episode {due}")
    assert not one.ended_early(), one.said()


def kinds(one: Rig) -> set[str]:
    """Return the kinds of things the kernel has of boxes of this run."""
    return {found.partition(" ")[0] for found in bodies(marks(one))}


def done(one: Rig) -> int:
    return sum(one.status()["outcomes"].values())


def sweeps(one: Rig) -> list[float]:
    """Return how long each sweep of a killed worker's boxes took."""
    lines = [
        json.loads(line)
        for log in (one.run.path / "logs").glob("worker-*.log")
        for line in log.read_text().splitlines()
    ]
    return [line["seconds"] for line in lines if line["event"] == "boxes_swept"]


def marks(one: Rig) -> set[str]:
    """Return the marks that boxes of this run's workers bear."""
    return {mark_of(home / "boxes") for home in one.run.workers.glob("*/")}


def bodies(marks: set[str]) -> list[str]:
    """Return what the kernel has of boxes with these marks, and of what episodes left behind."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            dead = (entry / "stat").read_bytes().rpartition(b") ")[2][:1] in (b"Z", b"X")
        except OSError:
            continue
        if argv[:2] == [b"sleep", MARK.encode()] and not dead:
            left.append(f"process {entry.name}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    left += [f"mount {line}" for line in mounts if any(f"/{mark}." in line for mark in marks)]
    tree = find_tree().tree
    if tree is not None:
        left += [f"group {name}" for mark in marks for name in tree.find(f"stoker.{mark}.")]
    if ROOT_WORK.is_dir():
        left += [f"folder {e}" for e in ROOT_WORK.iterdir() if e.name.split(".")[0] in marks]
    return left
