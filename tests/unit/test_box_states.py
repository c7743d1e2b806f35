"""Checkpoints and branches by the contract, on the shipped backend that needs no processes."""

import asyncio
from pathlib import Path

import pytest

from stoker.errors import ArtifactDamaged, BoxFailed
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.testing.boxes import MemoryBackend

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
