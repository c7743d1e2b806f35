"""Whole runs in one thread and virtual time: right ends, the same bytes, true idle causes."""

import asyncio
import json
import secrets
import socket
import subprocess
import tempfile
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.config.tree import AdmissionSettings, Settings
from stoker.coordinator.sampling import AdmissionFeed
from stoker.coordinator.unused import ADMISSION, NO_WORK, PAUSES
from stoker.inference.profile import SimProfile
from stoker.model.outcome import OutcomeKind
from stoker.model.task import Task
from stoker.model.tools import RunRequest, RunResult, Tests
from stoker.rollout.host import Host
from stoker.seams.clock import SystemClock
from stoker.testing.boxes import MemoryBox, output, small_shell
from stoker.testing.simulator.policies import Adaptive
from stoker.testing.simulator.run import Outside, SimulatedRun, simulate_run
from stoker.testing.simulator.trace import RolloutTrace, Shape, endless, lognormal
from stoker.testing.simulator.whereabouts import HELD_FOR_KV, QUEUED, RUNNING
from stoker.testing.simulator.world import simulate
from stoker.testing.trace_program import trace
from stoker.worker.hands import Hands
from stoker.worker.tools import Tools

DEVICE = SimProfile(policy="scripted:none", a=0.25, c=0.02, window=16, tokens_per_turn=1)
SHAPE = Shape(prompt=(1, 1), turns=(6, 6), sampled=(1, 1), observed=(1, 1))
AGREEMENT = 0.05
"""Of the window: how far each cause of the coordinator's may be from the true one. It looks once a
second, which is coarsest where rollouts march in step, as they do in these cases."""


@stoker.rollout(version="1", boxes=1, timeout="10m")
async def works(ctx: stoker.Context, task: stoker.Task) -> float:
    """Use what there is to use: a box, tools side by side, a local function, a check."""
    number = task.data["number"]
    box = await ctx.environment(files={"seed": str(number)})
    for step in range(6):
        await ctx.generate(ctx.chat(f"{number} {step}"))
        said = await ctx.gather(
            ctx.call(["echo", f"{number}.{step}"], effect="pure"),
            box.run(["sleep", str(ctx.random.random())]),
        )
        if said[0].run is None or said[0].run.text.strip() != f"{number}.{step}":
            raise ValueError(f"a tool said {said[0]!r}")
    await box.run(["write", "answer", "x"])
    if (await box.read_file("answer")).content != b"x":
        raise ValueError("the box forgot its file")
    if number % 5 == 4:
        raise ValueError("as asked")
    verdict = await ctx.score(box, Tests(source="", entry_point="f", solution="answer"))
    await ctx.sleep(0.5)
    reward: float = await ctx.local(half, number % 3)
    return reward if verdict.passed else -1.0


def half(number: int) -> float:
    """Return half of it."""
    return number / 2


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def pauses(ctx: stoker.Context, _task: stoker.Task) -> float:
    """Sleep in the program."""
    for _ in range(4):
        await ctx.generate(ctx.chat("go"))
        await ctx.sleep(20.0)
    return 1.0


def settings(**sections: Any) -> Settings:
    """Return settings of a run with a class ``fast`` of as many slots as are asked for."""
    slots = sections.pop("slots", 200)
    fast = {"slots": slots, "timeout": "10m"}
    return Settings.model_validate(
        {"program": {"check_replays": 0.0}, "workers": {"classes": {"fast": fast}}, **sections}
    )


def all_at_once(rollouts: int) -> dict[str, object]:
    """Return admission that begins every rollout at once."""
    return {"mode": "fixed", "active_max": rollouts}


def traced(rollouts: int, seconds: float | None = None) -> list[RolloutTrace]:
    """Return work of six turns; every wait is ``seconds``, where that is given."""
    waits = lognormal() if seconds is None else (lambda _chance: seconds)
    return list(islice(endless(1, SHAPE, waits), rollouts))


def tasks_of(work: list[RolloutTrace]) -> list[Task]:
    """Return the tasks that have ``trace`` do this work."""
    return [
        Task(task_id=f"{number:04}", data={"waits": [turn.wait for turn in one.turns]})
        for number, one in enumerate(work)
    ]


def simulated(count: int, seed: int = 0, **sections: Any) -> SimulatedRun:
    """Run ``works`` on so many tasks."""
    tasks = [Task(task_id=f"{number:04}", data={"number": number}) for number in range(count)]
    given = settings(admission=all_at_once(count), **sections)
    return simulate_run(works, tasks, given, Outside(device=DEVICE), seed=seed)


