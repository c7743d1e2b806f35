"""A remote service that refuses, in a whole run: asked again by itself, at a lower rate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import lay_out, processes_about, skip_reason, stoker, wait_until_quiet

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import os

import stoker


@stoker.tool(effect="pure")
def ask(place, name):
    refused = os.path.join(place, "refused-" + name)
    if not os.path.exists(refused):
        open(refused, "w").close()
        raise stoker.TooManyRequests(retry_after=0.3)
    return "answer"


@stoker.rollout(version="1", timeout="2m")
async def asks(ctx, task):
    seen = await ctx.call(ask, place=task.data["place"], name=task.task_id)
    return 1.0 if seen.value == "answer" else 0.0
"""
CONFIG = """\
[workers.classes.fast]
isolation = "process"
trust = "trusted"
slots = 4
service = "web"

[services.web]
rate = 20.0
burst = 4
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    lay_out(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "stoker.toml").write_text(CONFIG)
    tasks = [{"task_id": f"t{n}", "data": {"place": str(tmp_path)}} for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    yield tmp_path
    wait_until_quiet(tmp_path)


def ran(place: Path, *more: str) -> Any:
    answer = stoker(
        place, "run", "program.py", "--tasks", "tasks.jsonl", "--model", "scripted:model.jsonl",
        "--config", "stoker.toml", "--json", *more,
    )  # fmt: skip
    assert answer.code == 0, answer
    return json.loads(answer.out)["snapshot"]


def test_a_refused_call_is_made_again_and_no_program_hears_of_it(place: Path) -> None:
    snapshot = ran(place)
    assert snapshot["outcomes"] == {"completed": 4}
    assert snapshot["reward_mean"] == 1.0, "no refusal was taken for an observation"
    assert snapshot["faults"] == {}
    assert snapshot["retries"] == 4
    web = snapshot["services"]["web"]
    assert web["rate_max"] == 20.0
    assert 1 <= web["lowered"] <= 4
    assert web["rate"] < 20.0
    wait_until_quiet(place)
    assert processes_about(place) == {}
    told = stoker(place, "status", snapshot["run_id"])
    assert "services" in told.out
    assert "web: " in told.out
