"""A whole run inside the process that owns the engine, as trainers embed it."""

import asyncio
from pathlib import Path

import pytest

from stoker.config.load import load_settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunReport, RunRequest
from stoker.errors import ModelRefused
from stoker.inference.callable import CallableModel
from stoker.model.generation import (
    GenerateRequest,
    Generation,
    VersionSpan,
    pack_tokens,
)
from support.command import lay_out, skip_reason, wait_until_quiet

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")


class Engine:
    """An engine of this process whose weights change after each call."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        self.version += 1
        if request.task_id == "b":
            raise ModelRefused("not this one")
        await asyncio.sleep(0)
        return Generation(
            text="hello",
            prompt_ids=pack_tokens([1, 2]),
            token_ids=pack_tokens([3]),
            spans=(VersionSpan(self.version, 0, 1),),
        )


def embedded(place: Path, engine: Engine) -> RunReport:
    request = RunRequest(
        program=place / "program.py",
        program_name=None,
        tasks=place / "tasks.jsonl",
        model="callable:engine",
        settings=load_settings(sets=["workers.count=0"]).settings,
        runs_directory=place / "runs",
    )
    model = CallableModel(engine.generate, window=8, name="engine")
    return asyncio.run(execute(request, model=model))


def test_a_run_inside_the_process_that_owns_the_engine(tmp_path: Path) -> None:
    lay_out(tmp_path)
    engine = Engine()
    try:
        report = embedded(tmp_path, engine)
    finally:
        wait_until_quiet(tmp_path)
    assert report.snapshot.lane.model == "callable:engine"
    # What the engine refuses is a fault of the rollout, not an answer worth 0.
    assert report.snapshot.outcomes == {"completed": 1, "failed": 1}
    assert report.snapshot.reward_mean == 1.0
    assert sorted(one.task_id for one in engine.asked) == ["a", "b"]
