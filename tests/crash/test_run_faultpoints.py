"""Every declared fault point, in a whole run: one process is killed there, and nothing shows it.

The points are those the code declares; one that no run reaches fails the floor. What dies is
resumed (the coordinator, by us) or started again (the rest, by whoever needs it).
"""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import stoker.broker.owner
import stoker.coordinator.execute
import stoker.worker.main  # noqa: F401 - these three declare every point
from stoker.model.completion import CompletionStatus
from stoker.model.events import Delivered
from stoker.model.ids import ActionId
from stoker.model.outcome import OutcomeKind
from stoker.seams.faultpoints import POINTS
from support import runs_errands as errands
from support.runs import Rig, rig, tell
from support.runs_records import Records, Rollout, read

PROGRAM = """
import stoker

LINE = 'printf "%s\\\\n" "$STOKER_ACTION_KEY" >> "$1"; '


@stoker.rollout(version="1", boxes=1, timeout="5m")
async def chores(ctx, task):
    log = task.data["log"]
    box = await ctx.environment(files={"a": "begun "})
    turn = await ctx.generate(ctx.chat("go"))
    written, long = await ctx.gather(
        box.run(["sh", "-c", "printf written >> a"]),
        ctx.call(["sh", "-c", LINE + "yes x | head -c 50000", "sh", log], effect="idempotent"),
    )
    sent = await ctx.call(["sh", "-c", LINE + "echo sent", "sh", log], effect="external")
    late = await ctx.first(ctx.call(["sleep", "60"]), ctx.sleep(0.02))
    read = await box.run(["cat", "a"])
    whole = (written.ok, len(long.run.stdout.kept), sent.run.text, late, read.text)
    assert whole == (True, 50000, "sent", None, "begun written"), whole
    return len(turn.text) + ctx.random.random()
"""
COUNT = 3
WORKERS = ("worker.", "artifact.")
"""Points where a worker dies: an artifact of this size is a tool's output."""
SETTINGS = {
    "workers": {"classes": {"fast": {"limits": {"output": 100_000}}}},
    "program": {"hosts": 1},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    with small_rig(tmp_path_factory.mktemp("reference")) as one:
        one.start()
        one.finish()
        yield read(one.run.path)


def small_rig(folder: Path) -> AbstractContextManager[Rig]:
    log = folder / "tools.log"
    tasks = errands.tasks(COUNT, log)
    return rig(
        folder, program=PROGRAM, model=errands.MODEL, tasks=tasks, settings=SETTINGS, log=log
    )


@pytest.mark.parametrize("point", sorted(POINTS))
def test_killed_at_every_point_once(point: str, tmp_path: Path, reference: Records) -> None:
    tell(f"{point}: {POINTS[point]}")
    with small_rig(tmp_path) as one:
        one.start(fault=f"{point}=kill")
        status = one.ended()
        assert not one.armed.exists(), f"{point} was never reached: {POINTS[point]}\n{one.said()}"
        if status == -signal.SIGKILL:
            one.start()
            status = one.ended()
        assert status == 0, one.said()
        assert one.report()["snapshot"]["boxes_leaked"] == 0
        records = read(one.run.path)
        counted = Counter(one.lines())
    assert set(records.rollouts) == set(reference.rollouts)
    for place, rollout in records.rollouts.items():
        expected = reference.rollouts[place]
        if ambiguous(rollout):
            assert rollout.outcome.kind is OutcomeKind.AMBIGUOUS
            assert point.startswith(WORKERS), "nobody else's death makes an effect doubtful"
        else:
            assert rollout.outcome == expected.outcome
            assert delivered(rollout) == delivered(expected)
    again = {key: count for key, count in counted.items() if count > 1}
    assert not again or point.startswith(WORKERS), again
    actions = records.actions
    assert all(count <= actions[ActionId(key)].deliveries for key, count in counted.items())


def ambiguous(rollout: Rollout) -> bool:
    return any(
        isinstance(event, Delivered) and event.status == CompletionStatus.AMBIGUOUS
        for event in rollout.events
    )


def delivered(rollout: Rollout) -> set[str]:
    return {event.path for event in rollout.events if isinstance(event, Delivered)}
