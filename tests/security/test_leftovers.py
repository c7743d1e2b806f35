"""Boxes of dead workers whose state directory is gone are found by doctor and can be removed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.model.execution import Baseline, Rung
from stoker.sandbox import host as host_module
from stoker.sandbox import leftovers, marks
from stoker.sandbox.host import ROOT_WORK, SandboxHost
from stoker.sandbox.leftovers import Leftover
from stoker.sandbox.trials import host_facts
from support import sandbox
from support.sandbox import backend_of, needs_root, policy_of

HOLDER = """
import asyncio, sys
from pathlib import Path
from stoker.model.execution import Baseline, Rung
from support import sandbox
async def main():
    async with sandbox.SandboxHost.open(Path(sys.argv[1])) as host:
        backend = sandbox.backend_of(host, Rung.ROOT)
        for number in range(2):
            await backend.create(f"box_{number}", Baseline(), sandbox.policy_of(Rung.ROOT))
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""

pytestmark = [needs_root, pytest.mark.root]


def killed_worker(state: Path) -> str:
    """Kill a worker that holds two boxes; return its mark."""
    state.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == b"ready\n"
        assert marks.is_held(marks.mark_of(state))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(sandbox.PATIENCE)
    return marks.mark_of(state)


def _of(mark: str, host: SandboxHost) -> list[Leftover]:
    """Return what is left under ``mark``: other runs on this machine may leave theirs."""
    return [leftover for leftover in leftovers.find(host) if leftover.mark == mark]


def _traces(mark: str, host: SandboxHost) -> list[str]:
    found = [str(path) for path in ROOT_WORK.glob(f"{mark}.*")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if mark in line]
    found += host.tree.find(f"stoker.{mark}.") if host.tree is not None else ()
    return found


def test_what_a_dead_worker_left_is_found_and_removed_without_its_state(tmp_path: Path) -> None:
    state = tmp_path / "gone"
    mark = killed_worker(state)
    shutil.rmtree(state)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "doctor") as host:
            expected = Leftover(mark=mark, state_directory=str(state), boxes=("box_0", "box_1"))
            assert _of(mark, host) == [expected]
            (fact,) = (f for f in host_facts(host) if f.name == "boxes of dead workers")
            assert not fact.ok
            assert fact.remedy == leftovers.COMMAND
            assert len(_traces(mark, host)) >= 2 + 6
            assert await leftovers.remove(host, [expected]) == 2
            assert _of(mark, host) == []
            assert _traces(mark, host) == []
            assert host.leaked() == 0

    sandbox.run(body)
    assert not (marks.HOSTS / mark).exists()
    assert not (marks.HOSTS / marks.mark_of(tmp_path / "doctor")).exists()


def test_boxes_of_a_living_worker_are_nobody_s_leftovers(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path / "one") as one:
            backend = backend_of(one, Rung.ROOT)
            box = await backend.create("box_alive", Baseline(), policy_of(Rung.ROOT))
            async with SandboxHost.open(tmp_path / "other") as other:
                assert _of(one.mark, other) == []
                stale = Leftover(mark=one.mark, state_directory="", boxes=("box_alive",))
                assert await leftovers.remove(other, [stale]) == 0
            assert box.directory.exists()
            # A second process of the same state directory that ends leaves the mark held.
            async with SandboxHost.open(tmp_path / "one"):
                pass
            assert marks.is_held(one.mark)

    sandbox.run(body)


def test_the_mark_of_a_dead_worker_goes_with_the_last_of_its_boxes(tmp_path: Path) -> None:
    dead, other = killed_worker(tmp_path / "dead"), tmp_path / "other"

    async def body() -> None:
        async with SandboxHost.open(other) as host:
            await host.sweep()
            assert (marks.HOSTS / dead).exists(), "its boxes are still there"
            await leftovers.remove(host, _of(dead, host))
            (marks.HOSTS / dead).write_text("somewhere")  # as a sweep of its own would leave it
            tree, host.tree = host.tree, None  # as in a container that does not see the groups
            await host.sweep()
            assert (marks.HOSTS / dead).exists(), "what bears it may be out of sight"
            host.tree = tree
            await host.sweep()
            assert not (marks.HOSTS / dead).exists()
            assert marks.is_held(marks.mark_of(other)), "ours is in use"

    sandbox.run(body)


def test_the_home_of_machines_goes_with_its_last_worker_or_is_found_once_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (marks, leftovers, host_module):
        monkeypatch.setattr(module, "MACHINES", tmp_path / "machines")

    def furnished(mark: str) -> Path:
        home = tmp_path / "machines" / mark
        (home / ".local").mkdir(parents=True)
        (home / "engine.log").write_text("started")
        return home

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "other") as other:
            async with SandboxHost.open(tmp_path / "one") as one:
                home = furnished(one.mark)
                assert _of(one.mark, other) == []
                async with SandboxHost.open(tmp_path / "one"):
                    pass
                assert home.exists(), "another worker still has it"
            assert not home.exists()
            dead = furnished("0dead")
            (found,) = _of("0dead", other)
            assert (found.boxes, found.home) == ((), str(dead))
            (fact,) = (f for f in host_facts(other) if f.name == "boxes of dead workers")
            assert not fact.ok
            assert await leftovers.remove(other, [found]) == 0
            assert not dead.exists()

    sandbox.run(body)
