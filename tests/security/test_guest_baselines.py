"""Baselines of guests: the contract that all backends keep, and what a fork begins with.

One guest is booted for the module; what it costs beside that is the forks of each test.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.sandbox.qemu.backend import QemuBackend
from support.baselines import (
    FAILING,
    SETUP,
    baseline,
    begins_built,
    kept_in,
    recipes_in,
    refuses,
    source_in,
)
from support.states import names_in
from support.worlds import QEMU, World, opened


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from opened(request.param, tmp_path_factory.mktemp("state"))


of_qemu = pytest.mark.parametrize("world", [QEMU], indirect=True)


@of_qemu
def test_guests_begin_with_what_was_built_once(world: World, tmp_path: Path) -> None:
    wanted = baseline(source_in(tmp_path), *SETUP)

    async def once() -> tuple[set[str], str]:
        assert isinstance(world.backend, QemuBackend)
        kept_in(world.backend.host, tmp_path / "kept")
        return await begins_built(world.backend, world.policy, wanted, 2)

    async def body() -> None:
        seen, digest = await once()
        assert len(seen) == 1, "what the set-up drew is the same in every box"
        assert [one[:12] for one in seen] == ["given of env"]
        assert (seen, digest) == await once()
        assert len(recipes_in(tmp_path / "kept")) == 1

    world.do(body)


@of_qemu
@pytest.mark.parametrize(
    ("setup", "said"),
    [FAILING[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in FAILING[1:])],
)
def test_a_set_up_that_fails_in_a_guest_is_one_sentence_and_leaves_nothing(
    world: World, tmp_path: Path, setup: str, said: str
) -> None:
    wanted = baseline(source_in(tmp_path))

    async def body() -> None:
        assert isinstance(world.backend, QemuBackend)
        kept_in(world.backend.host, tmp_path / "kept")
        await refuses(world.backend, world.policy, wanted, setup, said)
        assert [n for n in names_in(tmp_path / "kept") if not n.endswith(".lock")] == []

    world.do(body)
