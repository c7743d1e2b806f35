"""Baselines with files and set-up: built once, found again, the same in every box, and bounded."""

import asyncio
from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid
from stoker.model.execution import Baseline, BaselineBuild, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from support import sandbox
from support.sandbox import needs_root, run
from support.states import names_in, ran

ON = [
    pytest.param(Rung.ROOT, marks=[needs_root, pytest.mark.root], id="a"),
    pytest.param(Rung.PROCESS, id="process"),
]
SETUP = (
    "mkdir made; printf 'of %s' \"$GIVEN\" > made/by-setup",
    "date +%N > made/when; test ! -e /etc/stoker-no; ln -s made/when link",
)


def source_in(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("given")
    (source / "tool").write_text("#!/bin/sh")
    (source / "tool").chmod(0o4755)
    return source


def baseline(source: Path, *setup: str, **given: str) -> Baseline:
    build = BaselineBuild(files=str(source), setup=setup, timeout_seconds=20.0)
    return Baseline(name="repo", environment=given or {"GIVEN": "env"}, build=build)


def kept_in(host: SandboxHost, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    host.baselines = Baselines(directory)


@pytest.mark.parametrize("rung", ON)
def test_a_baseline_is_built_once_and_every_box_begins_with_it(tmp_path: Path, rung: Rung) -> None:
    looked = "print(open('deep/file').read(), open('made/by-setup').read(), open('link').read())"
    policy = sandbox.policy_of(rung)
    wanted = baseline(source_in(tmp_path), *SETUP)

    async def once() -> tuple[list[str], set[str]]:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, rung)
            names = [f"box_{n}" for n in range(4)]
            boxes = await asyncio.gather(*(backend.create(n, wanted, policy) for n in names))
            seen = [await ran(box, looked) for box in boxes]
            assert {(box.generation, box.began_from) for box in boxes} == {
                (0, boxes[0].baseline.digest)
            }
            await ran(boxes[0], "open('deep/file', 'w').write('mine')")
            assert await ran(boxes[1], looked) == seen[1]
            (branch,) = await boxes[0].branch(1)
            assert isinstance(branch.box, LocalBox)
            assert (await ran(branch.box, looked)).startswith("mine of env")
            assert branch.parent == boxes[0].baseline.digest
            await backend.close()
            assert host.leaked() == 0
        return seen, {box.baseline.digest for box in boxes}

    async def body() -> None:
        first, digests = await once()
        again, others = await once()
        assert len(set(first + again)) == 1, "what the set-up drew is the same in every box"
        assert first[0].startswith("given of env")
        assert digests == others
        assert len(digests) == 1
        assert len([n for n in names_in(tmp_path / "kept") if n.startswith("recipe-")]) == 2

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
@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ("echo broken >&2; exit 3", "broken.*exit code 3"),
        ("sleep 100", "timed out"),
        ("head -c 100m /dev/zero > big", "disk limit"),
        ("python -c 'import socket; socket.create_connection((\"1.1.1.1\", 443), 5)'", "failed"),
        ("touch /usr/bin/stoker-was-here", "failed"),
    ],
)
def test_a_set_up_that_fails_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, setup: str, said: str
) -> None:
    wanted = baseline(source_in(tmp_path), setup)
    assert wanted.build
    build = BaselineBuild(files=wanted.build.files, setup=(setup,), timeout_seconds=1.5)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, tmp_path / "kept")
            backend = sandbox.backend_of(host, Rung.ROOT)
            with pytest.raises(ConfigInvalid, match=f"command 1 of its setup(?s:.*){said}"):
                await backend.create(
                    "box_one", Baseline(name="repo", build=build), sandbox.policy_of(Rung.ROOT)
                )
            assert not backend.boxes
            assert host.leaked() == 0
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