def test_sixty_rollouts_with_boxes_and_tools_end_with_the_rewards_they_earned() -> None:
    run = simulated(60, program={"check_replays": 1.0})
    by_task = {line["task"]: line for line in _lines(run)}
    assert len(by_task) == len(run.outcomes) == 60
    for number in range(60):
        line = by_task[f"{number:04}"]
        if number % 5 == 4:
            assert (line["outcome"], line["fault"]) == ("failed", "program_raised")
            assert line["reward"] is None
        else:
            assert (line["outcome"], line["reward"]) == ("completed", (number % 3) / 2)
        assert line["steps"] == 6
        assert line["retries"] == 0
    assert "non_deterministic" not in run.snapshot.faults, "every rollout was replayed once more"
    assert (run.snapshot.boxes_leaked, run.snapshot.state) == (0, "finished")
    assert run.seconds < 120


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    first, second, other = simulated(20), simulated(20), simulated(20, seed=1)
    assert first.digest == second.digest
    assert (first.seconds, first.unused, first.log) == (second.seconds, second.unused, second.log)
    assert first.timeline == second.timeline
    assert other.digest != first.digest


@stoker.rollout(version="1", boxes=0, timeout="30m")
async def waits(ctx: stoker.Context, _task: stoker.Task) -> float:
    """Ask once, then wait for a tool."""
    await ctx.generate(ctx.chat("go"))
    await ctx.call(["sleep", "60"], effect="pure")
    return 1.0


@pytest.mark.parametrize(("quota", "most"), [(4, 10), (None, 32)])
def test_b13_admission_holds_while_work_is_parked_over_a_cap(quota: int | None, most: int) -> None:
    """The quota leaves nothing in the queues, so no queue has an age that would hold.

    The first look, before anything was handed off, raises the target from 8 to 10.
    """
    given = settings(
        ledger={"queued_per_run_max": quota}, admission={"active_start": 8, "active_max": 32}
    )
    tasks = [Task(task_id=f"{number:04}", data={}) for number in range(40)]
    run = simulate_run(waits, tasks, given, Outside(device=DEVICE))
    assert run.snapshot.outcomes == {"completed": 40}
    changes = [
        line
        for line in map(json.loads, run.log.splitlines())
        if line["event"] == "admission_changed"
    ]
    assert run.snapshot.admission_target == most, changes
    assert (len(changes) == 1) == (quota is not None)


def test_nothing_of_the_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a simulated run reached for the machine")

    for place, name in (
        (threading.Thread, "start"), (socket.socket, "connect"), (socket.socket, "bind"),
        (subprocess, "Popen"), (SystemClock, "now"), (SystemClock, "monotonic"),
        (secrets, "token_hex"), (Path, "write_bytes"), (tempfile, "mkdtemp"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, refuse)
    run = simulated(5)
    monkeypatch.undo()
    assert len(run.outcomes) == 5
    assert run.snapshot.faults == {"program_raised": 1}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # name: (settings, device, the true cause of most of it, the coordinator's)
    "too few workers": ({"slots": 2, "admission": all_at_once(20)}, {}, QUEUED, "class fast"),
    "slow tools": ({"admission": all_at_once(20)}, {}, RUNNING, "class fast"),
    "few admitted": ({"admission": all_at_once(2)}, {}, ADMISSION, ADMISSION),
    "few rollouts": ({"admission": all_at_once(20)}, {"window": 400}, NO_WORK, NO_WORK),
}


@pytest.mark.parametrize("case", CASES)
def test_idle_places_have_their_true_cause_and_the_coordinator_finds_it(case: str) -> None:
    sections, device, true, told = CASES[case]
    outside = Outside(device=DEVICE.model_copy(update=device))
    work = traced(20, 2.0 if case == "few admitted" else 10.0)
    run = simulate_run(trace, tasks_of(work), settings(**sections), outside)
    assert _largest(run.unused).startswith(true), run.unused
    assert _largest(run.snapshot.lane.unused) == told
    _require_agreement(run)


def test_pauses_of_programs_are_told_apart_from_tools() -> None:
    tasks = [Task(task_id=f"{number:04}") for number in range(20)]
    given = settings(admission=all_at_once(20))
    run = simulate_run(pauses, tasks, given, Outside(device=DEVICE))
    assert _largest(run.idle_seconds) == PAUSES
    _require_agreement(run)


def test_calls_that_wait_for_memory_are_held_for_kv() -> None:
    device = DEVICE.model_copy(update={"kv_tokens": 200, "bytes_per_token": 1.0})
    run = simulate_run(
        trace, tasks_of(traced(10, 1.0)), settings(admission={"active_start": 10}),
        Outside(device=device),
    )  # fmt: skip
    assert {outcome.reward for outcome in run.outcomes.values()} == {1.0}
    assert run.unused[HELD_FOR_KV] + run.unused[ADMISSION] > 0.2 * run.lane.window_seconds
    assert run.lane.kv_held_seconds > 0.2 * run.seconds


def test_a_step_costs_two_syncs_and_ten_messages() -> None:
    def seconds(steps: int, *, sync: float = 0.0, message: float = 0.0) -> float:
        outside = Outside(device=DEVICE, sync_seconds=sync, message_seconds=message)
        task = Task(task_id="a", data={"waits": [1.0] * steps})
        return simulate_run(trace, [task], settings(), outside).seconds

    bare = {steps: seconds(steps) for steps in (1, 5)}
    assert bare[5] == pytest.approx(5 * (0.25 + 0.02 + 1.0))
    for kind, least, each in (("sync", 3, 2), ("message", 16, 10)):
        for steps in (1, 5):
            more = seconds(steps, **{kind: 0.01}) - bare[steps]
            assert more == pytest.approx(0.01 * (least + each * (steps - 1))), kind


