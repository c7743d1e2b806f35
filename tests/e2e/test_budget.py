"""Budgets of whole runs, as typed: spent, told, resumed with what was spent before."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import lay_out, run_arguments, skip_reason, stoker, wait_until_quiet

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="2m")
async def talks(ctx, task):
    chat = ctx.chat("hi")
    for _ in range(task.data["turns"]):
        await ctx.generate(chat)
        chat.user("go on")
        await ctx.sleep(task.data["rest"])
    return 1.0
"""
ONE_AT_A_TIME = ("--set", "admission.active_max=1", "--json")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    lay_out(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "model.jsonl").write_text(
        json.dumps({"task_id": "*", "turns": ["hello"] * 3}) + "\n"
    )
    write_tasks(tmp_path, rest=0)
    yield tmp_path
    wait_until_quiet(tmp_path)


def write_tasks(place: Path, rest: float) -> None:
    """Four tasks of three turns; all but the first rest after each turn."""
    tasks = [{"task_id": f"t{n}", "data": {"turns": 3, "rest": rest if n else 0}} for n in range(4)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))


def snapshot(place: Path, code: int, *more: str) -> Any:
    answer = stoker(place, *run_arguments(*ONE_AT_A_TIME, *more))
    assert answer.code == code, answer
    return json.loads(answer.out)["snapshot"]


def test_a_spent_budget_admits_nothing_new_and_a_larger_one_goes_on_from_there(
    place: Path,
) -> None:
    each = snapshot(place, 0)["lane"]["tokens"] // 4
    assert each
    first = snapshot(place, 3, "--set", f"budget.tokens={each}")
    assert first["outcomes"] == {"completed": 1}, "what was active finished"
    assert first["state"] == "stopped"
    assert first["budget"]["tokens"] == each
    assert "budget.tokens" in first["held"]
    resumed = ("--resume", first["run_id"])
    again = snapshot(place, 3, *resumed, "--set", f"budget.tokens={each}")
    assert again["outcomes"] == {"completed": 1}, "what was spent before counts"
    more = snapshot(place, 3, *resumed, "--set", f"budget.tokens={3 * each}")
    assert more["outcomes"] == {"completed": 3}
    told = stoker(place, "status", first["run_id"])
    assert "budget" in told.out
    assert f"{3 * each} of {3 * each} tokens" in told.out
    last = snapshot(place, 0, *resumed)
    assert last["outcomes"] == {"completed": 4}


def test_what_is_active_may_be_truncated_with_that_reason(place: Path) -> None:
    each = snapshot(place, 0)["lane"]["tokens"] // 4
    write_tasks(place, rest=100)
    cut = snapshot(place, 3, "--set", f"budget.tokens={each + 1}", "--set", "budget.spent=truncate")
    assert cut["outcomes"] == {"completed": 1, "truncated": 1}
    shown = stoker(place, "show", cut["run_id"], "--json")
    assert "the run's budget is spent" in shown.out
