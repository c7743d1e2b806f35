"""``ctx.branch``: a program that goes on several times, each time once, whoever is killed."""

import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from stoker.model.events import Admitted
from support import runs_errands as errands
from support.runs import Rig, rig
from support.runs_records import Rollout, read

PROGRAM = """
import stoker

SENT = 'printf "%s\\n" "$2" >> "$1"'


def grow(box, word):
    return box.run(["sh", "-c", 'printf %s. "$1" >> kept', "sh", word], replayable=False)


@stoker.rollout(version="1", boxes=2, timeout="5m")
async def tree(ctx, task):
    box = await ctx.environment("python", files={"kept": ""})
    idle = await ctx.environment("python", files={"kept": "idle."})
    chat = ctx.chat(f"tree of {ctx.rollout_id} {ctx.index} {ctx.now()}")
    await ctx.generate(chat)
    await grow(box, "root")
    held = ctx.random
    which = await ctx.branch(3)
    chat.user("on")
    turn = await ctx.generate(chat)
    word = f"{which}:{turn.text[:6]}:{held.randrange(10**6)}:{ctx.new_id()[-6:]}:{ctx.rollout_id}"
    await grow(box, word)
    await ctx.call(["sh", "-c", SENT, "sh", task.data["log"], word], effect="external")
    deeper = await ctx.branch(2) if which == 2 else 0
    await grow(box, f"d{deeper}")
    seen = [(await each.run(["cat", "kept"])).text for each in (box, idle)]
    assert seen == [f"root.{word}.d{deeper}.", "idle."], seen
    return stoker.Score(1.0, metrics={"which": which, "deeper": deeper, "drawn": held.random()})
"""
BEGUN = {(0, 0), (1, 0), (2, 0), (2, 1)}


def run_of(folder: Path, program: str = PROGRAM, **settings: Any) -> AbstractContextManager[Rig]:
    return rig(
        folder,
        program=program,
        model=errands.MODEL,
        tasks=[{"task_id": "tree", "data": {"log": str(folder / "tools.log")}}],
        settings=settings,
    )


def metrics(rollout: Rollout, *names: str) -> tuple[float, ...]:
    return tuple(rollout.outcome.metrics[name] for name in names)


def check(one: Rig) -> None:
    """Every branch is there once, of one group, and did its own work alone."""
    every = read(one.run.path).every
    assert [record.outcome.reward for record in every] == [1.0] * 4
    assert sorted(metrics(record, "which", "deeper") for record in every) == sorted(BEGUN)
    admitted = [record.standing.admitted for record in every]
    root = admitted[0]
    assert isinstance(root, Admitted)
    assert {one.group_id for one in admitted} == {root.group_id}
    assert {(one.sample, one.index) for one in admitted} == {(root.rollout_id, 0)}
    assert len({one.epoch for one in admitted}) == 4
    assert len({metrics(record, "drawn") for record in every}) == 4
    sent = [line.split(":") for line in one.lines()]
    assert sorted(which for which, *_ in sent) == ["0", "1", "2"], "external effects happen once"
    for place in (1, 2, 3, 4):
        assert len({words[place] for words in sent}) == 3, "each samples, draws and is named anew"
    snapshot = one.report()["snapshot"]
    assert (snapshot["rollouts_total"], snapshot["boxes_leaked"]) == (4, 0)


@pytest.mark.parametrize(
    "fault",
    [
        "coordinator.branch.before=kill@1",
        "coordinator.branch.after=kill@1",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                "",
                "coordinator.branch.before=kill@2",
                "coordinator.branch.after=kill@2",
                "coordinator.turned=kill@9",
                "coordinator.deliver.after=kill@9",
                *(f"coordinator.append.before=kill@{count}" for count in range(6, 18, 2)),
                *(f"coordinator.append.after=kill@{count}" for count in range(7, 18, 2)),
            )
        ),
    ],
)
def test_a_program_goes_on_several_times_and_each_time_once(tmp_path: Path, fault: str) -> None:
    with run_of(tmp_path) as one:
        one.start(fault=fault)
        if fault:
            assert one.ended() == -signal.SIGKILL, one.said()
            one.start()
        one.finish()
        check(one)
        if fault == "coordinator.branch.before=kill@1":
            return  # the others look at the rest
        run = one.run.path.name
        assert one.stoker("replay", run, "--every-prefix").returncode == 0
        assert one.stoker("ledger", "check", "--run", run).returncode == 0
        out = tmp_path / "rows.jsonl"
        assert one.stoker("export", run, "--out", str(out)).returncode == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert len({row["sample"] for row in rows}) == 1
        assert sorted(row["parent_steps"] or 0 for row in rows) == [0, 1, 1], (
            "the fourth asked for nothing"
        )
