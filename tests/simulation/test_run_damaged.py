"""A damaged journal costs its rollout, never the run."""

import asyncio
from pathlib import Path

import pytest

from stoker.config.tree import Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunReport, RunRequest, StopSignal
from stoker.coordinator.view import RunSnapshot
from stoker.model.value import INLINE_BYTES_MAX

PROGRAM = f"""
import stoker


@stoker.rollout(version="1", boxes=0, timeout="5m")
async def waits(ctx, task):
    chat = ctx.chat("x" * {INLINE_BYTES_MAX + 1} + task.task_id)
    await ctx.generate(chat)
    await ctx.call(["true"], effect="pure")
    return 1.0
"""


def _request(folder: Path, *, resume: str | None) -> RunRequest:
    return RunRequest(
        program=folder / "program.py",
        program_name=None,
        tasks=folder / "tasks.jsonl",
        model=f"scripted:{folder}/model.jsonl",
        settings=Settings.model_validate(
            {
                "program": {"hosts": 1, "check_replays": 0.0},
                "workers": {
                    "count": 0,
                    "classes": {
                        "fast": {
                            "isolation": "process",
                            "trust": "trusted",
                        }
                    },
                },
            }
        ),
        runs_directory=folder / "runs",
        resume=resume,  # type: ignore[arg-type]
    )


def _run_until(request: RunRequest, actions: int) -> RunReport:
    stop = StopSignal()

    async def body() -> RunReport:
        def look(seen: RunSnapshot) -> None:
            if sum(view.queued for view in seen.classes.values()) >= actions:
                stop.stop()

        return await execute(request, observer=look, stop=stop)

    return asyncio.run(body())


def test_a_damaged_artifact_fails_its_rollout_and_the_others_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "model.jsonl").write_bytes(b'{"task_id": "*", "turns": ["ok"]}\n')
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    first = _run_until(_request(tmp_path, resume=None), actions=2)
    assert first.resumable
    run = Path(first.snapshot.run_directory)
    damaged, *_ = (p for p in (run / "artifacts").rglob("*") if p.is_file())
    damaged.write_bytes(b"not what it was")
    again = _run_until(_request(tmp_path, resume=run.name), actions=1)
    assert again.snapshot.outcomes == {"failed": 1}
    assert again.snapshot.faults["artifact_damaged"] == 1
    assert again.snapshot.rollouts_active == 1
