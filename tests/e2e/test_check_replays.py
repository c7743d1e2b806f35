"""Check replays reach short runs too: what is queued is checked before the run ends."""

import asyncio
from pathlib import Path

import pytest

from stoker.config.tree import Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunRequest

PROGRAM = """
import random
import stoker


@stoker.rollout(version="1", boxes=0, timeout="1m")
async def drawn(ctx, task):
    await ctx.generate(ctx.chat("go"))
    return {score}
"""


@pytest.mark.parametrize(
    ("score", "found"), [("random.random()", 3), ("ctx.random.random()", 0)], ids=["drawn", "ours"]
)
def test_c6_every_rollout_of_a_short_run_is_checked(tmp_path: Path, score: str, found: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(score=score))
    (tmp_path / "model.jsonl").write_bytes(b'{"task_id": "*", "turns": ["ok"]}\n')
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"task_id": "{n}"}}\n' for n in range(3)))
    request = RunRequest(
        program=tmp_path / "program.py",
        program_name=None,
        tasks=tmp_path / "tasks.jsonl",
        model=f"scripted:{tmp_path}/model.jsonl",
        settings=Settings.model_validate(
            {"program": {"check_replays": 1.0}, "workers": {"count": 0}}
        ),
        runs_directory=tmp_path / "runs",
    )
    report = asyncio.run(execute(request))
    assert report.snapshot.outcomes == {"completed": 3}
    assert report.snapshot.faults.get("non_deterministic", 0) == found
