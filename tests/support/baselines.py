"""What baselines with files and set-up lines must show, on every backend that has them."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from stoker.errors import ConfigInvalid
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.sandbox.base import Box
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from support.states import PATIENCE, Keeping, Kept, names_in

SETUP = (
    "mkdir made; printf 'of %s' \"$GIVEN\" > made/by-setup",
    "cat /proc/sys/kernel/random/uuid > made/drawn; ln -s made/drawn link",
)
LOOKED = 'echo "$(cat deep/file) $(cat made/by-setup) $(cat link)"'
FAILING = [
    ("echo broken >&2; exit 3", "broken.*exit code 3"),
    ("sleep 100", "timed out"),
    ("head -c 100m /dev/zero > big", "disk limit"),
    ("python -c 'import socket; socket.create_connection((\"1.1.1.1\", 443), 5)'", "failed"),
    ("touch /usr/bin/stoker-was-here", "failed"),
]
"""Lines that fail, and what is said of them."""


def source_in(directory: Path) -> Path:
    """Make a directory of files."""
    source = directory / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("given")
    (source / "tool").write_text("#!/bin/sh")
    (source / "tool").chmod(0o4755)
    return source


def baseline(source: Path, *setup: str, **given: str) -> Baseline:
    """Return one of these files and lines."""
    build = BaselineBuild(files=str(source), setup=setup, timeout_seconds=20.0)
    return Baseline(name="repo", environment=given or {"GIVEN": "env"}, build=build)


def kept_in(host: SandboxHost, directory: Path) -> None:
    """Have what is built kept in ``directory``, and nothing be known that is not there."""
    directory.mkdir(exist_ok=True)
    host.baselines = Baselines(directory)


def recipes_in(directory: Path) -> list[str]:
    """Return the recipes that were built."""
    return [n for n in names_in(directory) if n.startswith("recipe-") and "." not in n]


async def said_in(box: Box, line: str) -> str:
    """Return what a shell line says in ``box``; anything but success fails the test."""
    request = RunRequest(argv=("sh", "-ec", line))
    result = (await box.run(request, timeout_seconds=PATIENCE)).result
    assert result.ok, result.text
    return result.stdout.kept.decode()


async def begins_built(
    backend: Keeping, policy: ExecutionPolicy, wanted: Baseline, count: int
) -> tuple[set[str], str]:
    """Try ``count`` boxes asked for at once; return what is in them, and their baseline's digest.

    ``wanted`` has ``SETUP``, and ``GIVEN`` among its variables. Nothing of them is left.
    """
    names = [f"box_{n}" for n in range(count)]
    boxes: list[Kept] = list(
        await asyncio.gather(*(backend.create(name, wanted, policy) for name in names))
    )
    seen = [await said_in(box, LOOKED) for box in boxes]
    digests = {box.baseline.digest for box in boxes}
    assert len(digests) == 1
    assert {(box.generation, box.began_from) for box in boxes} == {(0, *digests)}
    await said_in(boxes[0], "printf mine > deep/file")
    assert await said_in(boxes[1], LOOKED) == seen[1]
    (branch,) = await boxes[0].branch(1)
    assert (await said_in(branch.box, LOOKED)).startswith("mine of env")
    assert branch.parent == boxes[0].baseline.digest
    for name in list(backend.boxes):
        await backend.boxes[name].destroy()
    return set(seen), digests.pop()


async def refuses(
    backend: Keeping, policy: ExecutionPolicy, wanted: Baseline, line: str, said: str
) -> None:
    """Try a set-up ``line`` that fails: one sentence, and nothing is left."""
    assert wanted.build
    build = replace(wanted.build, setup=(line,), timeout_seconds=1.5)
    with pytest.raises(ConfigInvalid, match=f"command 1 of its setup(?s:.*){said}"):
        await backend.create("box_one", Baseline(name="repo", build=build), policy)
    assert not backend.boxes
    assert backend.host.leaked() == 0
