"""An environment that was kept is had again on another worker, and only what came after runs."""

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stoker.model.events import Restored
from support import runs_errands as errands
from support.runs import Rig, lock_holder, rig, send, tell, until
from support.runs_records import read

ADOPTED = "artifact.rename.after"
PROGRAM = """
import stoker

GROW = 'printf "%s\\\\n" one >> "$1"; printf "%s." "$2" >> kept; cat kept'
HOLD = 'touch "$1"; until [ -e "$2" ]; do sleep 0.05; done'


@stoker.rollout(version="1", boxes=1, timeout="5m")
async def kept(ctx, task):
    say = task.data
    box = await ctx.environment("counted")  # a baseline of the settings: kept begins with "begun:"
    grow = ["sh", "-c", GROW, "sh", say["log"], "0"]
    grown = await box.run(grow, replayable=say["replayable"], timeout="1m")
    saved = await box.checkpoint()
    assert saved.parent == box.opened.baseline_digest and saved.generation == 0, saved
    await box.run(["sh", "-c", HOLD, "sh", say["held"], say["go"]], timeout="2m")
    after = await box.run(["sh", "-c", "printf more >> kept; cat kept"])
    assert (grown.text, after.text) == ("begun:0.", "begun:0.more"), (grown.text, after.text)
    again = await box.checkpoint()
    assert again.digest != saved.digest
    return 1.0
"""


def run_of(folder: Path, *, replayable: bool) -> AbstractContextManager[Rig]:
    data = {"log": str(folder / "tools.log"), "replayable": replayable}
    data |= {"held": str(folder / "held"), "go": str(folder / "go")}
    return rig(
        folder,
        program=PROGRAM,
        model=errands.MODEL,
        tasks=[{"task_id": "kept", "data": data}],
        settings={
            # No box but the environment's, so that its holder can be told.
            "workers": {"count": 2, "classes": {"fast": {"ready": 0}}},
            "sandbox": {"baselines": {"counted": {"setup": ["printf begun: > kept"]}}},
        },
        log=folder / "tools.log",
    )


def seen(one: Rig) -> tuple[float | None, int, int]:
    """Return the reward, how often the environment was restored, how often the tool ran."""
    (record,) = read(one.run.path).every
    restored = sum(isinstance(event, Restored) for event in record.events)
    return record.outcome.reward, restored, len(one.lines())


def test_a_kept_environment_outlives_its_worker_and_nothing_before_runs_again(
    tmp_path: Path,
) -> None:
    with run_of(tmp_path, replayable=False) as one:
        one.start()
        until(
            lambda: (tmp_path / "held").exists() or one.ended_early(),
            "the action after the checkpoint",
        )
        (box,) = one.run.workers.glob("*/boxes/boxes/*.json")
        holder = lock_holder(box.parents[2] / "lock")
        assert holder is not None, "whoever holds the environment lives"
        tell(f"killing {box.parents[2].name}, which holds the environment")
        send(holder, signal.SIGKILL)
        (tmp_path / "go").touch()
        one.finish()
        assert seen(one) == (1.0, 1, 1)
        assert one.report()["snapshot"]["boxes_leaked"] == 0


@pytest.mark.parametrize(
    "point",
    [
        "box.state.named",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("box.state.written", ADOPTED)),
    ],
)
def test_a_worker_killed_between_a_checkpoint_and_its_hand_over_costs_a_rebuild(
    tmp_path: Path, point: str
) -> None:
    with run_of(tmp_path, replayable=True) as one:
        (tmp_path / "go").touch()
        one.start(fault=f"{point}=kill@1")
        one.finish()
        assert not one.armed.exists(), f"{point} was never reached"
        assert seen(one) == (1.0, 1, 2)
        drafts = [*one.run.workers.glob("*/states/*")]
        assert drafts == [], "what a killed worker had not handed over is gone"
