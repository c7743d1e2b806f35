"""Checkpoints and branches by the contract, on the shipped backend that needs no processes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from stoker.errors import ArtifactDamaged, BoxFailed, BranchUnavailable
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import CompletionStatus
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy, Isolation, Trust
from stoker.model.faults import FaultSide
from stoker.model.ids import EnvironmentId
from stoker.model.tools import CheckpointRequest, OpenRequest, RunResult
from stoker.testing.boxes import MemoryBackend
from support.worker_boxes import Bench, make_action

ENV = EnvironmentId("env_a")
TRUSTED = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)


def test_a_branch_begins_in_the_state_and_goes_its_own_way() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        box = await backend.create("box_one", Baseline(digest="base"), TRUSTED)
        await box.write_files({"a": b"1"})
        first, second = await box.branch(2)
        assert (first.parent, first.generation) == ("base", 1)
        assert first.digest == second.digest
        await first.box.write_files({"a": b"2"})
        assert (await second.box.read_file("a", bytes_max=9)).content == b"1"
        (deeper,) = await first.box.branch(1)
        assert (deeper.parent, deeper.generation) == (first.digest, 2)
        await box.destroy()
        assert (await second.box.read_file("a", bytes_max=9)).content == b"1"

    asyncio.run(body())


def test_a_backend_without_builds_refuses_them_and_makes_nothing() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        built = Baseline(name="repo", build=BaselineBuild(setup=("true",)))
        with pytest.raises(BranchUnavailable, match="files or setup"):
            await backend.create("box_one", built, TRUSTED)
        assert not backend.boxes

    asyncio.run(body())


def test_branches_are_all_made_or_none() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        box = await backend.create("box_one", Baseline(), TRUSTED)
        backend.create_fails = 1
        with pytest.raises(BoxFailed):
            await box.branch(3)
        assert list(backend.boxes) == ["box_one"]

    asyncio.run(body())


def test_a_checkpoint_is_restored_and_a_damaged_one_refused(tmp_path: Path) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        box = await backend.create("box_one", Baseline(), TRUSTED)
        await box.write_files({"a": b"1"})
        saved = await box.checkpoint(tmp_path)
        assert saved == await box.checkpoint(tmp_path), "equal states, equal names"
        back = await backend.restore("box_two", Baseline(), TRUSTED, saved)
        assert (await back.read_file("a", bytes_max=9)).content == b"1"
        damage(saved.file)
        with pytest.raises(ArtifactDamaged):
            await backend.restore("box_three", Baseline(), TRUSTED, saved)

    asyncio.run(body())


def damage(file: str) -> None:
    Path(file).write_bytes(b"something else")


def test_a_kept_environment_begins_again_in_its_next_generation() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open("env_a", 0, {"old": b"1"})
        kept = await bench.do(
            make_action("box.checkpoint", CheckpointRequest(), "x", environment_id=ENV)
        )
        saved = bench.seen(kept, Checkpoint)
        assert (saved.file, saved.generation) == ("", 0)
        request = OpenRequest(baseline=Baseline(), policy=bench.policy, checkpoint=saved)
        action = make_action("environment.open", request, "again", environment_id=ENV, generation=1)
        assert (await bench.do(action)).status is CompletionStatus.OK
        await bench.boxes.settled()
        assert bench.seen(await bench.run("cat", "old", generation=1), RunResult).text == "1"
        gone = msgspec.structs.replace(saved, digest="0" * 64)
        request = OpenRequest(baseline=Baseline(), policy=bench.policy, checkpoint=gone)
        action = make_action("environment.open", request, "none", environment_id=ENV, generation=2)
        lost = await bench.do(action)
        assert lost.fault is not None
        assert lost.fault.side is FaultSide.INFRASTRUCTURE

    asyncio.run(scenario())
