"""What programs, models and environments do to a run: stuck, raising, dying, faulty, changed."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import (
    BoxFailed,
    ModelUnavailable,
    ProgramRaised,
    ProgramStuck,
    RewardInvalid,
)
from stoker.model.faults import FaultSide
from stoker.model.outcome import Outcome, OutcomeKind
from support import runs_errands as errands
from support.runs import Rig, rig, until
from support.runs_records import Records, read

EXIT_BAD_INPUT = 2

# --- C6: programs that hold, end or confuse their host ---------------------------------------

HELD = """
import os
import re
import time

import stoker

LINE = 'printf "%s\\\\n" "$STOKER_ACTION_KEY" >> "$1"'


@stoker.rollout(version="1", boxes=0, timeout="20s")
async def one(ctx, task):
    kind, gate = task.task_id.partition("-")[0], task.data["gate"]
    await ctx.generate(ctx.chat("go"))
    if kind == "sleeps":
        while not os.path.exists(gate):
            time.sleep(0.01)
    elif kind == "spins":
        while not os.path.exists(gate):
            pass
    elif kind == "never":
        while True:
            pass
    elif kind == "locked":  # one call into C that holds the interpreter lock: no thread can speak
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif kind == "raises":
        raise ValueError("as told")
    elif kind == "nan":
        return float("nan")
    elif kind == "exits":
        os._exit(3)
    for _ in range(3):
        await ctx.call(["sh", "-c", LINE, "sh", task.data["log"]], effect="idempotent")
    return 1.0
"""
KINDS = ("sleeps", "spins", "never", "locked", "raises", "nan", "exits")
ORDINARY = 12


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """One run of all kinds; what holds a host lets go when every ordinary rollout has ended.

    So the ordinary ones cannot have waited for it: they would have waited for themselves.
    """
    folder = tmp_path_factory.mktemp("held")
    data = {"gate": str(folder / "gate"), "log": str(folder / "tools.log")}
    names = [*KINDS, *(f"ordinary-{n}" for n in range(ORDINARY))]
    tasks = [{"task_id": name, "data": data} for name in names]
    settings = {"program": {"stuck": 1.0}, "admission": {"mode": "fixed", "active_max": 100}}
    with rig(folder, program=HELD, model=errands.MODEL, tasks=tasks, settings=settings) as one:
        one.start()
        one.until_lines(3 * ORDINARY)
        (folder / "gate").touch()
        one.finish()
        return read(one.run.path)


def outcome(records: Records, task: str) -> Outcome:
    return records.rollouts[task, 0].outcome


def code(found: Outcome) -> str:
    assert found.kind is OutcomeKind.FAILED, found
    assert found.reward is None
    assert found.fault is not None
    return found.fault.code


def test_c6_other_rollouts_finish_while_a_program_holds_its_host(held: Records) -> None:
    for number in range(ORDINARY):
        assert outcome(held, f"ordinary-{number}").reward == 1.0


@pytest.mark.parametrize("kind", ["sleeps", "spins"])
def test_c6_held_host_lets_the_program_finish_in_quarantine(kind: str, held: Records) -> None:
    assert outcome(held, kind).reward == 1.0


def test_c6_program_that_never_ends_is_stuck_and_named(held: Records) -> None:
    found = outcome(held, "never")
    assert code(found) == ProgramStuck.code
    assert found.fault is not None
    assert "program.py:" in found.fault.message, found.fault.message


def test_c6_program_that_holds_the_interpreter_lock_is_stuck_too(held: Records) -> None:
    """Its host's own watchdog cannot speak; the host is known by its silence."""
    assert code(outcome(held, "locked")) == ProgramStuck.code


def test_c6_raising_nan_and_exit_are_typed(held: Records) -> None:
    assert code(outcome(held, "raises")) == ProgramRaised.code
    assert code(outcome(held, "nan")) == RewardInvalid.code
    assert code(outcome(held, "exits")) == ProgramRaised.code


# --- C1, C11: a model server that fails ------------------------------------------------------

ASKING = """
import stoker


@stoker.rollout(version="1", boxes=0, timeout="2m")
async def asks(ctx, task):
    chat = ctx.chat("go")
    for _ in range(3):
        try:
            await ctx.generate(chat, tokens_max=16)
        except Exception:
            return 0.0
        chat.user("on")
    return 1.0
"""


