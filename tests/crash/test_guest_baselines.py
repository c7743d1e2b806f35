"""A worker killed as it builds a baseline of guests, or as it makes what they are forked from."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy, Isolation
from stoker.sandbox import branching
from stoker.sandbox.cgroups import is_zombie
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.uids import pids_of_uid
from support import sandbox
from support.baselines import kept_in, recipes_in, said_in
from support.worlds import LIMITS, PATIENCE, QEMU

WANTED = Baseline(name="b", build=BaselineBuild(setup=("cat /proc/sys/kernel/random/uuid > when",)))
POLICY = ExecutionPolicy(isolation=Isolation.QEMU, limits=LIMITS)
BUILDER = """
import asyncio, os, sys
from pathlib import Path
import msgspec
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import origin
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.seams import faultpoints

async def main():
    faultpoints.arm(os.environ)
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        host.baselines = Baselines(Path(sys.argv[2]))

        async def dies(*_):
            print(*(record.uid for record in host.ledger.records()), flush=True)
            os.kill(os.getpid(), 9)

        origin.begin_in = dies
        wanted = msgspec.json.decode(sys.argv[3], type=Baseline)
        policy = msgspec.json.decode(sys.argv[4], type=ExecutionPolicy)
        await QemuBackend(host).create("box_a", wanted, policy)

asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", [QEMU])
@pytest.mark.parametrize("fault", [f"{branching.STATE_WRITTEN}=kill", ""], ids=["built", "derived"])
@pytest.mark.slow  # a guest is booted twice
def test_a_killed_builder_leaves_no_guest_and_the_next_goes_on(
    tmp_path: Path, fault: str, isolation: Isolation
) -> None:
    assert isolation is Isolation.QEMU
    kept = tmp_path / "kept"
    kept.mkdir()
    given = [msgspec.json.encode(one).decode() for one in (WANTED, POLICY)]
    built = subprocess.run(
        [sys.executable, "-c", BUILDER, str(tmp_path / "state"), str(kept), *given],
        env={**os.environ, "STOKER_FAULT": fault},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert built.returncode == -signal.SIGKILL, built.stdout + built.stderr
    recipes = recipes_in(kept)
    assert len(recipes) == (not fault), "what was built stays, what was not has no name"

    async def next_one() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, kept)
            assert await host.sweep() == 1, "what it was built in, or to be forked from"
            assert host.leaked() == 0
            for uid in built.stdout.split():
                assert [pid for pid in pids_of_uid(int(uid)) if not is_zombie(pid)] == []
            backend = QemuBackend(host)
            boxes = [await backend.create(f"box_{n}", WANTED, POLICY) for n in "ab"]
            drawn = {await said_in(box, "cat when") for box in boxes}
            assert len(drawn) == 1
            await backend.close()
            assert host.leaked() == 0
        assert len(recipes_in(kept)) == 1
        assert recipes_in(kept) == (recipes or recipes_in(kept))
        assert list(kept.glob("*.part")) == []

    sandbox.run(next_one)
