"""Seeded kills in runs whose rollouts act in environments, which die with their worker.

Everything these rollouts do in a box may be done again, so a lost box is rebuilt from its baseline
by running its finished actions again; what the program sees must be the same as if it had lived on.
"""

import math
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stoker.errors import EnvironmentLost
from stoker.model.events import Restored
from support import runs_errands as errands
from support.runs import LEASE, Rig, rig, tell, until
from support.runs_kills import Kill, strike
from support.runs_records import Records, read

PROGRAM = """
import os

import stoker

LINE = 'printf "%s\\\\n" "$2" >> "$1"; '
GROW = 'printf "%s." "$2" >> kept; sleep 0.02; cat kept'
HOLD = 'touch "$3"; until [ -e "$4" ]; do sleep 0.05; done; '


async def counting(ctx, box, log, rounds, hold=None):
    for number in range(rounds):
        script = LINE + (HOLD if hold and number == 1 else "") + GROW
        grown = await box.run(
            ["sh", "-c", script, "sh", log, str(number), *(hold or ())], timeout="10m"
        )
        assert grown.ok, grown.text
    return grown.text


async def waiting(ctx, gate):
    while not await ctx.local(os.path.exists, gate):
        await ctx.sleep(0.2)


@stoker.rollout(version="1", boxes=2, timeout="20m")
async def stateful(ctx, task):
    if "gate" in task.data:
        await ctx.gather(waiting(ctx, task.data["gate"]))
    log = task.data["log"]
    one, two = await ctx.gather(
        ctx.environment(files={"kept": "one:"}), ctx.environment(files={"kept": "two:"})
    )
    turn = await ctx.generate(ctx.chat("go"))
    grown = await ctx.gather(
        counting(ctx, one, log, 4, task.data.get("hold")), counting(ctx, two, log, 3)
    )
    await one.write_files({"more/told": turn.text})
    told = await one.run(["cat", "more/told", "kept"])
    kept = await two.read_file("kept")
    assert grown == ["one:0.1.2.3.", "two:0.1.2."], grown
    assert told.text == turn.text + "one:0.1.2.3.", told.text
    assert kept.content == b"two:0.1.2.", kept
    return len(turn.text) + ctx.random.random()
"""
ROLLOUTS = 40
LINES = 7
KILLS = 6
VICTIMS = (
    ("worker", signal.SIGKILL),
    ("worker", signal.SIGSTOP),
    ("coordinator", signal.SIGKILL),
    ("everything", signal.SIGKILL),
    ("owner", signal.SIGKILL),
    ("host", signal.SIGKILL),
)
SETTINGS: Mapping[str, object] = {
    "workers": {"count": 2},
    "admission": {"mode": "fixed", "active_max": 12},
}


def plan(seed: int) -> list[Kill]:
    """Return the kills of one run; workers are hit most."""
    draw = random.Random(seed)
    blows = [*VICTIMS[:4], *(draw.choice(VICTIMS) for _ in range(KILLS - 4))]
    draw.shuffle(blows)
    whole = (ROLLOUTS - errands.TAIL) * LINES
    moments = sorted(draw.sample(range(10, whole * 8 // 10), KILLS))
    return [
        Kill(lines, role, number, draw.randrange(4))
        for lines, (role, number) in zip(moments, blows, strict=True)
    ]


def stateful(folder: Path, kills: list[Kill]) -> AbstractContextManager[Rig]:
    """Return a run in which each kill finds a rollout in the middle of its first environment.

    However fast the machine: that rollout's tool waits until the kill was done. It is one that the
    lines before the kill do not need.
    """
    log = folder / "tools.log"
    tasks = errands.tasks(ROLLOUTS, log, gate=folder / "gate")
    for number, kill in enumerate(kills):
        held = tasks[math.ceil(kill.lines / LINES) + number]["data"]
        held["hold"] = [str(folder / f"{what}-{number}") for what in ("held", "go")]
    return rig(
        folder, program=PROGRAM, model=errands.MODEL, tasks=tasks, settings=SETTINGS, log=log
    )


def survive(one: Rig, kills: list[Kill]) -> None:
    """Run to the end through ``kills``, each of which finds work in the middle."""
    one.start()
    for number, kill in enumerate(kills):
        one.until_lines(kill.lines)
        until((one.folder / f"held-{number}").exists, f"a held rollout\n{one.said()}")
        strike(one, kill, held_seconds=LEASE * 1.5)
        (one.folder / f"go-{number}").touch()
    one.open_gate()
    one.finish()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    with stateful(tmp_path_factory.mktemp("reference"), []) as one:
        one.open_gate()
        one.start()
        one.finish()
        yield read(one.run.path)


@pytest.mark.parametrize(
    "seed", [21, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(22, 26))]
)
def test_killed_environments_are_rebuilt_or_typed(
    seed: int, tmp_path: Path, reference: Records
) -> None:
    kills = plan(seed)
    tell(f"seed {seed}: {kills}")
    with stateful(tmp_path, kills) as one:
        survive(one, kills)
        assert one.report()["snapshot"]["boxes_leaked"] == 0
        records = read(one.run.path)
    rebuilt = sum(isinstance(event, Restored) for found in records.every for event in found.events)
    tell(f"{rebuilt} environments rebuilt")
    assert rebuilt > 0, "a worker was killed while it held environments"
    assert records.outcomes["completed"] >= ROLLOUTS // 2, records.outcomes
    for place, expected in reference.rollouts.items():
        rollout = records.rollouts[place]
        if rollout.outcome.fault is not None:  # it was rebuilt as often as an environment may be
            assert rollout.outcome.fault.code == EnvironmentLost.code, (place, rollout.outcome)
            continue
        assert rollout.outcome == expected.outcome, place
        gate = errands.WAITING if "gate" in rollout.task.data else None
        seen = rollout.seen(records.store, gate=gate)
        assert seen == expected.seen(reference.store, gate=gate), place
