"""Baselines with files and set-up: built once, found again, the same in every box, and bounded."""

from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid
from stoker.model.execution import Baseline, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox.baseline_cache import kept
from stoker.sandbox.host import SandboxHost
from support import sandbox
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
from support.sandbox import needs_root, run
from support.states import names_in

ON = [
    pytest.param(Rung.ROOT, marks=[needs_root, pytest.mark.root], id="a"),
    pytest.param(Rung.PROCESS, id="process"),
]


@pytest.mark.parametrize("rung", ON)
def test_a_baseline_is_built_once_and_every_box_begins_with_it(tmp_path: Path, rung: Rung) -> None:
    wanted = baseline(source_in(tmp_path), *SETUP)

    async def once() -> tuple[set[str], str]:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, rung)
            found = await begins_built(backend, sandbox.policy_of(rung), wanted, 4)
            assert host.leaked() == 0
        return found

    async def body() -> None:
        seen, digest = await once()
        again, other = await once()
        assert seen == again, "what the set-up drew is the same in every box"
        assert len(seen) == 1
        assert seen.pop().startswith("given of env")
        assert digest == other
        assert len(recipes_in(tmp_path / "kept")) == 1
        (one,) = kept(states=tmp_path / "kept", roots=tmp_path / "roots")
        told = f"repo: files {tmp_path / 'source'}; {'; '.join(SETUP)}"
        assert (one.kind, one.made_of) == ("state", told), "a person knows it again"

    run(body)


@pytest.mark.parametrize("rung", ON)
def test_another_recipe_is_another_digest(tmp_path: Path, rung: Rung) -> None:
    source = source_in(tmp_path)

    async def digest(wanted: Baseline) -> str:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            box = await sandbox.backend_of(host, rung).create(
                "box_one", wanted, sandbox.policy_of(rung)
            )
            await box.destroy()
            return box.baseline.digest

    async def body() -> None:
        found = [await digest(baseline(source)), await digest(baseline(source, "true"))]
        found.append(await digest(baseline(source, GIVEN="other")))
        (source / "deep" / "file").write_text("changed")
        found.append(await digest(baseline(source)))
        assert len(set(found)) == 4

    run(body)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(("setup", "said"), FAILING)
def test_a_set_up_that_fails_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, setup: str, said: str
) -> None:
    wanted = baseline(source_in(tmp_path))

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, Rung.ROOT)
            await refuses(backend, sandbox.policy_of(Rung.ROOT), wanted, setup, said)
        assert [n for n in names_in(tmp_path / "kept") if not n.endswith(".lock")] == []

    run(body)


def test_files_that_are_not_there_are_one_sentence(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, Rung.PROCESS)
            with pytest.raises(ConfigInvalid, match="name a directory"):
                await backend.create(
                    "box_one", baseline(tmp_path / "none"), sandbox.policy_of(Rung.PROCESS)
                )

    run(body)


def test_a_box_of_a_baseline_has_its_files_without_setuid_bits(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, Rung.PROCESS)
            policy = sandbox.policy_of(Rung.PROCESS)
            box = await backend.create("box_one", baseline(source_in(tmp_path)), policy)
            request = RunRequest(argv=("stat", "-c", "%a", "tool"))
            assert (await box.run(request, timeout_seconds=20.0)).result.text == "755"
            await backend.close()

    run(body)
    assert (tmp_path / "source" / "tool").stat().st_mode & 0o7777 == 0o4755
