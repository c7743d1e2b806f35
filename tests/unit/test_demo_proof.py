import importlib
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.model.events import Verb
from stoker.model.ids import ActionId, CallPath
from stoker.model.outcome import Outcome, OutcomeKind

EXAMPLE = Path(__file__).parents[2] / "examples" / "humaneval"
SOLVED = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)


def example(name: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


def recorded(**changes: Any) -> Any:
    proof = example("proof")
    told = {
        "calls": [(CallPath("0"), Verb.GENERATE, "digest")],
        "results": {CallPath("0"): ("ok", None, (1, b"", b"\1\0\0\0", b"", "a"))},
        "outcome": SOLVED,
        **changes,
    }
    return proof.Recorded("run_1", {"t": proof.Told(**told)}, Counter({1: 2}), {ActionId("act_1")})


def test_equal_runs_have_no_differences() -> None:
    assert example("proof").differences(recorded(), recorded()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calls": [(CallPath("0"), Verb.GENERATE, "another")]}, "t: the calls differ"),
        (
            {"results": {CallPath("0"): ("ok", None, (1, b"", b"\2\0\0\0", b"", "a"))}},
            "t: what call 0 was given differs",
        ),
        (
            {"outcome": Outcome(kind=OutcomeKind.COMPLETED, reward=0.0)},
            "t: the outcomes differ",
        ),
    ],
)
def test_each_kind_of_difference_is_found(change: dict[str, Any], said: str) -> None:
    assert example("proof").differences(recorded(), recorded(**change)) == [said]


def test_a_rollout_that_is_in_one_run_only_is_found() -> None:
    other = recorded()
    other.rollouts.clear()
    assert example("proof").differences(recorded(), other) == ["t is in one run only"]


@pytest.mark.parametrize(
    ("lines", "signs"),
    [("act_1\n", 0), ("act_1\nact_1\n", 1), ("", 1), ("act_1\nact_of_another_run\n", 0)],
)
def test_runs_are_counted_at_the_tool(lines: str, signs: int, tmp_path: Path) -> None:
    counter = tmp_path / "queue.log"
    counter.write_text(lines, "ascii")
    assert len(example("proof").run_twice(recorded(), counter)) == signs


def test_a_second_attempt_in_the_ledger_is_found(tmp_path: Path) -> None:
    counter = tmp_path / "queue.log"
    counter.write_text("act_1\n", "ascii")
    run = recorded()
    run.attempts[2] += 1
    assert example("proof").run_twice(run, counter) == [
        "1 finished actions had 2 attempts in the ledger"
    ]


def test_what_was_not_solved_is_named() -> None:
    assert recorded().first_failure == ""
    truncated = Outcome(kind=OutcomeKind.TRUNCATED, reason="rollout timeout")
    assert recorded(outcome=truncated).first_failure == "t truncated rollout timeout"
    assert recorded(outcome=None).first_failure == "t has no outcome"
    assert recorded(outcome=truncated).solved == 0


def test_the_picture_is_well_formed_and_to_scale() -> None:
    picture = example("picture")
    short = picture.Timeline("short <&>", 4, [(0.0, 4), (1.0, 0)])
    long = picture.Timeline("long", 4, [(0.0, 2), (2.0, 0)], [(0.5, "kill -9")])
    drawn = ET.fromstring(picture.draw([short, long], title="lanes"))
    backs = [node for node in drawn.iter() if node.get("fill") == "#f3f1ec"]
    widths = [float(node.get("width") or 0) for node in backs]
    assert widths[1] == pytest.approx(2 * widths[0])
    said = [node.text for node in drawn.iter() if node.text]
    assert "short <&>" in said
    assert "kill -9" in said
