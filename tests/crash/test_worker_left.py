"""A worker that died before its run ended, followed by none: what it had made goes all the same."""

import asyncio
import subprocess
import sys
from pathlib import Path

from stoker.coordinator.record import RunDirectory
from stoker.coordinator.workers import LocalWorkers
from stoker.sandbox.host import SandboxHost
from stoker.seams.clock import SystemClock
from support.ledger import BOUND_SECONDS

MAKER = """
import asyncio, sys
from pathlib import Path
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.process import ProcessBackend
async def main():
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        policy = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
        await ProcessBackend(host).create("box_left", Baseline(), policy)
        print("made", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_boxes_of_a_worker_that_nobody_followed_are_gone_when_the_run_ends(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    boxes = run.workers / "w0" / "boxes"
    boxes.mkdir(parents=True)
    worker = subprocess.Popen([sys.executable, "-c", MAKER, str(boxes)], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == b"made\n"
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()

    async def scenario() -> tuple[int, int]:
        async with asyncio.timeout(BOUND_SECONDS), SandboxHost.open(boxes) as host:
            before = host.leaked()
            await LocalWorkers(run, 1, SystemClock(), shared=False).stop()
            return before, host.leaked()

    assert asyncio.run(scenario()) == (1, 0)


def test_checkpoints_that_it_had_not_handed_over_go_too(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    draft = run.workers / "w0" / "states" / "tmpabc"
    draft.mkdir(parents=True)
    (draft / "half a checkpoint").write_bytes(b"PK")
    asyncio.run(LocalWorkers(run, 1, SystemClock(), shared=False).stop())
    assert [*draft.parent.iterdir()] == []