def simulated(folder: Path, count: int, faults: Mapping[str, Any]) -> Records:
    """Run ``ASKING`` against a simulated server that throws ``faults`` in."""
    tasks = [{"task_id": f"t{number}", "data": {}} for number in range(count)]
    settings = {"lane": {"retries": 3, "retry_delay": 0.01, "call_timeout": 0.5}}
    with rig(folder, program=ASKING, model=errands.MODEL, tasks=tasks, settings=settings) as one:
        rates = "".join(f"{name} = {json.dumps(rate)}\n" for name, rate in faults.items())
        (folder / "device.toml").write_text(
            'policy = "scripted:model.py"\na = "1ms"\nwindow = 16\nreplicas = 2\nseed = 7\n'
            f"[faults]\n{rates}"
        )
        one.model_spec = f"sim:{folder / 'device.toml'}"
        one.start()
        assert one.finish()["snapshot"]["lane"]["retries"] > 0, "faults were met"
        return read(one.run.path)


def test_c1_faulty_server_gives_rewards_or_typed_faults_never_zero(tmp_path: Path) -> None:
    rates = {"too_many": 0.05, "broken": 0.1, "closed": 0.05, "hang": 0.05, "late": 0.05}
    records = simulated(tmp_path, 40, {**rates, "late_by": 5.0})
    kinds = records.outcomes
    assert kinds["completed"] + kinds["failed"] == 40, kinds
    assert kinds["completed"] > 0, "retries on another replica help"
    for rollout in records.rollouts.values():
        if rollout.outcome.kind is OutcomeKind.COMPLETED:
            assert rollout.outcome.reward == 1.0, "the program's 0.0 means a fault was met"
        else:
            assert code(rollout.outcome) == ModelUnavailable.code


def test_c11_program_that_catches_everything_gets_no_reward(tmp_path: Path) -> None:
    records = simulated(tmp_path, 3, {"broken": 1.0})
    for rollout in records.rollouts.values():
        assert code(rollout.outcome) == ModelUnavailable.code
        assert rollout.outcome.fault is not None
        assert rollout.outcome.fault.side is FaultSide.INFRASTRUCTURE


# --- C7, C8: environments and workers that are not there -------------------------------------

OPENING = """
import stoker


@stoker.rollout(version="1", boxes=1, timeout="5m")
async def opens(ctx, task):
    box = await ctx.environment(worker_class=task.data["worker_class"])
    seen = await box.run(["true"])
    return 1.0 if seen.ok else 0.0
"""


def test_c7_environment_that_fails_for_three_is_no_reward_for_three(tmp_path: Path) -> None:
    """Their boxes cannot be made: something is to be mounted below a file."""
    broken = ("t3", "t7", "t11")
    tasks = [
        {"task_id": f"t{n}", "data": {"worker_class": "broken" if f"t{n}" in broken else "fast"}}
        for n in range(20)
    ]
    mount = {"source": str(tmp_path), "target": "/usr/bin/env/below", "writable": False}
    classes = {"broken": {"isolation": "namespace", "slots": 2, "mounts": [mount]}}
    with rig(
        tmp_path,
        program=OPENING,
        model=errands.MODEL,
        tasks=tasks,
        settings={"workers": {"classes": classes}},
    ) as one:
        one.start()
        if one.ended() == EXIT_BAD_INPUT and one.has_said("namespace"):
            pytest.skip("no namespace boxes on this host; `stoker doctor --fix` says what to do")
        one.finish()
        records = read(one.run.path)
    assert records.outcomes == {"completed": 17, "failed": 3}
    for task in broken:
        found = outcome(records, task)
        assert code(found) == BoxFailed.code
        assert found.fault is not None
        assert found.fault.side is FaultSide.INFRASTRUCTURE


def test_c8_class_without_workers_is_seen_and_work_resumes(tmp_path: Path) -> None:
    tasks = [{"task_id": f"t{n}", "data": {"worker_class": "fast"}} for n in range(4)]
    with rig(
        tmp_path,
        program=OPENING,
        model=errands.MODEL,
        tasks=tasks,
        settings={"workers": {"count": 0}},
    ) as one:
        one.start()
        seen = until(lambda: one.status()["classes"].get("fast"), "the class in the status")
        until(lambda: one.status()["classes"]["fast"]["queued"] == 4, "all of them queued")
        seen = one.status()["classes"]["fast"]
        assert (seen["slots"], seen["running"]) == (0, 0), seen
        assert seen["oldest_queued_seconds"] > 0
        until(lambda: one.status()["lane"]["unused"].get("class fast"), "idle time charged to it")
        one.start_worker("by-hand")
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 4}


