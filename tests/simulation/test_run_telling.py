"""What is told of a run may fail without the run; what steers it may not fail in silence."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.config.tree import Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunReport, RunRequest
from stoker.coordinator.sampling import AdmissionFeed
from stoker.coordinator.view import RunSnapshot

PROGRAM = """
import stoker


@stoker.rollout(version="1", boxes=0, timeout="5m")
async def speaks(ctx, task):
    await ctx.generate(ctx.chat("go"))
    return 1.0
"""


def _run(folder: Path, observer: Callable[[RunSnapshot], None]) -> RunReport:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "model.jsonl").write_bytes(b'{"task_id": "*", "turns": ["ok"]}\n')
    (folder / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    request = RunRequest(
        program=folder / "program.py",
        program_name=None,
        tasks=folder / "tasks.jsonl",
        model=f"scripted:{folder}/model.jsonl",
        settings=Settings.model_validate(
            {
                "program": {"hosts": 1, "check_replays": 0.0},
                "workers": {
                    "count": 0,
                    "classes": {"fast": {"isolation": "process", "trust": "trusted"}},
                },
            }
        ),
        runs_directory=folder / "runs",
    )
    return asyncio.run(execute(request, observer=observer))


def test_an_observer_that_raises_hears_no_more_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heard: list[RunSnapshot] = []

    def gone(seen: RunSnapshot) -> None:
        heard.append(seen)
        raise BrokenPipeError("the terminal went away")

    report = _run(tmp_path, gone)
    assert report.snapshot.outcomes == {"completed": 1}
    assert len(heard) == 1
    assert "the terminal went away" in " ".join(report.snapshot.recent)


def test_a_run_whose_admission_breaks_ends_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("no such target")

    monkeypatch.setattr(AdmissionFeed, "sample", broken)
    with pytest.raises(ArithmeticError, match="no such target"):
        _run(tmp_path, lambda _: None)
