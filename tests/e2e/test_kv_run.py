"""A whole run on a simulated server whose KV cache holds a few of its rollouts."""

import asyncio
from pathlib import Path

import pytest

from stoker.config.load import load_settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunReport, RunRequest
from support.command import skip_reason, wait_until_quiet

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import stoker

@stoker.rollout(version="1", boxes=0, timeout="5m")
async def talk(ctx: stoker.Context, task: stoker.Task) -> float:
    chat = ctx.chat("x" * 300)
    for _ in range(4):
        await ctx.generate(chat)
        await ctx.sleep(0.05)
        chat.user("y" * 200)
    return 1.0
"""
DEVICE = """\
policy = "scripted:policy.py"
a = 0.001
c = 0.0001
p = 0.00001
window = 16
kv_tokens = 3000
"""
ROLLOUTS = 12


def _run(place: Path, *sets: str) -> RunReport:
    (place / "program.py").write_text(PROGRAM)
    (place / "policy.py").write_text('def answer(request):\n    return "z" * 60\n')
    (place / "device.toml").write_text(DEVICE)
    lines = [f'{{"task_id": "{number}"}}\n' for number in range(ROLLOUTS)]
    (place / "tasks.jsonl").write_text("".join(lines))
    request = RunRequest(
        program=place / "program.py",
        program_name=None,
        tasks=place / "tasks.jsonl",
        model=f"sim:{place / 'device.toml'}",
        settings=load_settings(sets=["workers.count=0", *sets]).settings,
        runs_directory=place / "runs",
    )
    try:
        return asyncio.run(execute(request))
    finally:
        wait_until_quiet(place)


def test_a_run_holds_for_a_short_kv_cache_says_so_and_finishes(tmp_path: Path) -> None:
    snapshot = _run(tmp_path).snapshot
    assert snapshot.outcomes == {"completed": ROLLOUTS}
    assert snapshot.lane.kv_held_share > 0
    assert snapshot.lane.parked == 0


def test_a_fixed_number_of_rollouts_is_never_held_for_memory(tmp_path: Path) -> None:
    snapshot = _run(tmp_path, "admission.mode=fixed", "admission.active_max=12").snapshot
    assert snapshot.outcomes == {"completed": ROLLOUTS}
    assert snapshot.lane.kv_held_share == 0
