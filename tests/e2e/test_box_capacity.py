"""A30: room for two boxes, and fifty rollouts that each need a second one to be graded."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from stoker.config.tree import Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunRequest
from stoker.errors import IsolationUnavailable

ROLLOUTS = 50
PROGRAM = """
import stoker

TESTS = stoker.Tests(source="def check(f):\\n    assert f(3) == 9\\n", entry_point="square")


@stoker.rollout(version="1", boxes=1, timeout="5m")
async def graded(ctx, task):
    box = await ctx.environment("python", files={"solution.py": b"def square(x): return x * x"})
    await ctx.generate(ctx.chat("go"))
    return await ctx.score(box, TESTS, in_branch=True)
"""


def test_a30_rollouts_that_need_a_second_box_to_be_graded_all_finish(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "model.jsonl").write_bytes(b'{"task_id": "*", "turns": ["ok"]}\n')
    tasks = (msgspec.json.encode({"task_id": str(n), "data": {}}) for n in range(ROLLOUTS))
    (tmp_path / "tasks.jsonl").write_bytes(b"\n".join(tasks))
    settings = Settings.model_validate(
        {
            "sandbox": {"accept_shared_kernel": True},
            "admission": {"boxes_max": 2, "active_start": ROLLOUTS},
            "workers": {"classes": {"fast": {"slots": 2}}},
        }
    )
    request = RunRequest(
        program=tmp_path / "program.py",
        program_name=None,
        tasks=tmp_path / "tasks.jsonl",
        model=f"scripted:{tmp_path}/model.jsonl",
        settings=settings,
        runs_directory=tmp_path / "runs",
    )
    active: list[int] = []
    try:
        report = asyncio.run(
            execute(request, observer=lambda seen: active.append(seen.rollouts_active))
        )
    except IsolationUnavailable as error:
        pytest.skip(f"no boxes for untrusted work here: {error.message}")
    assert report.snapshot.outcomes == {"completed": ROLLOUTS}
    assert report.snapshot.reward_mean == 1.0
    assert report.snapshot.boxes_leaked == 0
    assert max(active) <= 2, "no more rollouts are admitted than boxes were reserved for"
