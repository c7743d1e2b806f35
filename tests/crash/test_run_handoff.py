"""The hand-off through the whole system: owners of runs, late results, poison, interruptions."""

import asyncio
import signal
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import Attach, StatsReply
from stoker.broker.client import connect
from stoker.errors import DeadLetter, LedgerFenced
from stoker.model.events import Delivered
from stoker.model.ids import RunId
from stoker.model.outcome import OutcomeKind
from support import runs_errands as errands
from support.runs import LEASE, Rig, rig, send, until
from support.runs_gated import count, gate, gated, once_each
from support.runs_records import read

EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 3


def stats(one: Rig) -> StatsReply:
    """Ask the living owner."""

    async def asked() -> StatsReply:
        client = await connect(one.run.ledger, role="reader", spawn=False)
        try:
            return await client.stats()
        finally:
            await client.close()

    return asyncio.run(asked())


def test_b5_workers_finish_while_no_coordinator_lives(tmp_path: Path) -> None:
    rollouts = 4
    with gated(tmp_path, rollouts) as one:
        one.start()
        one.until_lines(rollouts)
        one.signal("coordinator", signal.SIGKILL)
        one.ended()
        gate(one)
        until(lambda: len(one.lines()) == 2 * rollouts, "tools to end without a coordinator")
        until(lambda: stats(one).unacknowledged == rollouts, "results that wait")
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": rollouts}
        records = read(one.run.path)
        once_each(one, records)
        assert {view.attempts for view in records.actions.values()} == {1}


def test_b7_second_coordinator_of_an_owned_run_is_refused(tmp_path: Path) -> None:
    with gated(tmp_path, 2) as one:
        first = one.start()
        one.until_lines(2)
        second = one.spawn()
        assert one.ended(second) == EXIT_BAD_INPUT
        refusal = (tmp_path / "coordinator-2.err").read_text()
        assert f"owned by living process {first.pid}" in refusal, refusal
        assert first.poll() is None, "the first one is not touched"
        gate(one)
        assert one.ended(first) == 0, one.said()
        once_each(one, read(one.run.path))


def test_b7_newer_coordinator_fences_the_older_one(tmp_path: Path) -> None:
    """Two coordinators that both believe the run is theirs, as after a lost lock."""
    with gated(tmp_path, 2) as one:
        one.start()
        one.until_lines(2)

        async def take() -> None:
            client = await connect(one.run.ledger, role="coordinator", spawn=False)
            try:
                await client.attach(Attach(run_id=RunId(one.run.path.name), incarnation="crd_new"))
            finally:
                await client.close()

        before = journal_lengths(one)
        asyncio.run(take())
        gate(one)
        assert one.ended() == 1, one.said()
        assert LedgerFenced.code in (tmp_path / "coordinator-1.err").read_text()
        assert journal_lengths(one) == before, "a stale append changes nothing"
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 2}
        once_each(one, read(one.run.path))


def journal_lengths(one: Rig) -> dict[tuple[str, int], int]:
    rollouts = read(one.run.path).rollouts
    return {place: len(rollout.events) for place, rollout in rollouts.items()}


SHORT = """
import stoker


@stoker.rollout(version="1", boxes=1, timeout="2s")
async def short(ctx, task):
    if task.data.get("opens"):
        await ctx.environment()
    else:
        line = 'printf "%s begun\\\\n" "$STOKER_ACTION_KEY" >> "$1"; exec sleep "$2"'
        argv = ["sh", "-c", line, "sh", task.data["log"], task.data["seconds"]]
        await ctx.call(argv, effect="idempotent", timeout="5m")
    return 1.0
"""


def short(
    folder: Path, datas: list[dict[str, Any]], slots: int, lease: float = LEASE
) -> AbstractContextManager[Rig]:
    log = str(folder / "tools.log")
    tasks = [{"task_id": f"t{n}", "data": {"log": log, **data}} for n, data in enumerate(datas)]
    settings = {
        "ledger": {"lease": lease},
        "workers": {"classes": {"fast": {"slots": slots}}},
        "admission": {"mode": "fixed", "active_max": 2},
    }
    return rig(folder, program=SHORT, model=errands.MODEL, tasks=tasks, settings=settings)


def test_b8_timed_out_rollouts_give_back_what_ran_and_what_was_queued(tmp_path: Path) -> None:
    """One slot: the first call runs, the second is queued; those after them need the slot."""
    held: list[dict[str, Any]] = [{"seconds": "600"}] * 2
    with short(tmp_path, [*held, *([{"seconds": "0"}] * 6)], 1) as one:
        one.start()
        one.finish()
        records = read(one.run.path)
        running = [records.rollouts[f"t{n}", 0] for n in (0, 1)]
        assert {rollout.outcome.kind for rollout in running} == {OutcomeKind.TRUNCATED}
        assert records.outcomes["completed"] > 0, "the slot came back"
        begun = {line.split()[0] for line in one.lines()}
        assert len(begun & {key for rollout in running for key in rollout.actions}) == 1, begun


def stop_worker_at_its_report(one: Rig) -> int:
    """Start a run whose worker stops (SIGSTOP) with a finished result in its hands."""
    one.start(fault="worker.complete.before=stop")
    until(lambda: not one.armed.exists(), f"the worker at its report\n{one.said()}")
    pid = one.pid("worker")
    assert pid is not None
    return pid


def outcomes(one: Rig) -> dict[str, int]:
    found: dict[str, int] = one.status()["outcomes"]
    return found


