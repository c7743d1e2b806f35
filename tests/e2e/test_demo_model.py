import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "humaneval"
CANNOT = ("isolation_unavailable", "HumanEval problems are not installed")
SLIP = """
import sys
sys.path.insert(0, {example!r})
from problems import read_problems

def answer(request):
    solution = read_problems()[request.task_id].solution
    if request.step == 0:
        return {{"text": "I would say\\n```\\n" + solution + "    this is no Python"}}
    assert "The tests failed" in request.messages[-1].content
    assert "SyntaxError" in request.messages[-1].content
    return {{"text": "    pass"}} if request.task_id == "HumanEval/1" else {{"text": solution}}
"""


def demo(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "model_demo.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if ran.returncode == 2 and any(reason in ran.stderr for reason in CANNOT):
        pytest.skip(f"the demo needs boxes and problems: {ran.stderr.strip().splitlines()[-1]}")
    return ran


def test_the_problems_own_solutions_all_pass(tmp_path: Path) -> None:
    ran = demo("--solutions", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "164 of 164 passed their tests" in ran.stdout
    assert "boxes leaked: 0" in ran.stdout
    assert "BROKEN" not in ran.stdout


def test_a_traceback_gives_a_second_turn_and_a_wrong_answer_fails(tmp_path: Path) -> None:
    policy = tmp_path / "slip.py"
    policy.write_text(SLIP.format(example=str(EXAMPLE)))
    ran = demo(
        *("--problems", "3", "--tokens", "9000", "--model", f"scripted:{policy}"), cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 of 3 passed their tests" in ran.stdout
    assert "illustrative" in ran.stdout
    turns = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("HumanEval/")]
    assert turns == ["2", "2", "2"]


def test_a_model_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    ran = demo("--model", "torch:nowhere", cwd=tmp_path)
    assert ran.returncode == 2
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr
    assert not list(tmp_path.glob("runs/*")), "nothing is left behind"
