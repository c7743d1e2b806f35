"""``stoker bench step``: what a step costs besides its model call and its tool.

Real coordinator, ledger owner, hosts and worker; the model answers at once and the tool is
``true``. A step's overhead is the time from one answer's delivery to the next, less the tool's own
run time. Every step holds two syncs (append, complete), so the figure is what is left beyond two
syncs, whose median is probed on the same disk before and after each run.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.broker.base import JournalRequest, RolloutsRequest
from stoker.broker.client import connect
from stoker.cli.bench_machine import Probe, figure, machine
from stoker.config.tree import Settings
from stoker.coordinator.execute import execute
from stoker.coordinator.rebuild import Standing, rebuild
from stoker.coordinator.request import RunRequest
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import Verb, decode_event
from stoker.model.ids import RunId

_STEPS = 40
_ALONE_STEPS = 80
_HELD_STEPS = 60
_HOLD_SECONDS = 3.0
_STUCK = "1s"
_ACTIVE = 2
_HELD_ACTIVE = 8
_PROGRAM = Path(stoker.__file__).parent / "testing" / "step_program.py"
_MODEL = Path(stoker.__file__).parent / "testing" / "step_model.py"

Say = Callable[[str], object]


class Measured(msgspec.Struct, frozen=True):
    """One run's figures, milliseconds."""

    alone_p50: float
    overhead_p50: float
    overhead_p99: float
    sync_p50: float
    other_host_p99: float


def measure(*, runs: int, say: Say) -> dict[str, Any]:
    """Measure ``runs`` times and return the bench document (DESIGN §9)."""
    measured = []
    for number in range(runs):
        say(f"bench step: run {number + 1} of {runs} …")
        measured.append(_once())
    alone = [m.alone_p50 - 2 * m.sync_p50 for m in measured]
    beyond = [m.overhead_p50 - 2 * m.sync_p50 for m in measured]
    return {
        "bench": "step",
        "machine": machine(sync_ms_p50=statistics.median(m.sync_p50 for m in measured)),
        "figures": {
            "step_overhead_syncs_ms": figure(
                alone, "ms", 4.0, "beyond two syncs, p50, one rollout in flight"
            ),
            "step_overhead_two_at_once_ms": figure(beyond, "ms", None, "the same, two in flight"),
            "step_overhead_ms_p99": figure(
                [m.overhead_p99 for m in measured], "ms", 25.0, "two in flight"
            ),
            "other_host_delay_ms_p99": figure(
                [m.other_host_p99 for m in measured], "ms", 50.0, "while one host is held"
            ),
        },
    }


def _once() -> Measured:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", ignore_cleanup_errors=True) as place:
        probe = Probe(Path(place))
        probe.sample()
        (alone,) = _steps(Path(place) / "alone", 1, _ALONE_STEPS, hold=False)
        plain = _steps(Path(place) / "plain", _ACTIVE, _STEPS, hold=False)
        probe.sample()
        held = _steps(Path(place) / "held", _HELD_ACTIVE, _HELD_STEPS, hold=True)
        overheads = sorted(ms for rollout in plain for ms in rollout)
        # Rollouts are placed in turn on two hosts: the odd ones never share the held one.
        others = sorted(ms for rollout in held[1::2] for ms in rollout)
        return Measured(
            alone_p50=statistics.median(alone),
            overhead_p50=statistics.median(overheads),
            overhead_p99=_p99(overheads),
            sync_p50=probe.median_ms(),
            other_host_p99=_p99(others) - statistics.median(others),
        )


def _steps(place: Path, active: int, steps: int, *, hold: bool) -> list[list[float]]:
    """Execute one run; return the overhead of every step in ms, by rollout in order."""
    place.mkdir()
    tasks = place / "tasks.jsonl"
    lines = [
        {
            "task_id": f"{number:03}",
            "data": {
                "steps": steps,
                "hold_step": steps // 3 if hold and number == 0 else -1,
                "hold_seconds": _HOLD_SECONDS,
            },
        }
        for number in range(active)
    ]
    tasks.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    return asyncio.run(_run(place, tasks, active))


async def _run(place: Path, tasks: Path, active: int) -> list[list[float]]:
    settings = Settings.model_validate(
        {
            "admission": {"mode": "fixed", "active_max": active},
            "program": {"hosts": 2, "stuck": _STUCK, "check_replays": 0.0},
            "workers": {
                "classes": {"fast": {"isolation": "process", "trust": "trusted", "slots": active}}
            },
        }
    )
    report = await execute(
        RunRequest(
            program=_PROGRAM,
            program_name=None,
            tasks=tasks,
            model=f"scripted:{_MODEL}",
            settings=settings,
            runs_directory=place / "runs",
        )
    )
    return await _overheads(Path(report.snapshot.run_directory), RunId(report.snapshot.run_id))


async def _overheads(run: Path, run_id: RunId) -> list[list[float]]:
    artifacts = ArtifactStore(run / "artifacts")
    ledger = await connect(run / "ledger", role="bench", idle_exit_seconds=1.0)
    try:
        listed = await ledger.rollouts(RolloutsRequest(run_id=run_id))
        found = []
        for summary in listed.rollouts:
            reply = await ledger.journal(
                JournalRequest(run_id=run_id, rollout_id=summary.rollout_id)
            )
            standing = rebuild((decode_event(event) for event in reply.events), artifacts.get)
            found.append((standing.admitted.task.task_id, _of_one(standing)))
    finally:
        await ledger.close()
    return [overheads for _, overheads in sorted(found)]


def _of_one(standing: Standing) -> list[float]:
    """Return the overhead of every step but the first, whose worker is still waking up."""
    overheads: list[float] = []
    began: float | None = None
    tool = 0.0
    for delivered in standing.delivered:
        if standing.issued[delivered.path].verb is not Verb.GENERATE:
            tool += delivered.run_seconds
            continue
        if began is not None:
            overheads.append((delivered.at - began - tool) * 1000)
        began, tool = delivered.at, 0.0
    return overheads[1:]


def _p99(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