def test_b8_result_after_the_outcome_is_recorded_as_late(tmp_path: Path) -> None:
    with short(tmp_path, [{"seconds": "0"}] * 8, 2) as one:
        worker = stop_worker_at_its_report(one)
        until(lambda: outcomes(one).get("truncated", 0) > 0, "a rollout's timeout")
        send(worker, signal.SIGCONT)
        assert one.ended() == 0, one.said()
        records = read(one.run.path)
        assert records.stats.late_total >= 1
        assert records.outcomes["completed"] > 0, "the worker went on"


def test_b8_environment_opened_too_late_is_closed(tmp_path: Path) -> None:
    """Its rollout has ended when the box stands; another rollout keeps the run going."""
    datas: list[dict[str, Any]] = [{"opens": True}, *({"seconds": "600"} for _ in range(40))]
    with short(tmp_path, datas, 2, lease=30.0) as one:  # a lost lease would drop it as well
        worker = stop_worker_at_its_report(one)
        until(lambda: outcomes(one).get("truncated", 0) > 0, "a rollout's timeout")
        send(worker, signal.SIGCONT)
        until(lambda: len(one.lines()) >= 3, "the worker at work again")
        mark = written(one)
        until(
            lambda: one.ended_early() or (written(one) > mark and environments(one) == 0),
            f"no environment held\n{one.said()}",
        )
        assert not one.ended_early(), "it must be let go while the run goes on"


def written(one: Rig) -> int:
    return (one.run.workers / "w0" / "status.json").stat().st_mtime_ns


def environments(one: Rig) -> int:
    told = one.worker_status("w0")
    assert told["state"] == "working", "it must be let go while the run goes on"
    found: int = told["environments"]
    return found


POISONED = """
import stoker

POISON = '''
printf "poison %s\\\\n" "$STOKER_ATTEMPT" >> "$1"
p=$PPID
while [ "$p" -gt 1 ]; do
    if tr '\\\\0' ' ' < /proc/$p/cmdline | grep -q stoker.worker.main; then kill -9 $p; fi
    p=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$p/status)
done
sleep 600
'''


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def work(ctx, task):
    log = task.data["log"]
    if task.data.get("poison"):
        await ctx.call(["sh", "-c", POISON, "sh", log], effect="pure", timeout="5m")
        return 0.5
    line = 'printf "%s\\\\n" "$STOKER_ACTION_KEY" >> "$1"; sleep 0.1'
    for _ in range(2):
        await ctx.call(["sh", "-c", line, "sh", log], effect="idempotent")
    return 1.0
"""
ATTEMPTS = 3
INNOCENTS = 64


def test_b10_b18_poison_ends_as_a_dead_letter_and_innocents_lose_no_attempts(
    tmp_path: Path,
) -> None:
    log = str(tmp_path / "tools.log")
    tasks = [{"task_id": f"t{n}", "data": {"log": log}} for n in range(INNOCENTS)]
    tasks.insert(8, {"task_id": "poison", "data": {"log": log, "poison": True}})
    settings = {
        "workers": {"classes": {"fast": {"slots": 8, "attempts": ATTEMPTS}}},
        "admission": {"mode": "fixed", "active_max": 100},
    }
    with rig(
        tmp_path, program=POISONED, model=errands.MODEL, tasks=tasks, settings=settings
    ) as one:
        one.start()
        one.finish()
        records = read(one.run.path)
    poison = records.rollouts.pop(("poison", 0))
    assert poison.outcome.kind is OutcomeKind.FAILED
    assert poison.outcome.fault is not None
    assert poison.outcome.fault.code == DeadLetter.code
    (letter,) = records.dead
    assert letter.attempts == ATTEMPTS
    ends = [cause for cause in letter.causes if "released unstarted" not in cause]
    assert len(ends) >= ATTEMPTS, letter.causes
    for rollout in records.rollouts.values():
        assert rollout.outcome.kind is OutcomeKind.COMPLETED
        spent = [event.attempt for event in rollout.events if isinstance(event, Delivered)]
        assert set(spent) == {1}, (rollout.place, spent)


@pytest.mark.parametrize("signals", [1, 2])
def test_interrupted_runs_are_resumable(signals: int, tmp_path: Path) -> None:
    """First Ctrl-C drains: what is active finishes, nothing new begins. Second: stop."""
    settings = {"admission": {"mode": "fixed", "active_max": 4}}
    with gated(tmp_path, 8, settings) as one:
        coordinator = one.start()
        one.until_lines(4)
        for said in ("draining", "stopping")[:signals]:
            coordinator.send_signal(signal.SIGINT)
            until(partial(one.has_said, said), said)
        gate(one)
        assert one.ended() == EXIT_RESUMABLE, one.said()
        first = one.report()["snapshot"]
        assert first["state"] == "stopped"
        assert first["outcomes"].get("completed", 0) == (4 if signals == 1 else 0), first
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 8}
        once_each(one, read(one.run.path))


def test_b4_worker_and_coordinator_die_together(tmp_path: Path) -> None:
    with gated(tmp_path, 4) as one:
        one.start()
        one.until_lines(4)
        one.signal("worker", signal.SIGKILL)
        one.signal("coordinator", signal.SIGKILL)
        one.signal("owner", signal.SIGKILL)
        one.ended()
        gate(one)
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 4}
        assert count(one, "done") <= 8, "each unfinished call once more at most"
