"""``stoker bench lane --real``: a closed batch as a real run, beside its own simulation.

The same trace on the same simulated device: once with coordinator, hosts, ledger, worker and tools
that really sleep, on the real clock, and once in the simulator, where everything but the device and
the tools takes no time. What the real run takes longer is what all of that costs together.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

import stoker
from stoker.broker.base import JournalRequest, RolloutsRequest
from stoker.broker.client import connect
from stoker.config.tree import AdmissionSettings, Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunRequest
from stoker.inference.profile import SimProfile
from stoker.model.events import Admitted, Finished, decode_event
from stoker.model.ids import RunId
from stoker.testing.simulator.policies import Adaptive
from stoker.testing.simulator.trace import RolloutTrace, Shape, Waits, endless
from stoker.testing.simulator.world import simulate

_TESTING = Path(stoker.__file__).parent / "testing"
_PROFILE = """
policy = "scripted:{policy}"
name = "turns"
a = {device.a}
c = {device.c}
window = {device.window}
tokens_per_turn = 1
"""


def real_and_simulated(
    device: SimProfile, shape: Shape, waits: Waits, *, rollouts: int, seed: int
) -> tuple[float, float]:
    """Return the makespan of a closed batch in a real run, and in the simulator; seconds."""
    work = list(islice(endless(seed, shape, waits), rollouts))
    settings = AdmissionSettings(mode="fixed", active_max=rollouts)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", ignore_cleanup_errors=True) as place:
        real = asyncio.run(_real(Path(place), device, work, settings))
    return real, simulate(device, iter(work), Adaptive(settings)).seconds


async def _real(
    place: Path, device: SimProfile, work: Sequence[RolloutTrace], admission: AdmissionSettings
) -> float:
    """Return the seconds from the first admission to the last outcome."""
    lines = [
        {"task_id": f"{number:04}", "data": {"waits": [turn.wait for turn in one.turns]}}
        for number, one in enumerate(work)
    ]
    tasks, profile = place / "tasks.jsonl", place / "device.toml"
    tasks.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    profile.write_text(_PROFILE.format(device=device, policy=_TESTING / "step_model.py"))
    worker = {"isolation": "process", "trust": "trusted", "slots": len(work), "timeout": "10m"}
    report = await execute(
        RunRequest(
            program=_TESTING / "trace_program.py",
            program_name=None,
            tasks=tasks,
            model=f"sim:{profile}",
            settings=Settings.model_validate(
                {
                    "admission": admission.model_dump(),
                    "program": {"hosts": 2, "check_replays": 0.0},
                    "workers": {"classes": {"fast": worker}},
                }
            ),
            runs_directory=place / "runs",
        )
    )
    return await _seconds(Path(report.snapshot.run_directory), RunId(report.snapshot.run_id))


async def _seconds(run: Path, run_id: RunId) -> float:
    begun: list[float] = []
    ended: list[float] = []
    ledger = await connect(run / "ledger", role="bench", idle_exit_seconds=1.0)
    try:
        for summary in (await ledger.rollouts(RolloutsRequest(run_id=run_id))).rollouts:
            request = JournalRequest(run_id=run_id, rollout_id=summary.rollout_id)
            for event in map(decode_event, (await ledger.journal(request)).events):
                if isinstance(event, Admitted):
                    begun.append(event.at)
                elif isinstance(event, Finished):
                    ended.append(event.at)
    finally:
        await ledger.close()
    return max(ended) - min(begun)
