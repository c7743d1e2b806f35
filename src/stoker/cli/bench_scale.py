"""``stoker bench scale``: what ten thousand rollouts of one coordinator cost, beside a hundred.

Real runs, as typed: coordinator, program hosts, ledger owner and worker. The pauses between steps
are such that both crowds make the same number of steps a second, so that only their size differs.
CPU time is the kernel's count for the coordinator and its hosts; memory is their proportional
share, so that nothing is counted twice.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.cli.bench_machine import figure, machine
from stoker.cli.bench_processes import cpu_seconds, memory_bytes, processes, send
from stoker.errors import InternalError
from stoker.seams.clock import SystemClock

_FEW = 100
_STEPS_PER_SECOND = 30.0
_TURNS = 4
_HISTORY_TOKENS = 16_000
_TOKEN_BYTES = 12
"""Of a real one: four of text, four each of its id and log-probability. A token of the test model
is one character: nine bytes, so a history has a third more of them."""
_TURN = _HISTORY_TOKENS * _TOKEN_BYTES // 9 // (2 * _TURNS)
_SAMPLES = 40
_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 900.0
_END_SECONDS = 30.0
_TESTING = Path(stoker.__file__).parent / "testing"
_SETTINGS = """
[admission]
mode = "fixed"
active_max = {count}
[program]
hosts = 2
check_replays = 0.0
[ledger]
idle_exit = 3.0
[workers]
idle_exit = 5.0
[workers.classes.fast]
isolation = "process"
trust = "trusted"
slots = 4
"""

Say = Callable[[str], object]


class Used(msgspec.Struct, frozen=True):
    """What a run's coordinator and hosts have used until now."""

    cpu_seconds: float
    memory_bytes: int
    calls: int
    """Model calls answered."""


def measure(
    *, runs: int, rollouts: int = 10_000, seconds: float = 60.0, say: Say
) -> dict[str, Any]:
    """Measure ``runs`` times and return the bench document (DESIGN §9)."""
    ratios, waiting, histories, few_ms, many_ms = [], [], [], [], []
    for number in range(runs):
        say(f"bench scale: run {number + 1} of {runs}: {_FEW} rollouts …")
        few, few_cpu = asyncio.run(_steps(_FEW, seconds))
        say(f"bench scale: run {number + 1} of {runs}: {rollouts} rollouts …")
        many, many_cpu = asyncio.run(_steps(rollouts, seconds))
        ratios.append(many_cpu / few_cpu)
        few_ms.append(few_cpu * 1000)
        many_ms.append(many_cpu * 1000)
        waiting.append((many.memory_bytes - few.memory_bytes) / (rollouts - _FEW) / 1024)
        say(f"bench scale: run {number + 1} of {runs}: {rollouts} long histories …")
        histories.append(asyncio.run(_histories(rollouts)).memory_bytes / 1e9)
    against = f"{_FEW} rollouts, {_STEPS_PER_SECOND:g} steps a second each time"
    tokens = f"{rollouts} histories of {_HISTORY_TOKENS} tokens"
    many_named = str(rollouts) if rollouts % 1000 else f"{rollouts // 1000}k"
    return {
        "bench": "scale",
        "machine": machine(),
        "figures": {
            f"cpu_per_step_{many_named}_vs_{_FEW}": figure(ratios, "ratio", 1.2, against),
            "step_cpu_ms_few": figure(few_ms, "ms", None, "coordinator and hosts"),
            "step_cpu_ms_many": figure(many_ms, "ms", None, f"{rollouts} rollouts"),
            "waiting_rollout_kb": figure(waiting, "KiB", 20.0, "besides its history"),
            f"histories_{many_named}_gb": figure(histories, "GB", 4.0, tokens),
        },
    }


async def _steps(count: int, seconds: float) -> tuple[Used, float]:
    """Return what ``count`` rollouts use while they step, and the CPU seconds of one step."""
    data = {"turns": 0, "turn": 1, "pause": count / _STEPS_PER_SECOND}
    async with _running(count, data) as run:
        await run.until(lambda: run.status()["rollouts_active"] >= count, "every rollout is active")
        begun = run.used()
        await run.until(lambda: run.used().calls > begun.calls, "the first step")
        begun, since = run.used(), run.clock.monotonic()
        await run.until(lambda: run.clock.monotonic() >= since + seconds, "the time")
        ended = run.used()
    return ended, (ended.cpu_seconds - begun.cpu_seconds) / (ended.calls - begun.calls)


async def _histories(count: int) -> Used:
    """Return what ``count`` rollouts use that wait, each with a long history."""
    data = {"turns": _TURNS, "turn": _TURN, "pause": 24 * 3600.0}
    async with _running(count, data) as run:
        await run.until(lambda: run.used().calls >= _TURNS * count, "every history is told")
        return run.used()


class _Run:
    """One run in a directory of its own."""

    def __init__(self, place: Path, count: int, data: dict[str, Any]) -> None:
        self.clock = SystemClock()
        self._place = place
        lines = [{"task_id": f"{number:06}", "data": data} for number in range(count)]
        (place / "tasks.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        (place / "stoker.toml").write_text(_SETTINGS.format(count=count))
        command = [sys.executable, "-m", "stoker.cli.main", "run"]
        command += [str(_TESTING / "scale_program.py"), "--json"]
        command += ["--model", f"scripted:{_TESTING / 'scale_model.py'}"]
        command += ["--tasks", str(place / "tasks.jsonl"), "--config", str(place / "stoker.toml")]
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            self._coordinator = subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--runs", str(place / "runs")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def status(self) -> dict[str, Any]:
        """Return the latest snapshot; an empty one before the first."""
        for path in (self._place / "runs").glob("run_*/status.json"):
            found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
            return found
        return {"rollouts_active": 0, "lane": {"calls": 0}}

    def used(self) -> Used:
        """Return what coordinator and hosts have used."""
        pids = [self._coordinator.pid, *self._hosts()]
        return Used(
            cpu_seconds=sum(map(cpu_seconds, pids)),
            memory_bytes=sum(map(memory_bytes, pids)),
            calls=self.status()["lane"]["calls"],
        )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for ``condition``.

        Raises:
            InternalError: the run ended before, or it takes absurdly long.
        """
        deadline = self.clock.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if self._coordinator.poll() is not None or self.clock.monotonic() > deadline:
                said = (self._place / "err").read_text(errors="replace")[-2000:]
                raise InternalError(f"bench scale: waited in vain until {what}; the run: {said}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def end(self) -> None:
        """End the run, its owner and its worker."""
        for pid in (self._coordinator.pid, *self._others()):
            send(pid, signal.SIGKILL)
        await asyncio.to_thread(self._coordinator.wait)
        deadline = self.clock.monotonic() + _END_SECONDS
        while self._others() and self.clock.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)

    def _hosts(self) -> list[int]:
        return processes("stoker.rollout.host", f"--parent {self._coordinator.pid} ")

    def _others(self) -> list[int]:
        return processes("stoker.", str(self._place / "runs"))


@asynccontextmanager
async def _running(count: int, data: dict[str, Any]) -> AsyncIterator[_Run]:
    with tempfile.TemporaryDirectory(prefix="stoker-scale-", ignore_cleanup_errors=True) as place:
        run = _Run(Path(place), count, data)
        try:
            yield run
        finally:
            await run.end()