# --- C10: resumed with something else --------------------------------------------------------

CHANGING = """
import stoker

SCRIPT = (
    'printf "%s\\\\n" "$STOKER_ACTION_KEY" >> "$1"; until [ -e "$2" ]; do sleep 0.02; done'
)


@stoker.rollout(version="1", boxes=1, timeout="10m")
async def changing(ctx, task):
    if task.data["waits"]:
        await ctx.environment()
        argv = ["sh", "-c", SCRIPT, "sh", task.data["log"], task.data["gate"]]
        await ctx.call(argv, effect="idempotent", timeout="5m")
    return 1.0
"""


def changing(folder: Path) -> dict[str, Any]:
    data = {"log": str(folder / "tools.log"), "gate": str(folder / "gate")}
    tasks = [{"task_id": f"t{n}", "data": {**data, "waits": n >= 3}} for n in range(6)]
    return {"program": CHANGING, "model": errands.MODEL, "tasks": tasks}


def killed_half_way(one: Rig) -> bytes:
    """Run until three of six rollouts have ended and three wait; kill; return the record."""
    one.start()
    one.until_lines(3)
    until(lambda: one.status()["outcomes"].get("completed") == 3, "three outcomes")
    one.signal("coordinator", signal.SIGKILL)
    one.ended()
    return (one.run.path / "run.json").read_bytes()


def change_program(one: Rig) -> str:
    one.program.write_text(CHANGING.replace("return 1.0", "return 2.0"))
    return "program"


def change_model(one: Rig) -> str:
    one.model.write_text(errands.MODEL + "\n# another\n")
    return "model file"


def change_limits(one: Rig) -> str:
    one.configure({"workers": {"classes": {"fast": {"timeout": 77.0}}}})
    return "setting workers.classes.fast.timeout"


@pytest.mark.parametrize("change", [change_program, change_model, change_limits])
def test_c10_changed_run_is_refused_or_restarted_and_recorded(change: Any, tmp_path: Path) -> None:
    with rig(tmp_path, **changing(tmp_path)) as one:
        record = killed_half_way(one)
        what = change(one)
        one.start()
        assert one.ended() == EXIT_BAD_INPUT, one.said()
        assert one.has_said(f"another {what} (recorded"), one.said()
        assert one.has_said("--changed restart")
        assert (one.run.path / "run.json").read_bytes() == record, "nothing was changed"
        (tmp_path / "gate").touch()
        one.start("--changed", "restart")
        report = one.finish()
        assert one.run.record.restarts == 1
        assert report["snapshot"]["outcomes"] == {"completed": 6}
        assert report["snapshot"]["boxes_leaked"] == 0
        rewards = sorted_rewards(read_all(one))
        assert rewards == ([1.0] * 3 + [2.0] * 3 if what == "program" else [1.0] * 6)


def read_all(one: Rig) -> list[Outcome]:
    """Return every outcome, those of restarted rollouts included."""
    found = [rollout.outcome for rollout in read(one.run.path).every]
    assert sum(one.kind is OutcomeKind.CANCELLED for one in found) == 3, found
    assert len(found) == 9
    return found


def sorted_rewards(found: list[Outcome]) -> list[float]:
    return sorted(one.reward for one in found if one.reward is not None)


def test_c8_a_class_that_vanishes_and_returns_costs_time_and_nothing_else(tmp_path: Path) -> None:
    with rig(tmp_path, **changing(tmp_path), settings={"workers": {"count": 0}}) as one:
        one.start()
        until(lambda: one.status()["classes"].get("fast"), "work for the class")
        first = one.start_worker("first")
        one.until_lines(3)
        until(lambda: one.status()["classes"]["fast"]["slots"] == 4, "the class is there")
        first.kill()
        until(lambda: one.status()["classes"]["fast"]["slots"] == 0, "the class is gone")
        until(lambda: one.status()["lane"]["unused"].get("class fast"), "its time charged to it")
        one.start_worker("first")
        one.until_lines(4)  # run again, as they may: one by one, since they may be to blame
        one.open_gate()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 6}
        records = read(one.run.path)
    assert {found.outcome.reward for found in records.rollouts.values()} == {1.0}
