"""A trainer that dies around its hand-outs, commits and checkpoints, as a real process.

The script takes groups, publishes a policy after each and commits; every second group it saves its
checkpoint. It says each thing only after the call that promised it returned.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import stoker.coordinator.execute  # noqa: F401 - declares the points
from stoker.seams.faultpoints import POINTS
from support.command import wait_until_quiet
from support.runs import BOUND, tell
from support.source import ROOT
from support.training import lay_out

TASKS = ["a", "b", "c"]
SCRIPT = """
import asyncio, json, sys
from pathlib import Path
import stoker
from stoker.config.load import process_environment
from stoker.seams.faultpoints import arm
from support.training import Engine, model_of, request

folder, restore = Path(sys.argv[1]), sys.argv[2] == "restore"
checkpoint, log = folder / "checkpoint.json", (folder / "trainer.log").open("a")


def say(*words):
    print(*words, file=log, flush=True)


async def main():
    engine = Engine()
    asked = request(folder, "run.group_size=2", run="r")
    async with stoker.start_run(asked, model=model_of(engine)) as run:
        if restore and checkpoint.exists():
            await run.restore(json.loads(checkpoint.read_text()))
        say("begun")
        number = 0
        async for group in run.groups():
            say("took", group.group_id, group.number)
            number += 1
            await run.commit(group)
            say("committed", group.group_id, group.number)
            if number % 2 == 0:
                draft = folder / "checkpoint.new"
                draft.write_text(json.dumps(run.state()))
                draft.replace(checkpoint)
                say("saved")
    say("ended")


arm(process_environment())
asyncio.run(main())
"""
EVENTS = 2 * len(TASKS)
"""Of the journal of deliveries, in a run that nobody hurts: hand-outs and commits."""


class Said(NamedTuple):
    """One line of the trainer."""

    what: str
    group: str = ""
    number: int = 0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    lay_out(tmp_path, TASKS)
    yield tmp_path
    wait_until_quiet(tmp_path)


def train(place: Path, how: str, fault: str = "") -> tuple[int, list[Said]]:
    """Run the trainer to its end; return its exit status and what this life of it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    log = place / "trainer.log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place), how],
        env={**kept, "PYTHONPATH": paths, "STOKER_FAULT": fault},
        capture_output=True, text=True, timeout=BOUND, check=False,
    )  # fmt: skip
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    lines = [line.split() for line in log.read_text().splitlines()[before:]]
    return done.returncode, [_said(*line) for line in lines]


def _said(what: str, group: str = "", number: str = "0") -> Said:
    return Said(what, group, int(number))


def groups_of(said: list[Said], what: str) -> list[str]:
    return [one.group for one in said if one.what == what]


def cases() -> list[object]:
    points = sorted(name for name in POINTS if name.startswith("trainer."))
    usual = {("trainer.delivery.after", 2)}
    return [
        pytest.param(point, nth, marks=() if (point, nth) in usual else pytest.mark.slow)
        for point in points
        for nth in range(1, EVENTS + 1)
    ]


@pytest.mark.parametrize(("point", "nth"), cases())
def test_b17_a_trainer_killed_around_a_delivery_gets_what_it_did_not_commit(
    place: Path, point: str, nth: int
) -> None:
    tell(f"{point}@{nth}: {POINTS[point]}")
    status, first = train(place, "resume", f"{point}=kill@{nth}")
    assert status == -signal.SIGKILL, "the point was not reached"
    status, second = train(place, "resume")
    assert status == 0
    took, committed = groups_of(first, "took"), groups_of(first, "committed")
    again = groups_of(second, "took")
    assert len(again) == len(set(again)), "once each"
    assert not set(committed) & set(again), "what was committed does not come again"
    unknown = set(took) - set(committed)  # perhaps its commit is on disk and was not told
    lost_reply = point.endswith("after") and nth % 2 == 0
    assert bool(unknown & set(again)) == (bool(unknown) and not lost_reply)
    assert len(set(committed) | set(again) | (unknown if lost_reply else set())) == len(TASKS)
    redelivered = {one.group: one.number for one in second if one.what == "took"}
    assert all(redelivered[group] == 2 for group in unknown & set(again))
    assert train(place, "resume")[1] == [Said("begun"), Said("ended")], "nothing is left"


def test_b17_a_trainer_back_from_an_older_checkpoint_gets_what_came_after_it(place: Path) -> None:
    status, first = train(place, "resume", f"trainer.delivery.after=kill@{EVENTS}")
    assert status == -signal.SIGKILL
    saved = [one.what for one in first].index("saved")
    before = set(groups_of(first[:saved], "committed"))
    assert len(before) == 2
    status, second = train(place, "restore")
    assert status == 0
    (again,) = [one for one in second if one.what == "took"]
    assert again.group not in before
    assert again.number == 2, "its commit is on disk, and was taken back"
