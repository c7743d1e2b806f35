"""A divided run as real processes: one coordinator for each partition, some of them hurt."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from stoker.broker.base import Attach
from stoker.broker.client import connect
from stoker.config.tasks import read_tasks
from stoker.coordinator.partition import Partition
from stoker.errors import LedgerFenced
from stoker.model.events import Delivered, Reissued
from stoker.model.ids import RunId
from support import runs_errands as errands
from support.runs import Rig, lock_holder, rig, tell, until, wait_gone
from support.runs_records import Records, read

RUN = RunId("run_parts")
COUNT = 5
EXIT_BAD_INPUT = 2

PROGRAM = """
import stoker

WRITE = 'printf "%s %s\\\\n" "$STOKER_ACTION_KEY" "$2" >> "$1"; '
WAIT = 'until [ -e "$3" ]; do sleep 0.02; done; printf "%s done\\\\n" "$STOKER_ACTION_KEY" >> "$1"'


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def gated(ctx, task):
    chat = ctx.chat("go")
    await ctx.generate(chat)
    for script, say in ((WRITE, "first"), (WRITE + WAIT, "begun"), (WRITE, "last")):
        argv = ["sh", "-c", script, "sh", task.data["log"], say, task.data["gate"]]
        seen = await ctx.call(argv, effect="idempotent", timeout="5m")
        chat.user(say)
        await ctx.generate(chat)
    return 1.0 if seen.run.ok else 0.0
