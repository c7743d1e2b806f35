"""``stoker replay`` as typed: the same program, a changed one, one that is not deterministic."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.command import Answer, lay_out, run_arguments, skip_reason, stoker

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import random

import stoker


def noted(place):
    with open(place, "a") as file:
        file.write("x")
    return place


@stoker.tool(effect="pure")
def add(a, b):
    return a + b


@stoker.rollout(version="1", timeout="1m")
async def noting(ctx, task):
    await ctx.local(noted, task.data["place"])
    if task.task_id == "cut":
        async def forever():
            while True:
                await ctx.sleep("1h")
        await ctx.first(forever(), ctx.sleep("10ms"))
    await ctx.gather(ctx.generate(ctx.chat("a")), ctx.generate(ctx.chat("b")))
    await ctx.first(ctx.call(add, a=1, b=2), ctx.sleep("10ms"))  # no worker: time wins
    await ctx.generate(ctx.chat("c"))
    await ctx.local(noted, task.data["place"])
    if task.task_id == "unsteady":
        return random.random()
    return 1.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lay_out(tmp_path_factory.mktemp("replay"))
    (folder / "program.py").write_text(PROGRAM)
    data = {"place": str(folder / "notes")}
    names = ("steady", "cut", "unsteady")
    lines = [json.dumps({"task_id": one, "data": data}) + "\n" for one in names]
    (folder / "tasks.jsonl").write_text("".join(lines))
    done = stoker(folder, *run_arguments("--set", "program.check_replays=0"))
    assert done.code == 0, done
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    (found,) = (place / "runs").iterdir()
    return found.name


def replay(place: Path, run: str, *arguments: str) -> tuple[Answer, dict[str, Any]]:
    answer = stoker(place, "replay", run, *arguments, "--json")
    found = json.loads(answer.out)["rollouts"] if answer.out else []
    return answer, {one["task_id"]: one for one in found}


def test_the_same_program_does_the_same_and_carries_nothing_out(place: Path, run: str) -> None:
    notes = (place / "notes").read_text()
    answer, found = replay(place, run, "steady", "cut", "--every-prefix", "--hash-seed", "7")
    assert answer.code == 0, answer
    assert {name: one["verdict"] for name, one in found.items()} == {
        "steady": "same",
        "cut": "same",
    }
    assert found["steady"]["calls"] == 7
    assert found["steady"]["prefixes"] == 6
    assert (place / "notes").read_text() == notes, "a local function ran again"


def test_a_reward_that_is_drawn_anew_differs(place: Path, run: str) -> None:
    answer, found = replay(place, run, "unsteady")
    assert answer.code == 1
    assert found["unsteady"]["verdict"] == "differs"
    assert "the outcome differs\n  journal: completed, reward 0." in found["unsteady"]["message"]


def test_people_see_a_line_for_each_and_a_sum(place: Path, run: str) -> None:
    answer = stoker(place, "replay", run)
    assert answer.code == 1, answer
    lines = answer.out.splitlines()
    assert lines[0].endswith("steady #0  same  (7 calls)")
    assert lines[-1] == "3 rollouts: 2 same, 1 not"
    assert any(line.startswith("    the outcome differs") for line in lines)


def test_another_program_is_replayed_only_when_asked_for(place: Path, run: str) -> None:
    kept = (place / "program.py").read_text()
    (place / "program.py").write_text(kept.replace('ctx.chat("c")', 'ctx.chat("C")'))
    try:
        refused = stoker(place, "replay", run)
        assert (refused.code, refused.out) == (2, "")
        assert "has changed" in refused.err
        assert refused.err.count("\n") == 1
        answer, found = replay(place, run, "steady", "--program", "program.py:noting")
    finally:
        (place / "program.py").write_text(kept)
    assert answer.code == 1
    assert found["steady"]["verdict"] == "differs"
    message = found["steady"]["message"]
    assert "program.py:" in message
    assert '-      "content": "c"' in message
    assert '+      "content": "C"' in message


def test_a_program_that_ends_its_host_fails_its_rollout_alone(place: Path, run: str) -> None:
    (place / "ending").mkdir()
    (place / "ending" / "program.py").write_text(
        PROGRAM.replace(
            'if task.task_id == "cut":', 'if task.task_id == "cut":\n        exit_now()'
        )
        + "\n\ndef exit_now():\n    import os\n    os._exit(3)\n"
    )
    answer, found = replay(place, run, "--program", "ending/program.py")
    assert answer.code == 1
    assert [found[name]["verdict"] for name in ("steady", "cut", "unsteady")] == [
        "same", "failed", "differs",
    ]  # fmt: skip
    assert "ended its host" in found["cut"]["message"]


def test_a_copy_takes_the_place_of_the_recorded_file(place: Path, run: str) -> None:
    """Tools and local functions are journalled with the file they come from."""
    (place / "copies").mkdir()
    (place / "copies" / "copy.py").write_text(PROGRAM)
    kept = (place / "program.py").read_text()
    (place / "program.py").unlink()
    try:
        gone = stoker(place, "replay", run)
        answer, found = replay(place, run, "steady", "--program", "copies/copy.py")
    finally:
        (place / "program.py").write_text(kept)
    assert gone.code == 2
    assert "is gone; nothing was replayed" in gone.err
    assert answer.code == 0, answer
    assert found["steady"]["verdict"] == "same"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "nobody"], "has no rollout 'nobody'"),
        (["nothing"], "there is no run 'nothing'"),
        (["RUN", "--program", "gone.py"], "There is no program file gone.py"),
        (["RUN", "--hash-seed", "-1"], "Invalid value for '--hash-seed'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, place: Path, run: str
) -> None:
    answer = stoker(place, "replay", *(run if one == "RUN" else one for one in arguments))
    assert answer.code == 2, answer
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert not answer.out