def test_a_batch_takes_as_long_as_on_the_lane_alone_and_its_hand_over() -> None:
    work = traced(60)
    run = simulate_run(
        trace, tasks_of(work), settings(admission=all_at_once(60)), Outside(device=DEVICE)
    )
    alone = simulate(DEVICE, iter(work), Adaptive(AdmissionSettings(mode="fixed", active_max=60)))
    assert {outcome.reward for outcome in run.outcomes.values()} == {1.0}
    # Earlier or later by chance: what comes a moment later may share a step with more, or fewer.
    assert run.seconds == pytest.approx(alone.seconds, rel=0.02)
    idle, idle_alone = sum(run.idle_seconds.values()), sum(alone.idle_seconds.values())
    assert idle == pytest.approx(idle_alone, rel=0.02)
    assert run.lane.active_seconds == pytest.approx(alone.lane.active_seconds, rel=0.02)


def test_an_infrastructure_fault_is_no_reward() -> None:
    async def breaks(box: MemoryBox, request: RunRequest) -> RunResult:
        if request.argv[0] == "sleep":
            raise OSError("the box's host is on fire")
        return await small_shell(box, request)

    outside = Outside(device=DEVICE, tools=breaks)
    run = simulate_run(trace, tasks_of(traced(3, 1.0)), settings(), outside)
    assert {outcome.kind for outcome in run.outcomes.values()} == {OutcomeKind.FAILED}
    assert {outcome.reward for outcome in run.outcomes.values()} == {None}


@pytest.mark.parametrize(
    ("part", "method"), [(AdmissionFeed, "sample"), (Host, "handle"), (Hands, "take")]
)
def test_a_part_that_breaks_ends_the_simulation_with_that_error(
    part: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(part, method, broken)
    with pytest.raises(ArithmeticError, match="no such number"):
        simulated(3)


@stoker.rollout(version="1", boxes=0, timeout="20m")
async def straggles(ctx: stoker.Context, _task: stoker.Task) -> float:
    """Have the first of each group end long before the others."""
    await ctx.generate(ctx.chat("go"))
    await ctx.call(["sleep", "1" if ctx.index == 0 else "500"], effect="pure")
    return 1.0


def test_a_run_that_is_over_leaves_nothing_at_workers_and_ledger_it_may_share() -> None:
    boxes = simulated(20)  # of which the last ones are closed as the run ends
    assert (len(boxes.outcomes), boxes.left_behind) == (20, 0)
    tasks = [Task(task_id=str(number), data={}) for number in range(10)]
    given = settings(admission=all_at_once(50), run={"group_size": 1, "spare": 4})
    cut = simulate_run(straggles, tasks, given, Outside(device=DEVICE))
    assert cut.snapshot.outcomes == {OutcomeKind.COMPLETED: 10, OutcomeKind.CANCELLED: 40}
    assert cut.left_behind == 0, "tools of stragglers hold slots for minutes after their run"


def test_what_a_run_leaves_behind_holds_its_end_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    before = simulated(1)
    monkeypatch.setattr(Tools, "_close", hangs)
    run = simulated(1)
    assert (len(run.outcomes), run.left_behind) == (1, 1)
    assert run.seconds == pytest.approx(before.seconds + 5.0, abs=0.1)


def test_a_run_that_does_not_end_is_stopped_where_asked() -> None:
    async def hangs(_box: MemoryBox, _request: RunRequest) -> RunResult:
        await asyncio.Event().wait()
        return output("never")

    outside = Outside(device=DEVICE, tools=hangs)
    run = simulate_run(trace, tasks_of(traced(3)), settings(), outside, until=30.0)
    assert run.seconds == pytest.approx(30.0, abs=0.1)
    assert (run.outcomes, run.snapshot.state) == ({}, "stopped")
    assert len(run.journals) == 3


def _largest(shares: dict[str, float]) -> str:
    return max(shares, key=lambda cause: shares[cause])


def _require_agreement(run: SimulatedRun) -> None:
    """Hold the coordinator's shares of the window against the true ones, cause by cause."""
    true: dict[str, float] = {}
    for cause, seconds in run.unused.items():
        known = cause.rpartition(", ")[2]
        true[known] = true.get(known, 0.0) + seconds / run.lane.window_seconds
    told = run.snapshot.lane.unused
    for cause in {*true, *told}:
        assert abs(true.get(cause, 0.0) - told.get(cause, 0.0)) <= AGREEMENT, (cause, true, told)


def _lines(run: SimulatedRun) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.log.splitlines()]
    return [line for line in lines if line["event"] == "rollout_finished"]
