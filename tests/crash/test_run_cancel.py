"""``stoker cancel`` from another terminal: typed outcomes, nothing left running, nothing lost."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.coordinator.cancelling import CancelRequest, ask
from stoker.model.outcome import Outcome, OutcomeKind
from support.runs import BOUND, Rig, command_line, parents, until
from support.runs_gated import gate, gated
from support.runs_records import read

BAD_INPUT = 2


def cancel(one: Rig, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli.main", "cancel", str(one.run.path), *words],
        capture_output=True, text=True, timeout=BOUND, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    return done.stdout if code == 0 else done.stderr


def ends(one: Rig) -> dict[str, Outcome]:
    return {task: rollout.outcome for (task, _), rollout in read(one.run.path).rollouts.items()}


def tools_of(one: Rig) -> list[str]:
    """Command lines of tools that still run."""
    lines = [command_line(pid) for pid in parents()]
    return [line for line in lines if "STOKER_ACTION_KEY" in line and str(one.folder) in line]


def test_one_rollout_and_then_the_run_end_as_cancelled_and_their_tools_with_them(
    tmp_path: Path,
) -> None:
    fixed = {"admission": {"mode": "fixed", "active_max": 2}}
    with gated(tmp_path, 4, fixed) as one:
        one.start()
        one.until_lines(2)
        assert tools_of(one)
        told = json.loads(cancel(one, "t0", "--reason", "wrong tests", "--json"))
        assert told["coordinator_lives"] is True
        one.until_lines(3)  # the place that became free was given to the next
        assert "cancelled already" in cancel(one, "t0", code=BAD_INPUT)
        assert "no rollout 'nobody'" in cancel(one, "nobody", code=BAD_INPUT)
        cancel(one, "--reason", "enough")
        snapshot = one.finish()["snapshot"]
        assert snapshot["outcomes"] == {"cancelled": 4}
        assert snapshot["boxes_leaked"] == 0
        until(lambda: not tools_of(one), "tools to be ended")
        found = ends(one)
        assert {end.kind for end in found.values()} == {OutcomeKind.CANCELLED}
        reasons = {task: end.reason for task, end in found.items()}
        assert reasons == {"t0": "wrong tests", "t1": "enough", "t2": "enough", "t3": "enough"}
        assert "has finished" in cancel(one, code=BAD_INPUT)


def test_a_run_whose_coordinator_is_dead_is_cancelled_when_it_is_resumed(tmp_path: Path) -> None:
    with gated(tmp_path, 2) as one:
        one.start()
        one.until_lines(2)
        one.signal("coordinator", signal.SIGKILL)
        one.ended()
        assert "--resume" in cancel(one, "t1")
        foreign = one.run.path / "cancels" / "foreign.json"
        foreign.write_text("no request of ours")
        gate(one)
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 1, "cancelled": 1}


@pytest.mark.slow
def test_what_is_asked_twice_is_done_once_and_what_has_an_outcome_keeps_it(tmp_path: Path) -> None:
    with gated(tmp_path, 2) as one:
        one.start()
        one.until_lines(2)
        gate(one)
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 2}
        ids = [rollout.rollout_id for rollout in read(one.run.path).rollouts.values()]
        for rollout_id in (None, None, *ids):
            ask(one.run, CancelRequest(rollout_id=rollout_id, reason="late"))
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 2}
