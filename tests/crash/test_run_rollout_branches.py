"""``stoker branch``: rollouts that share a past, with nothing of it run twice."""

import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from stoker.model.events import BRANCHED, Restored
from support import runs_errands as errands
from support.runs import Rig, rig
from support.runs_records import read

PROGRAM = """
import os

import stoker

SENT = 'printf "%s\\n" "$2" >> "$1"'


@stoker.rollout(version="1", boxes=2, timeout="5m")
async def walk(ctx, task):
    say = task.data
    box = await ctx.environment("python", files={"kept": ""})
    chat = ctx.chat(f"walk of {ctx.rollout_id} {ctx.index} {ctx.now()}")
    held = ctx.random
    told = ""
    for step in range(3):
        while step == 2 and say["gate"] and not await ctx.local(os.path.exists, say["gate"]):
            await ctx.sleep(0.1)
        turn = await ctx.generate(chat)
        chat.user("on")
        word = f"{step}:{turn.text[:6]}:{held.randrange(10**6)}:{ctx.new_id()[-6:]}."
        told += word
        await box.run(["sh", "-c", 'printf %s "$1" >> kept', "sh", word], replayable=say["again"])
        argv = ["sh", "-c", SENT, "sh", say["log"], f"{step} {ctx.rollout_id} {word}"]
        await ctx.call(argv, effect="external")
    seen = (await box.run(["cat", "kept"])).text
    assert seen == told, (seen, told)
    return stoker.Score(1.0, metrics={"drawn": float(held.randrange(10**6))})
"""


def run_of(
    folder: Path, *, again: bool = True, gate: Path | None = None
) -> AbstractContextManager[Rig]:
    data = {"log": str(folder / "tools.log"), "again": again, "gate": gate and str(gate)}
    return rig(
        folder,
        program=PROGRAM,
        model=errands.MODEL,
        tasks=[{"task_id": "walk", "data": data}],
    )


def branched(one: Rig, step: int, count: int, name: str = "walk") -> Any:
    run = one.run.path.name
    where = ("--at-step", str(step), "--count", str(count), "--json")
    ended = one.stoker("branch", run, name, *where)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    "fault",
    [
        "coordinator.append.after=kill@2",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                "",
                "coordinator.turned=kill@1",
                "coordinator.append.before=kill@1",
                "coordinator.append.after=kill@4",
                "coordinator.deliver.after=kill@2",
            )
        ),
    ],
)
def test_branches_share_the_past_and_nothing_after(tmp_path: Path, fault: str) -> None:
    with run_of(tmp_path) as one:
        one.start()
        one.finish()
        (parent,) = read(one.run.path).every
        made = branched(one, 1, 2)
        assert (made["parent"], made["step"]) == (parent.rollout_id, 1)
        one.start(fault=fault)
        if fault:
            assert one.ended() == -signal.SIGKILL, one.said()
            one.start()
        one.finish()
        every = {record.rollout_id: record for record in read(one.run.path).every}
        assert set(every) == {parent.rollout_id, *made["rollouts"]}
        assert [record.outcome.reward for record in every.values()] == [1.0, 1.0, 1.0]
        drawn = {record.outcome.metrics["drawn"] for record in every.values()}
        assert len(drawn) == 3, "each draws for itself after the branch point"
        sent = [line.split() for line in one.lines()]
        assert sorted(step for step, *_ in sent) == ["0", "1", "1", "1", "2", "2", "2"], sent
        words = [word for step, _, word in sent if step == "1"]
        assert len(set(words)) == 3, "each samples for itself"
        assert {who for step, who, _ in sent if step == "2"} == set(every)
        for name in made["rollouts"]:
            restored = [e for e in every[name].events if isinstance(e, Restored)]
            assert [e.reason for e in restored] == [BRANCHED], "had again once, and not lost"
        replayed = one.stoker("replay", one.run.path.name, "--every-prefix")
        assert replayed.returncode == 0, replayed.stdout
        assert one.report()["snapshot"]["rollouts_total"] == 3
        checked = one.stoker("ledger", "check", "--run", one.run.path.name)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        deeper = branched(one, 2, 1, made["rollouts"][0])
        one.start()
        one.finish()
        tree = json.loads(
            one.stoker("show", one.run.path.name, *deeper["rollouts"], "--tree", "--json").stdout
        )
        assert tree["branched"]["parent"] == made["rollouts"][0]
        assert tree["branched"]["generation"] == 2
        assert tree["branched"]["root"]["rollout_id"] == parent.rollout_id
        (environment,) = tree["environments"]
        assert environment["rebuilt"] == 0, "nothing of it was lost"
        shown = one.stoker("show", one.run.path.name, *deeper["rollouts"])
        assert "a box of this branch's own" in " ".join(shown.stdout.split())
        assert "environment_lost" not in shown.stdout
        assert one.stoker("replay", one.run.path.name, "--every-prefix").returncode == 0


