"""A local worker that is stopped and not continued: ended, and its place taken."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.coordinator import workers
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.workers import LocalWorkers
from stoker.seams.clock import SystemClock
from support.ledger import BOUND_SECONDS

HOLDER = """
import fcntl, os, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_worker_stopped_for_good_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    home = run.workers / "w0"
    home.mkdir()
    command = [sys.executable, "-c", HOLDER, str(home / "lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    seen = workers.WorkerSeen(
        name="w0", pid=holder.pid, state="working", classes={}, boxes_alive=0, boxes_leaked=0
    )
    (home / "status.json").write_bytes(msgspec.json.encode(seen))
    started = asyncio.Event()
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(LocalWorkers, "_start", lambda *_: started.set())

    async def scenario() -> None:
        keeping = asyncio.create_task(
            LocalWorkers(run, 1, SystemClock(), shared=False).keep(), name="keeper"
        )
        async with asyncio.timeout(BOUND_SECONDS):
            await asyncio.sleep(0)
            os.kill(holder.pid, signal.SIGSTOP)
            assert await asyncio.to_thread(holder.wait) == -signal.SIGKILL
            await started.wait()
        keeping.cancel()

    try:
        asyncio.run(scenario())
    finally:
        holder.kill()
        holder.stdout.close()
        holder.wait()
