"""Every declared fault point, in whole runs: processes are killed there, and nothing shows it.

The points are those the code declares; one that no run reaches fails the floor. What dies is
resumed (the coordinator, by us) or started again (the rest, by whoever needs it). One run goes
through all points of a family; a run for each point alone is the long way to the same.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from msgspec import UNSET

import stoker.broker.owner
import stoker.coordinator.backups
import stoker.coordinator.execute
import stoker.export.files
import stoker.rollout.host
import stoker.worker.main  # noqa: F401 - these declare every point
from stoker.model.completion import CompletionStatus
from stoker.model.events import Delivered
from stoker.model.ids import ActionId
from stoker.model.outcome import OutcomeKind
from stoker.seams import faultpoints
from stoker.seams.faultpoints import POINTS
from support import runs_errands as errands
from support.runs import Rig, rig, tell
from support.runs_records import Records, Rollout, read

PROGRAM = """
import stoker

LINE = 'printf "%s\\\\n" "$STOKER_ACTION_KEY" >> "$1"; '


def met(place):
    # Returns as soon as a call runs that holds the other end of the pipe.
    with open(place):
        pass


@stoker.rollout(version="1", boxes=1, timeout="5m")
async def chores(ctx, task):
    log = task.data["log"]
    box = await ctx.environment(files={"a": "begun "})
    turn = await ctx.generate(ctx.chat("go"))
    written, large = await ctx.gather(
        box.run(["sh", "-c", "printf written >> a"]),
        ctx.call(["sh", "-c", LINE + "yes x | head -c 50000", "sh", log], effect="idempotent"),
    )
    sent = await ctx.call(["sh", "-c", LINE + "echo sent", "sh", log], effect="external")
    print("a call is withdrawn")
    place = task.data["meets"]
    long = ctx.call(["sh", "-c", 'exec 3> "$1"; exec sleep 60', "sh", place])
    late = await ctx.first(long, ctx.local(met, place))
    await ctx.sleep(0.01)
    read = await box.run(["cat", "a"])
    await ctx.local(len, "abc")
    whole = (written.ok, len(large.run.stdout.kept), sent.run.text, late, read.text)
    assert whole == (True, 50000, "sent", None, "begun written"), whole
    return len(turn.text) + ctx.random.random()
