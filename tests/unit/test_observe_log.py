import json
from pathlib import Path
from typing import Any

import pytest

from stoker.model.faults import FaultRecord, FaultSide
from stoker.model.ids import RolloutId, RunId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.observe.log import RolloutLine, open_log


def line(outcome: Outcome, task: str = "HumanEval/7") -> RolloutLine:
    return RolloutLine(
        run=RunId("run_1"), rollout=RolloutId("rol_1"), group="grp_1", index=0, task=task,
        outcome=outcome, steps=2, actions=1, attempts=2, retries=1, model_calls=2, tokens=64,
        policy_versions=(0, 1), faults={"worker_lost": 1}, seconds=1.25, queue_seconds=0.5,
        run_seconds=0.25,
    )  # fmt: skip


COMPLETED = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)
FAILED = Outcome(
    kind=OutcomeKind.FAILED,
    fault=FaultRecord(code="box_failed", side=FaultSide.INFRASTRUCTURE, message="no disk"),
)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().decode("ascii").splitlines()]


def test_the_canonical_line_always_has_the_same_keys(tmp_path: Path) -> None:
    log = open_log(tmp_path / "logs" / "run.jsonl", level="error")
    log.rollout(line(COMPLETED))
    log.rollout(line(FAILED))
    log.close()
    one, other = read(tmp_path / "logs" / "run.jsonl")
    assert set(one) == set(other)
    assert (one["event"], one["outcome"], one["reward"]) == ("rollout_finished", "completed", 1.0)
    assert (other["outcome"], other["reward"], other["fault"]) == ("failed", None, "box_failed")
    assert one["policy_versions"] == [0, 1]


def test_levels_and_names(tmp_path: Path) -> None:
    log = open_log(tmp_path / "run.jsonl", level="warning")
    log.event("run_started", run="run_1")
    log.event("run_ended", level="warning", run="run_1")
    with pytest.raises(AssertionError, match="catalogue"):
        log.event("something_else")
    assert [entry["event"] for entry in read(tmp_path / "run.jsonl")] == ["run_ended"]
    log.close()


def test_what_agents_write_stays_escaped_on_its_line(tmp_path: Path) -> None:
    log = open_log(tmp_path / "run.jsonl")
    hostile = "\x1b[2J\nfake\r\x9b31m\u202e\ud800"
    log.rollout(line(COMPLETED, task=hostile))
    log.close()
    assert read(tmp_path / "run.jsonl")[0]["task"] == hostile
    raw = (tmp_path / "run.jsonl").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in raw)
    assert raw.count(b"\n") == 1


def test_a_second_opening_appends_and_a_closed_log_drops(tmp_path: Path) -> None:
    for _ in range(2):
        log = open_log(tmp_path / "run.jsonl")
        log.event("run_started", run="run_1")
        log.close()
    log.event("run_ended")
    assert log.dropped == 1
    assert len(read(tmp_path / "run.jsonl")) == 2


def test_a_full_disk_drops_the_line_not_the_run() -> None:
    log = open_log(Path("/dev/full"))
    log.event("run_started", run="run_1")
    log.close()
    assert log.dropped == 1


def test_the_line_for_people() -> None:
    assert line(COMPLETED).brief() == (
        "HumanEval/7 · completed 1 · 2 steps, 1 action, 1 retry · 1.2 s"
    )
    assert "failed (box_failed)" in line(FAILED).brief()
