"""What counts in a box when its control group's surroundings fail it: never a verdict."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import BoxFailed
from stoker.model.execution import MEBIBYTE, Baseline, Limits, Rung
from stoker.model.tools import LimitKind, RunRequest
from stoker.sandbox import cgroups
from stoker.sandbox.host import SandboxHost
from support import attacks, needs
from support.sandbox import BY_DELEGATION, PATIENCE, ROOT, backend_of, policy_of, run

pytestmark = [
    pytest.mark.skipif(not (ROOT or BY_DELEGATION), reason=needs.DELEGATION),
    pytest.mark.skipif(
        not Path("/sys/fs/cgroup/cgroup.controllers").exists(),
        reason="version 1 of control groups does not tell who met a limit; make rig-systemd",
    ),
    pytest.mark.root if ROOT else pytest.mark.delegated,
]
RUNG = Rung.ROOT if ROOT else Rung.DELEGATED
TIGHT_BYTES = 48 * MEBIBYTE
ROOMY = Limits(memory_bytes=512 * MEBIBYTE, cpu_seconds=PATIENCE)


class Beneath:
    """A tree of groups beneath one whose memory is bounded, as that of a worker may be."""

    def __init__(self) -> None:
        found = cgroups.find_tree().tree
        assert isinstance(found, cgroups.TreeV2)
        self.parent = Path(found.kept(f"stoker-tight-{os.getpid()}"))
        self.parent.mkdir()
        (self.parent / "memory.max").write_text(str(TIGHT_BYTES))
        (self.parent / "memory.swap.max").write_text("0")
        (self.parent / "cgroup.subtree_control").write_text("+memory +pids")
        self.tree = cgroups.TreeV2(str(self.parent))


@pytest.fixture
def beneath() -> Iterator[Beneath]:
    made = Beneath()
    yield made
    made.parent.rmdir()


def test_a_kill_for_want_of_memory_outside_of_the_box_is_no_verdict_on_it(
    tmp_path: Path, beneath: Beneath
) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            host.tree = beneath.tree
            backend = backend_of(host, RUNG)
            box = await backend.create("box_1", Baseline(), policy_of(RUNG, ROOMY))
            hog = RunRequest(argv=attacks.python(attacks.HOG))
            with pytest.raises(BoxFailed, match="had not met its memory limit"):
                await box.run(hog, timeout_seconds=PATIENCE)
            own = policy_of(RUNG, Limits(memory_bytes=TIGHT_BYTES // 2))
            small = await backend.create("box_2", Baseline(), own)
            result = (await small.run(hog, timeout_seconds=PATIENCE)).result
            assert result.limit is LimitKind.MEMORY, "its own limit is one"
            await backend.close()
            assert host.leaked() == 0

    run(body)


def test_an_action_whose_limits_were_taken_away_is_ended(tmp_path: Path, beneath: Beneath) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            host.tree = beneath.tree
            backend = backend_of(host, RUNG)
            box = await backend.create("box_1", Baseline(), policy_of(RUNG, ROOMY))
            action = asyncio.ensure_future(
                box.run(RunRequest(argv=("sleep", "900")), timeout_seconds=PATIENCE)
            )
            while not cgroups.live_pids((beneath.tree.kept(host.group_name("box_1")),)):
                await asyncio.sleep(0.01)
            (beneath.parent / "cgroup.subtree_control").write_text("-memory")
            with pytest.raises(BoxFailed, match="lost its controllers"):
                await action
            await backend.close()
            assert host.leaked() == 0

    run(body)