"""
TRIED = {
    n: tried
    for n, tried in faultpoints.TRIED.items()
    if not n.startswith(("gateway.", "trainer.", "box.state."))
}
"""A gateway's points lie on the way of another engine (test_ledger_gateway), a trainer's in the
process that embeds a run (test_run_trainer), those of states in test_box_states."""
COUNT = 3
WORKERS = ("worker.", "artifact.", "box.")
"""Points where a worker dies: an artifact of this size is a tool's output."""
ELSEWHERE = {
    ("ledger.close.before", "kill"): "test_an_owner_killed_while_it_closes_loses_nothing",
    ("ledger.commit.before", "disk_full"): (
        "test_b12_a_full_disk_rejects_the_group_and_the_owner_goes_on"
    ),
    **{
        (point, "disk_full"): "test_b12_a_full_disk_costs_a_result_or_a_file_and_the_worker_goes_on"
        for point in ("artifact.write", "artifact.rename.before", "box.write", "worker.file.write")
    },
    ("coordinator.record.write", "disk_full"): "test_b12_a_run_that_cannot_be_written_down",
    ("coordinator.file.write", "disk_full"): "test_b12_a_run_that_cannot_be_written_down",
    ("export.sync", "disk_full"): "test_b12_a_full_disk_leaves_an_export_as_it_was",
    ("backup.write", "disk_full"): "test_b12_a_full_disk_leaves_no_backup_and_no_restored_run",
    ("restore.write", "disk_full"): "test_b12_a_full_disk_leaves_no_backup_and_no_restored_run",
    **{
        (point, how): "test_b12_maintenance_that_fails_leaves_the_ledger_as_it_was"
        for point in ("maintain.copy", "maintain.compact")
        for how in ("kill", "disk_full")
    },
    **{
        (f"coordinator.branch.{when}", "kill"): (
            "test_a_program_goes_on_several_times_and_each_time_once"
        )
        for when in ("before", "after")
    },
    ("root.unpacked", "kill"): "test_a_root_whose_maker_was_killed_is_made_by_the_next",
    ("checkpoint.fetched", "kill"): (
        "test_what_a_killed_worker_fetched_has_no_name_and_goes_with_the_next"
    ),
}
"""What no whole run tries, since it ends otherwise there, and the test that does."""
SETTINGS = {
    "workers": {"classes": {"fast": {"limits": {"output": 100_000}}}},
    "program": {"hosts": 1},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    with small_rig(tmp_path_factory.mktemp("reference")) as one:
        one.start()
        one.finish()
        records = read(one.run.path)
        ended = {rollout.outcome.kind for rollout in records.rollouts.values()}
        assert ended == {OutcomeKind.COMPLETED}, records
        yield records


def small_rig(folder: Path) -> AbstractContextManager[Rig]:
    log = folder / "tools.log"
    tasks = errands.tasks(COUNT, log)
    for number, task in enumerate(tasks):
        place = folder / f"meets-{number}"
        os.mkfifo(place)
        task["data"]["meets"] = str(place)
    return rig(
        folder, program=PROGRAM, model=errands.MODEL, tasks=tasks, settings=SETTINGS, log=log
    )


def in_one_run(action: str, *parties: str) -> list[str]:
    """Return the points of some parties at which an action is tried in a whole run."""
    tried = [name for name, actions in TRIED.items() if action in actions]
    return sorted(n for n in tried if n.startswith(parties) and (n, action) not in ELSEWHERE)


FAMILIES = {
    "the coordinator is killed": ("kill", ["coordinator."]),
    "the ledger is killed": ("kill", ["ledger."]),
    # A worker that ends too often soon after its start is given up: three runs.
    "workers are killed before they begin": (
        "kill",
        ["worker.file", "worker.swept", "worker.enrolled", "worker.leased", "worker.beat"],
    ),
    "workers are killed at work": ("kill", ["worker.started", "worker.executed", "box."]),
    "workers are killed as they tell": (
        "kill",
        ["worker.complete", "worker.released", "artifact."],
    ),
    # A death as one call is let go takes the others with it: each point has a run of its own.
    "a worker is killed as it has let go": ("kill", ["worker.release.after"]),
    "program hosts are killed": ("kill", ["host."]),
    "workers tear what they write": ("torn", ["worker.", "artifact.", "box."]),
    "writes are torn": ("torn", ["coordinator.", "ledger.", "host."]),
    "the disk is full for a moment": ("disk_full", [""]),
    "replies are lost": ("lost", [""]),
}


def test_every_point_is_tried_in_some_run() -> None:
    tried = {(p, how) for how, names in FAMILIES.values() for p in in_one_run(how, *names)}
    declared = {(name, how) for name, actions in TRIED.items() for how in actions}
    tell(f"{len(declared)} trials at {len(TRIED)} points, {len(ELSEWHERE)} of them on their own")
    assert tried | ELSEWHERE.keys() == declared
    floors = [Path(__file__).parent, Path(__file__).parents[1] / "unit"]
    written = "".join(file.read_text() for floor in floors for file in floor.glob("test_*.py"))
    assert all(f"def {test}(" in written for test in ELSEWHERE.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_point_once_in_one_run(family: str, tmp_path: Path, reference: Records) -> None:
    """One run meets its fate at every point of a family, once each, in the order it comes to."""
    action, parties = FAMILIES[family]
    points = in_one_run(action, *parties)
    with small_rig(tmp_path) as one:
        one.armed.mkdir()
        for point in points:
            (one.armed / point).touch()
        fault = ",".join(f"{point}={action}" for point in points)
        one.start(fault=fault)
        deaths = 0
        while (status := one.ended()) == -signal.SIGKILL:
            deaths += 1
            assert deaths <= len(points), "somebody else is killed"
            one.start(fault=fault)
        left = sorted(token.name for token in one.armed.iterdir())
        assert not left, f"never reached: {left}\n{one.said()}"
        assert status == 0, one.said()
        check(one, reference, workers_hurt=any(p.startswith(WORKERS) for p in points))
        told = [e for record in read(one.run.path).every for e in record.events]
        paused = any(isinstance(e, Delivered) and e.paused_seconds is not UNSET for e in told)
        # What a coordinator tears is written before its rollouts begin: nobody waited for it.
        waited = bool(deaths) and action == "kill"
        assert paused == waited, "what a rollout waits for a coordinator is not its own time"


@pytest.mark.parametrize(
    ("fault", "begins"),
    [
        ("coordinator.record.write=disk_full@1", False),
        ("coordinator.file.write=disk_full@1", False),
        ("coordinator.record.write=disk_full@2", False),
        ("coordinator.file.write=disk_full@2", True),
    ],
)
def test_b12_a_run_that_cannot_be_written_down(
    fault: str,
    begins: bool,  # noqa: FBT001 - by name
    tmp_path: Path,
    reference: Records,
) -> None:
    """Its tasks, settings and record: one sentence, and nothing is left. Its status: no matter."""
    with small_rig(tmp_path) as one:
        one.start(fault=fault)
        status = one.ended()
        assert not one.armed.exists(), f"never reached\n{one.said()}"
        if not begins:
            assert (status, one.has_said("nothing was started; free some space")) == (2, True)
            assert one.found() is None, "nothing of it is left"
            return
        assert status == 0, one.said()
        check(one, reference, workers_hurt=False)


@pytest.mark.slow
@pytest.mark.parametrize("point", in_one_run("kill", ""))
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
        check(one, reference, workers_hurt=point.startswith(WORKERS))


def check(one: Rig, reference: Records, *, workers_hurt: bool) -> None:
    """Compare a run that was hurt with one that was left alone."""
    assert one.report()["snapshot"]["boxes_leaked"] == 0
    records = read(one.run.path)
    counted = Counter(one.lines())
    assert set(records.rollouts) == set(reference.rollouts)
    for place, rollout in records.rollouts.items():
        expected = reference.rollouts[place]
        if ambiguous(rollout):
            assert rollout.outcome.kind is OutcomeKind.AMBIGUOUS
            assert workers_hurt, "nobody else's death makes an effect doubtful"
        else:
            assert rollout.outcome == expected.outcome
            assert delivered(rollout) == delivered(expected)
    again = {key: count for key, count in counted.items() if count > 1}
    assert not again or workers_hurt, again
    actions = records.actions
    assert all(count <= actions[ActionId(key)].deliveries for key, count in counted.items())


def ambiguous(rollout: Rollout) -> bool:
    return any(
        isinstance(event, Delivered) and event.status == CompletionStatus.AMBIGUOUS
        for event in rollout.events
    )


def delivered(rollout: Rollout) -> set[str]:
    return {event.path for event in rollout.events if isinstance(event, Delivered)}