def test_what_cannot_be_branched_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with run_of(tmp_path, again=False) as one:
        one.start()
        one.finish()
        run = one.run.path.name
        for step, says in ((3, "steps 0 to 2"), (-1, "steps 0 to 2"), (1, "cannot be had again")):
            refused = one.stoker("branch", run, "walk", "--at-step", str(step))
            assert refused.returncode == 2, refused
            assert says in " ".join(refused.stderr.split()), refused.stderr
        refused = one.stoker("show", run, "--tree")
        assert (refused.returncode, "name it after the run" in refused.stderr) == (2, True)
        assert len(read(one.run.path).every) == 1, "nothing was done"
        assert branched(one, 0, 1)["step"] == 0
        one.start()
        one.finish()
        assert [record.outcome.reward for record in read(one.run.path).every] == [1.0, 1.0]


@pytest.mark.parametrize(
    "fault",
    [
        "coordinator.branch.before=kill@1",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("", "coordinator.append.before=kill@30", "coordinator.append.after=kill@30")
        ),
    ],
)
def test_a_run_takes_branches_in_while_it_runs_or_when_it_is_resumed(
    tmp_path: Path, fault: str
) -> None:
    gate = tmp_path / "gate"
    with run_of(tmp_path, gate=gate) as one:
        one.start(fault=fault)
        one.until_lines(2)
        made = branched(one, 1, 2)
        more = branched(one, 1, 1, made["parent"])  # the others may be there already
        if fault:
            assert one.ended() == -signal.SIGKILL, one.said()
            one.start()
        gate.touch()
        one.finish()
        every = read(one.run.path).every
        assert {record.rollout_id for record in every[1:]} == {*made["rollouts"], *more["rollouts"]}
        assert [record.outcome.reward for record in every] == [1.0] * 4
        groups = [record.standing.admitted.group_id for record in every[1:]]
        assert sorted(map(groups.count, groups)) == [1, 2, 2], "a group for each command"
        steps = sorted(line.split()[0] for line in one.lines())
        assert steps == ["0", *"1111", *"2222"], "what is shared is not done again"
        one.start()
        one.finish()
        assert len(read(one.run.path).every) == 4, "a request is carried out once"


@pytest.mark.slow
def test_a_rollout_that_was_stopped_is_branched_and_both_go_on(tmp_path: Path) -> None:
    with run_of(tmp_path) as one:
        one.start(fault="coordinator.append.after=kill@7")
        assert one.ended() == -signal.SIGKILL
        made = branched(one, 0, 2)
        assert made["step"] == 0, "its first step alone may have been reached"
        one.start()
        one.finish()
        outcomes = [record.outcome.reward for record in read(one.run.path).every]
        assert outcomes == [1.0, 1.0, 1.0]
        assert one.stoker("replay", one.run.path.name, "--every-prefix").returncode == 0


@pytest.mark.slow
def test_a_restart_with_another_program_ends_branches_for_good(tmp_path: Path) -> None:
    with run_of(tmp_path) as one:
        one.start()
        one.finish()
        (name,) = branched(one, 1, 1)["rollouts"]
        one.program.write_text(PROGRAM.replace('"on"', '"on and on"'))
        one.start()
        assert one.ended() == 2, "another program"
        one.start("--changed", "restart")
        one.finish()
        outcomes = {record.rollout_id: record.outcome for record in read(one.run.path).every}
        assert outcomes[name].kind == "cancelled"
        one.start("--changed", "restart")
        one.finish()
