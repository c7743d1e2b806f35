"""``stoker ledger …`` as typed: on a living run, on a restored one, on dead letters."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import LedgerLimits
from stoker.broker.client import owner_pid
from stoker.broker.place import DATABASE
from stoker.coordinator import branch_requests, cancelling
from stoker.coordinator.branch_requests import BranchRequest
from stoker.coordinator.branching import Point
from stoker.coordinator.partition import WHOLE
from stoker.coordinator.record import RunDirectory, RunRecord
from stoker.coordinator.sharing import Part
from stoker.model.ids import RolloutId, RunId
from support.command import (
    SECONDS_MAX,
    STOKER,
    Answer,
    lay_out,
    run_arguments,
    skip_reason,
    stoker,
    wait_until_quiet,
)
from support.ledger import RUN, Harness, action, with_ledger
from support.ledger_golden import make

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

LARGE = 100_000
WAITING = f"""\
import os

import stoker


def large():
    return "x" * {LARGE}


def arrived(place):
    with open(place + "/arrived", "w") as pipe:
        pipe.write("x")


@stoker.rollout(version="1", timeout="10m")
async def waiting(ctx, task):
    place = task.data["place"]
    text = await ctx.local(large)
    await ctx.local(arrived, place)
    while not await ctx.local(os.path.exists, place + "/go"):
        await ctx.sleep("50ms")
    return float(len(text))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def document(answer: Answer, code: int = 0) -> Any:
    assert answer.code == code, answer
    return json.loads(answer.out)


@pytest.fixture
def living(place: Path) -> Iterator[Path]:
    """A run whose rollout waits, with an artifact in its journal."""
    (place / "program.py").write_text(WAITING)
    (place / "tasks.jsonl").write_text(json.dumps({"place": str(place)}) + "\n")
    os.mkfifo(place / "arrived")
    pipe = os.open(place / "arrived", os.O_RDWR | os.O_NONBLOCK)
    running = subprocess.Popen(
        [STOKER, *run_arguments()], cwd=place, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        ready, _, _ = select.select([pipe], [], [], SECONDS_MAX)
        assert ready, "the program was never reached"
        (run,) = (place / "runs").iterdir()
        yield run
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=SECONDS_MAX)
    finally:
        os.close(pipe)
        if running.poll() is None:
            running.kill()
            running.wait()
    wait_until_quiet(place)


def ask_for_others(run: RunDirectory) -> list[Path]:
    """Ask for an end and a branch of rollouts that the run does not have; return the requests."""
    other = RolloutId("rol_other")
    cancelling.ask(run, cancelling.CancelRequest(rollout_id=other, reason="enough"))
    point = Point(step=1, last=1)
    request = BranchRequest(parent=other, task_id="other", point=point, first=0, count=1)
    with branch_requests.asking(run):
        branch_requests.ask(run, request)
    found = [path for name in ("cancels", "branches") for path in (run.path / name).glob("*.json")]
    assert len(found) == 2
    return found


def test_a_living_run_is_checked_and_backed_up_and_its_backup_finishes(
    living: Path, place: Path
) -> None:
    owner = owner_pid(living / "ledger")
    checked = document(stoker(place, "ledger", "check", "--run", living.name, "--json"))
    assert (checked["rollouts"], checked["artifacts"], checked["problems"]) == (1, 1, [])
    assert checked["artifact_bytes"] > LARGE
    asked = ask_for_others(RunDirectory(living))
    wrote = document(stoker(place, "ledger", "backup", "b.tar", "--run", living.name, "--json"))
    assert (wrote["artifacts"], wrote["lineage"]) == (1, checked["lineage"])
    again = stoker(place, "ledger", "backup", "b.tar", "--run", living.name)
    assert (again.code, "exists" in again.err) == (2, True)
    assert owner_pid(living / "ledger") == owner, "its owner went on all the while"
    assert [path.name for path in living.glob(".*")] == [], "no copy is left behind"

    made = document(stoker(place, "ledger", "restore", "b.tar", "other/run", "--json"))
    assert made["copied_from"] == checked["lineage"] != made["lineage"]
    for request in asked:
        there = place / "other/run" / request.relative_to(living)
        assert there.read_bytes() == request.read_bytes(), "what was asked is asked of it as well"
    taken = stoker(place, "ledger", "restore", "b.tar", "other/run")
    assert (taken.code, "not empty" in taken.err) == (2, True)
    (place / "go").write_text("")
    report = document(stoker(place, *run_arguments("--resume", "other/run"), "--json"))
    assert report["snapshot"]["outcomes"] == {"completed": 1}
    assert report["snapshot"]["reward_mean"] == LARGE
    checked = document(stoker(place, "ledger", "check", "--run", "other/run", "--json"))
    assert (checked["finished"], checked["lineage"], checked["problems"]) == (
        1,
        made["lineage"],
        [],
    )
    said = stoker(place, "ledger", "compact", "--run", "other/run")
    assert (said.code, "before" in said.out) == (0, True)

    [artifact] = (place / "other/run/artifacts").glob("*/*")
    artifact.write_bytes(b"y" * artifact.stat().st_size)
    damaged = stoker(place, "ledger", "check", "--run", "other/run")
    assert damaged.code == 1
    assert "not match its digest" in damaged.out
    artifact.unlink()
    assert stoker(place, "ledger", "check", "--run", "other/run").code == 1


