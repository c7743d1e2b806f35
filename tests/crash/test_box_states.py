"""Killed between the file of a checkpoint and whoever was to have it: no box is left of it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import ArtifactDamaged
from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy, Isolation, Trust
from stoker.sandbox import branching
from stoker.sandbox.baseline_cache import prune
from stoker.sandbox.baselines import BUILT, Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.process import ProcessBackend
from stoker.sandbox.roots import UNPACKED, Roots
from support import images

TRUSTED = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
CUT = (branching.STATE_WRITTEN, branching.STATE_NAMED)
BUILD = BaselineBuild(setup=("date +%N > when",))
HOLDER = """
import asyncio, os, sys
from pathlib import Path
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.process import ProcessBackend
from stoker.seams import faultpoints

async def main():
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        policy = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
        box = await ProcessBackend(host).create("box_held", Baseline(), policy)
        await box.write_files({"a": b"1"})
        faultpoints.arm(os.environ)
        await box.checkpoint(Path(sys.argv[2]))
        print("not killed")

asyncio.run(main())
"""


@pytest.mark.parametrize("point", CUT)
def test_a_kill_between_checkpoint_and_hand_over_leaves_no_box_and_no_half_of_it(
    tmp_path: Path, point: str
) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    held = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path / "state"), str(saves)],
        env={**os.environ, "STOKER_FAULT": f"{point}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert held.returncode == -signal.SIGKILL, held.stdout + held.stderr
    named = [path for path in saves.iterdir() if not path.name.startswith(".")]
    assert len(named) == (point == branching.STATE_NAMED), "complete or without a name"
    asyncio.run(_afterwards(tmp_path / "state", named))


async def _afterwards(state: Path, named: list[Path]) -> None:
    async with SandboxHost.open(state) as host:
        assert await host.sweep() == 1
        assert host.leaked() == 0
        backend = ProcessBackend(host)
        for file in named:
            saved = Checkpoint(digest=file.name, parent="", generation=0, file=str(file))
            back = await backend.restore("box_back", Baseline(), TRUSTED, saved)
            assert (await back.read_file("a", bytes_max=9)).content == b"1"
        gone = Checkpoint(digest="0" * 64, parent="", generation=0, file=str(state / "no"))
        with pytest.raises(ArtifactDamaged):
            await backend.restore("box_none", Baseline(), TRUSTED, gone)
        await backend.close()


BUILDER = """
import asyncio, os, sys
from pathlib import Path
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy, Isolation, Trust
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.process import ProcessBackend
from stoker.seams import faultpoints

async def main():
    faultpoints.arm(os.environ)
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        host.baselines = Baselines(Path(sys.argv[2]))
        policy = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
        build = BaselineBuild(setup=("date +%N > when",))
        await ProcessBackend(host).create("box_a", Baseline(name="b", build=build), policy)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("point", "cleared"), [(branching.STATE_WRITTEN, True), (BUILT, False), (BUILT, True)]
)
def test_a_baseline_whose_builder_was_killed_is_built_by_the_next(
    tmp_path: Path, point: str, *, cleared: bool
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    built = subprocess.run(
        [sys.executable, "-c", BUILDER, str(tmp_path / "state"), str(kept)],
        env={**os.environ, "STOKER_FAULT": f"{point}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == -signal.SIGKILL, built.stdout + built.stderr
    if cleared:
        prune(1 << 30, states=kept, roots=tmp_path / "roots")
        left = [path for path in kept.iterdir() if path.suffix != ".lock"]
        assert left == [], "what nothing names would be counted by nobody"

    async def next_one() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept)
            await host.sweep()
            backend = ProcessBackend(host)
            wanted = Baseline(name="b", build=BUILD)
            one, two = [await backend.create(f"box_{n}", wanted, TRUSTED) for n in "ab"]
            drawn = [(await box.read_file("when", bytes_max=99)).content for box in (one, two)]
            assert drawn[0]
            assert drawn[0] == drawn[1]
            left = [path.name for path in kept.glob("*.part")]
            assert left == [], "a draft of the dead goes with the next build"
            await backend.close()
            assert host.leaked() == 0

    asyncio.run(next_one())


UNPACKER = """
import asyncio, os, sys
from pathlib import Path
from stoker.sandbox.roots import Roots
from stoker.seams import faultpoints

async def main():
    faultpoints.arm(os.environ)
    await Roots(Path(sys.argv[1])).hold("box", sys.argv[2])
    print("not killed")

asyncio.run(main())
"""


def test_a_root_whose_maker_was_killed_is_made_by_the_next(tmp_path: Path) -> None:
    saved = images.as_tar(
        images.image((images.file("etc/a", "whole"),)).parts(), tmp_path / "image.tar"
    )
    made = subprocess.run(
        [sys.executable, "-c", UNPACKER, str(tmp_path / "roots"), str(saved)],
        env={**os.environ, "STOKER_FAULT": f"{UNPACKED}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == -signal.SIGKILL, made.stdout + made.stderr
    assert [path.suffix for path in sorted((tmp_path / "roots").iterdir())] == [".lock", ".part"]

    async def next_one() -> None:
        roots = Roots(tmp_path / "roots")
        root = await roots.hold("box", str(saved))
        assert (Path(root.tree) / "etc" / "a").read_text() == "whole"
        assert list((tmp_path / "roots").glob("*.part")) == []
        await roots.close()

    asyncio.run(next_one())
