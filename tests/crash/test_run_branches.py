"""Branches of environments in whole runs: each goes its own way, and outlives whoever held it."""

import shutil
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.summaries import inline_only
from stoker.cli.tree import lineage
from stoker.model.events import Delivered, Issued, Restored, Verb
from support import needs
from support import runs_errands as errands
from support.runs import Rig, lock_holder, rig, send, tell, until
from support.runs_records import read

PROGRAM = """
import stoker

HOLD = 'touch "$1"; until [ -e "$2" ]; do sleep 0.05; done'


def grow(box, what, **more):
    return box.run(["sh", "-c", f"printf {what}. >> kept"], **more)


@stoker.rollout(version="1", boxes=4, timeout="5m")
async def tree(ctx, task):
    box = await ctx.environment("python", files={"kept": ""})
    # Where it is not replayable, only a checkpoint can bring it back.
    await grow(box, "one", replayable=task.data.get("replayable", False))
    left, right = await box.branch(2)
    await ctx.gather(grow(left, "l"), grow(right, "r"))
    (deep,) = await left.branch(1)
    if "held" in task.data:
        await box.run(["sh", "-c", HOLD, "sh", task.data["held"], task.data["go"]], timeout="2m")
    await grow(deep, "d")
    seen = [(await each.run(["cat", "kept"])).text for each in (box, left, right, deep)]
    assert seen == ["one.", "one.l.", "one.r.", "one.l.d."], seen
    return 1.0
"""


def run_of(
    folder: Path, isolation: str = "process", data: dict[str, Any] | None = None
) -> AbstractContextManager[Rig]:
    trust = "trusted" if isolation == "process" else "untrusted"
    return rig(
        folder,
        program=PROGRAM,
        model=errands.MODEL,
        tasks=[{"task_id": "tree", "data": data or {}}],
        settings={
            "workers": {"count": 2, "classes": {"fast": {"isolation": isolation, "trust": trust}}}
        },
    )


def seen(one: Rig) -> tuple[float | None, int, int]:
    """Return the reward, how many openings were delivered, and how often one was restored."""
    (record,) = read(one.run.path).every
    opened = {e.path for e in record.events if isinstance(e, Issued) and e.verb is Verb.ENVIRONMENT}
    delivered = [e.path for e in record.events if isinstance(e, Delivered) and e.path in opened]
    assert len(set(delivered)) == len(delivered), "each is opened once for the program"
    restored = sum(isinstance(event, Restored) for event in record.events)
    return record.outcome.reward, len(delivered), restored


@pytest.mark.parametrize(
    "isolation",
    ["namespace", *(pytest.param(one, marks=pytest.mark.slow) for one in ("process", "container"))],
)
def test_branches_go_their_own_ways(tmp_path: Path, isolation: str) -> None:
    if isolation == "container" and not any(map(shutil.which, ("runc", "crun", "podman"))):
        pytest.skip(needs.CRUN)
    with run_of(tmp_path, isolation) as one:
        one.start()
        one.finish()
        assert seen(one) == (1.0, 4, 0)
        (record,) = read(one.run.path).every
        told = lineage(record.events, inline_only)
        root, left, right, deep = told.environments
        assert [each.generation for each in told.environments] == [0, 1, 1, 2]
        assert (left.parent, right.parent, deep.parent) == (root.path, root.path, left.path)
        assert (root.began_from, root.checkpoints[0].parent) == ("", root.baseline_digest)
        assert left.began_from == right.began_from == root.checkpoints[0].digest
        (kept,) = left.checkpoints
        assert (deep.began_from, kept.parent) == (kept.digest, left.began_from)
        assert one.report()["snapshot"]["boxes_leaked"] == 0


@pytest.mark.slow
def test_branches_outlive_their_worker_from_the_checkpoint_they_began_at(tmp_path: Path) -> None:
    held, go = tmp_path / "held", tmp_path / "go"
    with run_of(tmp_path, data={"held": str(held), "go": str(go)}) as one:
        one.start()
        until(lambda: held.exists() or one.ended_early(), "the action after the branches")
        box = next(iter(one.run.workers.glob("*/boxes/boxes/*.json")))
        holder = lock_holder(box.parents[2] / "lock")
        assert holder is not None, "whoever holds the environment lives"
        tell(f"killing {box.parents[2].name}, which holds at least one of the environments")
        send(holder, signal.SIGKILL)
        go.touch()
        one.finish()
        reward, opened, restored = seen(one)
        assert (reward, opened) == (1.0, 4)
        assert restored >= 1
        assert one.report()["snapshot"]["boxes_leaked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("coordinator.append.before", 4),
        ("coordinator.append.before", 5),
        ("coordinator.append.after", 4),
        ("coordinator.append.after", 5),  # the branches are asked for
        ("coordinator.turned", 5),
        ("coordinator.deliver.after", 5),
        ("box.state.named", 1),
        ("box.state.named", 2),
    ],
)
def test_a_kill_around_a_branch_changes_nothing(tmp_path: Path, point: str, count: int) -> None:
    with run_of(tmp_path, data={"replayable": point.startswith("box")}) as one:
        one.start(fault=f"{point}=kill@{count}")
        if point.startswith("coordinator"):
            assert one.ended() == -signal.SIGKILL
            one.start()
        one.finish()
        assert not one.armed.exists(), f"{point} was never reached"
        reward, opened, _ = seen(one)
        assert (reward, opened) == (1.0, 4)