def test_what_is_no_backup_is_refused_and_nothing_is_kept(living: Path, place: Path) -> None:
    assert stoker(place, "ledger", "backup", "b.tar", "--run", living.name).code == 0
    sound = (place / "b.tar").read_bytes()
    at = sound.index(b"x" * 1000)
    cases = {
        "absent.tar": (None, "there is no backup"),
        "text.tar": (b"hello", "is no backup"),
        "cut.tar": (sound[: len(sound) // 2], ""),
        "turned.tar": (sound[:at] + b"y" + sound[at + 1 :], "damaged"),
    }
    for name, (content, said) in cases.items():
        if content is not None:
            (place / name).write_bytes(content)
        answer = stoker(place, "ledger", "restore", name, "made")
        assert (answer.code, said in answer.err, "nothing was" in answer.err) == (2, True, True)
        assert len(answer.err.splitlines()) == 1
        assert not (place / "made").exists()
    assert not list(place.glob(".made*"))


BUDGETED = f"""\
import os

import stoker


def large(name):
    return name + "x" * {LARGE}


@stoker.rollout(version="1", timeout="10m")
async def budgeted(ctx, task):
    await ctx.local(large, task.task_id)
    while not await ctx.local(os.path.exists, task.data["place"] + "/go"):
        await ctx.sleep("50ms")
    return 1.0
"""


def test_a_run_at_its_disk_budget_drains_and_goes_on_when_there_is_room(place: Path) -> None:
    (place / "program.py").write_text(BUDGETED)
    lines = [json.dumps({"task_id": name, "data": {"place": str(place)}}) for name in "abc"]
    (place / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    one = ["--set", "admission.mode=fixed", "--set", "admission.active_max=1"]
    budget = ["--set", f"storage.artifacts_max={LARGE // 2}"]
    running = subprocess.Popen(
        [STOKER, *run_arguments(*one, *budget, "--json")], cwd=place, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS_MAX
        held = ""
        while not held and time.monotonic() < deadline:
            for status in (place / "runs").glob("*/status.json"):
                held = json.loads(status.read_bytes())["held"]
            time.sleep(0.05)
        assert "stoker runs prune" in held
        (place / "go").write_text("")
        out, _ = running.communicate(timeout=SECONDS_MAX)
    finally:
        if running.poll() is None:
            running.kill()
            running.communicate()
    report = json.loads(out)
    assert (running.returncode, report["resumable"]) == (3, True)
    assert report["snapshot"]["outcomes"] == {"completed": 1}, "what was active kept its result"
    run = report["snapshot"]["run_id"]
    refused = stoker(place, *run_arguments("--resume", run, *one, *budget))
    assert (refused.code, "nothing was started" in refused.err) == (2, True)
    resumed = document(stoker(place, *run_arguments("--resume", run, *one), "--json"))
    assert resumed["snapshot"]["outcomes"] == {"completed": 3}

    stays = document(stoker(place, "runs", "prune", "--json"))
    assert [one["kept"] for one in stays] == ["it is not exported"]
    assert stoker(place, "export", run, "--out", "rows.jsonl").code == 0
    wait_until_quiet(place)
    [gone] = document(stoker(place, "runs", "prune", "--json"))
    assert (gone["run"], gone["kept"]) == (run, "")
    assert list((place / "runs").iterdir()) == []


def dead_run(place: Path) -> RunDirectory:
    """A run whose ledger holds a dead letter that waits and one that was applied."""
    run = recorded_run(place)
    make(run.ledger)
    return run


def recorded_run(place: Path) -> RunDirectory:
    """A run without a ledger."""
    run = RunDirectory(place / "runs" / RUN)
    run.create()
    run.write_record(
        RunRecord(
            run_id=RunId(RUN), stoker_version="0", created=0.0, program="p.py", program_name="p",
            program_version="1", program_digest="", model="", model_digest="", tasks_digest="",
            tasks_count=0, settings={}, settings_digest="",
        )
    )  # fmt: skip
    return run


def test_dead_letters_are_listed_shown_requeued_and_dropped(place: Path) -> None:
    run = dead_run(place)
    where = ("--run", RUN)
    listed = document(stoker(place, "ledger", "dead", "list", *where, "--json"))
    assert {one["action"]["action_id"]: one["state"] for one in listed} == {
        "act_0007": "completed",
        "act_0009": "acknowledged",
    }
    assert all(one["action"]["priority"] == 0 for one in listed), "fields at rest are told too"
    told = stoker(place, "ledger", "dead", "list", *where).out.splitlines()
    assert told[0] == "act_0007  waiting, 1 attempt  call (contained) of class fast, rollout rol_1"
    assert told[1].startswith("  delivery 1, attempt 1, worker wrk_")
    assert "commits since its owner started" in stoker(place, "ledger", "stats", *where).out
    shown = stoker(place, "ledger", "dead", "show", "act_0007", *where)
    assert (shown.code, "waiting: " in shown.out) == (0, True)
    assert shown.out.count("delivery 1, attempt 1") == 1, "each cause once"
    unknown = stoker(place, "ledger", "dead", "show", "act_0001", *where)
    assert (unknown.code, "it has 2 dead letters" in unknown.err) == (2, True)

    with Part(run, WHOLE).owned():
        lives = stoker(place, "ledger", "dead", "requeue", "act_0007", *where)
    assert (lives.code, "stop the run" in lives.err) == (2, True)
    both = ("act_0007", "act_0009", "--reason", "more memory")
    done = document(stoker(place, "ledger", "dead", "requeue", *both, *where, "--json"), code=1)
    assert done["done"] == ["act_0007"]
    assert "never changes" in done["refused"]["act_0009"]
    assert "not requeued" in stoker(place, "ledger", "dead", "requeue", "act_0007", *where).err
    dropped = stoker(place, "ledger", "dead", "drop", "act_0009", *where)
    assert (dropped.code, dropped.out) == (0, "dropped act_0009\n")
    assert document(stoker(place, "ledger", "dead", "list", *where, "--json")) == []
    shown = stoker(place, "ledger", "dead", "show", "act_0007", *where)
    assert "more memory" in shown.out
    wait_until_quiet(place)


def compacted(place: Path, *more: str) -> Answer:
    return stoker(place, "ledger", "compact", "--run", RUN, *more)


def test_compacting_says_what_it_gave_back_and_why_it_may_not(place: Path) -> None:
    run = recorded_run(place)
    database = run.ledger / DATABASE

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n, bytes(8000)) for n in range(200)))
        last, *leases = await h.lease(slots=200)
        await h.complete(*leases)
        await h.acknowledge(*(lease.action.action_id for lease in leases))
        busy = await asyncio.to_thread(compacted, place)
        assert (busy.code, "in workers' hands (actions: 1)" in busy.err) == (1, True), busy
        assert len(busy.err.splitlines()) == 1, "refused in one sentence"
        await h.complete(last)
        done = document(await asyncio.to_thread(compacted, place, "--json"))
        assert done["bytes_after"] < done["bytes_before"] / 3
        assert database.stat().st_size == done["bytes_after"]
        assert list(await h.completed()) == [last.action.action_id], "its owner goes on"

    with_ledger("owner", run.ledger, scenario, LedgerLimits(lease_seconds=300.0))
    wait_until_quiet(place)
    again = compacted(place)  # it starts an owner, which ends by itself
    assert (again.code, again.err) == (0, "")
    assert re.fullmatch(r"[0-9.]+ KiB before, [0-9.]+ KiB after\n", again.out)
    wait_until_quiet(place)

    for file in run.ledger.iterdir():
        file.unlink()
    gone = compacted(place)
    assert (gone.code, "there is no ledger in" in gone.err) == (2, True)
    assert len(gone.err.splitlines()) == 1
    assert list(run.ledger.iterdir()) == [], "no empty one is made in its place"
    unknown = stoker(place, "ledger", "compact", "--run", "run_unknown")
    assert (unknown.code, "no run 'run_unknown'" in unknown.err) == (2, True)