"""


@contextmanager
def divided(folder: Path) -> Iterator[tuple[Rig, list[Popen[bytes]]]]:
    """Give two coordinators of one run, started at once, when all their rollouts wait at a gate."""
    data = {"log": str(folder / "tools.log"), "gate": str(folder / "gate")}
    tasks = [{"task_id": f"t{number}", "data": data} for number in range(COUNT)]
    slots = {"workers": {"classes": {"fast": {"slots": COUNT}}}}
    with rig(folder, program=PROGRAM, model=errands.MODEL, tasks=tasks, settings=slots) as one:
        both = [part(one, index) for index in (0, 1)]
        until(
            lambda: at_gate(one) == COUNT or any(process.poll() is not None for process in both),
            f"every rollout at the gate\n{one.said()}",
        )
        assert at_gate(one) == COUNT, one.said()
        yield one, both


def at_gate(one: Rig) -> int:
    return sum(line.endswith("begun") for line in one.lines())


def part(one: Rig, index: int) -> Popen[bytes]:
    """Start the coordinator of one partition: the same command begins, joins and resumes."""
    return one.spawn("--run-id", RUN, "--partition", f"{index}/2")


def hand(one: Rig, index: int) -> set[str]:
    """Return the tasks of one partition."""
    tasks = read_tasks(one.tasks, None)
    return {task.task_id for task in Partition(index, 2).hand(RUN, tasks)}


def kill(process: Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def nothing_twice(one: Rig, records: Records) -> None:
    """Every tool ran once, every result was delivered once, every model call was asked once."""
    assert Counter(one.lines()).most_common(1)[0][1] == 1, one.lines()
    assert len(one.lines()) == 4 * COUNT
    asked = Counter(line.split()[0] for line in (one.folder / "model.log").read_text().splitlines())
    assert set(asked.values()) == {1}, asked
    assert len(asked) == 4 * COUNT
    assert {place[0] for place in records.rollouts} == {f"t{number}" for number in range(COUNT)}
    for rollout in records.every:
        assert not any(isinstance(event, Reissued) for event in rollout.events)
        paths = Counter(event.path for event in rollout.events if isinstance(event, Delivered))
        assert set(paths.values()) == {1}, rollout.place
    assert records.outcomes == {"completed": COUNT}


def test_a_killed_coordinator_disturbs_no_other_and_resumes_its_own_part(tmp_path: Path) -> None:
    with divided(tmp_path) as (one, (stays, dies)):
        kill(dies)
        one.open_gate()
        assert one.ended(stays) == 0, one.said()
        ended = one.report(1)["snapshot"]
        assert (ended["partition"], ended["state"]) == ("0/2", "finished")
        assert ended["outcomes"] == {"completed": len(hand(one, 0))}
        assert one.ended(part(one, 1)) == 0, one.said()
        resumed = one.report()["snapshot"]
        assert (resumed["partition"], resumed["outcomes"]) == (
            "1/2",
            {"completed": len(hand(one, 1))},
        )
        nothing_twice(one, read(one.run.path))


def test_who_keeps_the_workers_may_die_with_them(tmp_path: Path) -> None:
    with divided(tmp_path) as (one, both):
        lock = one.run.workers / "keeper.lock"
        keeper = lock_holder(lock)
        assert keeper in {process.pid for process in both}
        dies, stays = sorted(both, key=lambda process: process.pid != keeper)
        worker = one.signal("worker", signal.SIGKILL)
        kill(dies)
        assert wait_gone(worker)
        until(lambda: lock_holder(lock) == stays.pid, f"another keeper\n{one.said()}")
        one.open_gate()
        assert one.ended(stays) == 0, one.said()
        assert one.ended(part(one, both.index(dies))) == 0, one.said()
        records = read(one.run.path)
        assert records.outcomes == {"completed": COUNT}
        lines = Counter(line for line in one.lines() if not line.endswith("begun"))
        assert set(lines.values()) == {1}, "what had finished was not run again"


def test_b7_a_second_coordinator_of_a_partition_is_refused_and_a_newer_one_fences(
    tmp_path: Path,
) -> None:
    with divided(tmp_path) as (one, (other, owner)):
        assert one.ended(part(one, 1)) == EXIT_BAD_INPUT
        refusal = (tmp_path / "coordinator-3.err").read_text()
        assert "partition 1/2 of the run in" in refusal
        assert f"owned by living process {owner.pid}" in refusal
        before = lengths(one, 1)
        asyncio.run(take(one))
        one.open_gate()
        assert one.ended(owner) == 1, one.said()
        assert LedgerFenced.code in (tmp_path / "coordinator-2.err").read_text()
        assert one.ended(other) == 0, one.said()
        assert lengths(one, 1) == before, "a stale append changes nothing"
        assert one.ended(part(one, 1)) == 0, one.said()
        nothing_twice(one, read(one.run.path))


async def take(one: Rig) -> None:
    """Attach to partition 1, as a coordinator would that has lost sight of the lock."""
    client = await connect(one.run.ledger, role="coordinator", spawn=False)
    try:
        await client.attach(Attach(run_id=RUN, partition="1", incarnation="crd_new"))
    finally:
        await client.close()
    tell("partition 1 is taken")


def lengths(one: Rig, index: int) -> dict[str, int]:
    mine = hand(one, index)
    rollouts = read(one.run.path).every
    return {one.task.task_id: len(one.events) for one in rollouts if one.task.task_id in mine}


def test_branches_go_to_the_partition_of_their_parent_living_or_dead(tmp_path: Path) -> None:
    with divided(tmp_path) as (one, (stays, dies)):
        kill(dies)
        made = []
        for index in (0, 1):
            name = min(hand(one, index))
            asked = one.stoker("branch", RUN, name, "--at-step", "1", "--count", "2", "--json")
            assert asked.returncode == 0, asked.stderr
            made.append(json.loads(asked.stdout))
        assert [answer["coordinator_lives"] for answer in made] == [True, False]
        one.open_gate()
        assert one.ended(stays) == 0, one.said()
        assert one.report(1)["snapshot"]["outcomes"] == {"completed": len(hand(one, 0)) + 2}
        assert one.ended(part(one, 1)) == 0, one.said()
        every = {record.rollout_id: record.outcome for record in read(one.run.path).every}
        assert every.keys() >= {name for answer in made for name in answer["rollouts"]}
        assert len(every) == COUNT + 4
        assert {outcome.reward for outcome in every.values()} == {1.0}
