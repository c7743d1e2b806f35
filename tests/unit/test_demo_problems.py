import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.model.generation import GenerateRequest, Message, Role, Sampling
from stoker.model.ids import RolloutId

EXAMPLE = Path(__file__).parents[2] / "examples" / "humaneval"
RUNNER = """
import contextlib, io, json, os, signal, sys, tempfile
def late(*_): raise TimeoutError("took over 10 s")
signal.signal(signal.SIGALRM, late)
os.chdir(tempfile.mkdtemp())
for line in sys.stdin:
    task, program = json.loads(line)
    signal.alarm(10)
    said = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(program, "solution.py", "exec"), {"__name__": "solution"})
    except BaseException as error:
        said = type(error).__name__
    signal.alarm(0)
    print(json.dumps([task, said]))
"""


def example(name: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


@pytest.fixture
def problems() -> dict[str, Any]:
    module = example("problems")
    try:
        found: dict[str, Any] = module.read_problems()
    except module.DataMissing as error:
        pytest.skip(str(error))
    return found


def failures(programs: dict[str, str]) -> dict[str, str]:
    """Run every program in one child; return what each raised, empty for nothing."""
    lines = "".join(json.dumps([task, program]) + "\n" for task, program in programs.items())
    ran = subprocess.run(
        [sys.executable, "-I", "-c", RUNNER],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(json.loads(line) for line in ran.stdout.splitlines())


def test_every_right_answer_passes_its_tests(problems: dict[str, Any]) -> None:
    program = example("damage").check_program
    said = failures({task: program(one, one.solution) for task, one in problems.items()})
    assert len(said) == example("problems").COUNT
    assert {task: what for task, what in said.items() if what} == {}


def test_every_damaged_answer_fails_its_tests(problems: dict[str, Any]) -> None:
    damage = example("damage")
    programs = {
        task: damage.check_program(one, damage.damaged(task)) for task, one in problems.items()
    }
    said = failures(programs)
    assert [task for task in problems if not said[task]] == []
    assert "TimeoutError" not in said.values()
    assert len(set(said.values())) > 3, "slips of many kinds fail in many ways"


def test_tests_for_the_judge_hold_helpers_and_never_the_answer(problems: dict[str, Any]) -> None:
    for one in problems.values():
        compile(one.tests, one.task_id, "exec")
        assert "def check(" in one.tests
        assert f"def {one.entry_point}(" not in one.tests
    assert "def poly(" in problems["HumanEval/32"].tests
    assert "def encode_cyclic(" in problems["HumanEval/38"].tests


def test_slips_are_the_same_every_time(problems: dict[str, Any]) -> None:
    damage = example("damage")
    for one in list(problems.values())[:20]:
        assert damage.slips(one) == damage.slips(one)
        for slip in damage.slips(one):
            assert slip.applied(one.solution) != one.solution


def test_waits_follow_the_seed_and_have_a_heavy_tail() -> None:
    tasks = example("tasks")
    drawn = [w for n in range(164) for w in tasks.waits_of(f"HumanEval/{n}", 7)]
    assert drawn == [w for n in range(164) for w in tasks.waits_of(f"HumanEval/{n}", 7)]
    assert drawn != [w for n in range(164) for w in tasks.waits_of(f"HumanEval/{n}", 8)]
    median = sorted(drawn)[len(drawn) // 2]
    assert max(drawn) <= tasks.WAIT_SCALE * tasks.WAIT_SECONDS_MAX
    assert max(drawn) > 10 * median


def request(*messages: Message) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        rollout_id=RolloutId("rol_0"),
        task_id="HumanEval/2",
        step=0,
        messages=messages,
        tools=(),
        sampling=Sampling(),
        seed=0,
    )


def test_the_policy_corrects_itself_only_when_it_is_shown_a_failure(
    problems: dict[str, Any],
) -> None:
    answer, code_of = example("policy").answer, example("program").code_of
    damaged = example("damage").damaged("HumanEval/2")
    asked = Message(role=Role.USER, content="…")
    first = answer(request(asked))
    assert first["tool_calls"][0]["arguments"]["code"] == damaged

    def seen(text: str) -> str:
        return str(code_of(answer(request(asked, Message(role=Role.TOOL, content=text)))["text"]))

    assert seen("Traceback (most recent call last):\n  …\nAssertionError") == (
        problems["HumanEval/2"].solution
    )
    assert seen("all tests passed") == damaged
