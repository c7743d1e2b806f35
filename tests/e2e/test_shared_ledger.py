"""Several runs on one ledger, as typed: one worker serves both, each ends whole, nobody is left."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.client import owner_pid
from support.command import (
    SECONDS_MAX,
    STOKER,
    lay_out,
    processes_about,
    skip_reason,
    stoker,
    wait_until_quiet,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import os

import stoker


def arrived(place):
    with open(place + "/arrived", "w") as pipe:
        pipe.write("x")


@stoker.tool(effect="pure")
def add(a, b):
    return a + b


@stoker.rollout(version="1", timeout="10m")
async def waits(ctx, task):
    before = await ctx.call(add, a=1, b=2)
    await ctx.local(arrived, task.data["place"])
    while not await ctx.local(os.path.exists, task.data["place"] + "/go"):
        await ctx.sleep("50ms")
    after = await ctx.call(add, a=before.value, b=2)
    return float(after.value)


@stoker.rollout(version="1", timeout="10m")
async def calls(ctx, task):
    seen = await ctx.call(add, a=20, b=2)
    return float(seen.value)
"""
TRUSTED = "workers.classes.fast={isolation='process', trust='trusted', slots=1}"


def arguments(name: str, *more: str) -> list[str]:
    return [
        "run", f"program.py:{name}", "--tasks", "tasks.jsonl", "--model", "scripted:model.jsonl",
        "--ledger", "pool", "--set", TRUSTED, "--json", *more,
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    lay_out(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"place": str(tmp_path)}) + "\n")
    yield tmp_path
    wait_until_quiet(tmp_path)


def report(answer: Any) -> Any:
    assert answer.code == 0, answer
    return json.loads(answer.out)["snapshot"]


def test_two_runs_share_a_ledger_and_its_workers(place: Path) -> None:
    os.mkfifo(place / "arrived")
    pipe = os.open(place / "arrived", os.O_RDWR | os.O_NONBLOCK)
    first = subprocess.Popen(
        [STOKER, *arguments("waits")], cwd=place, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert select.select([pipe], [], [], SECONDS_MAX)[0], "the first run never got its worker"
        owner = owner_pid(place / "pool" / "ledger")
        refused = stoker(place, *arguments("calls", "--set", "workers.call_class=fast", "--set",
                                           TRUSTED.replace("slots=1", "slots=3")))  # fmt: skip
        assert (refused.code, "workers.classes.fast.slots" in refused.err) == (2, True)
        second = report(stoker(place, *arguments("calls")))
        assert second["outcomes"] == {"completed": 1}
        assert second["reward_mean"] == 22.0
        assert owner_pid(place / "pool" / "ledger") == owner, "the second run ended nothing"
        (place / "go").write_text("")
        out, err = first.communicate(timeout=SECONDS_MAX)
    finally:
        os.close(pipe)
        if first.poll() is None:
            first.kill()
            first.communicate()
    ended = json.loads(out)["snapshot"]
    assert (first.returncode, ended["outcomes"], ended["reward_mean"]) == (0, {"completed": 1}, 5.0)
    assert ended["faults"] == {}, err
    assert [home.name for home in (place / "pool" / "workers").iterdir() if home.is_dir()] == ["w0"]
    assert processes_about(place) == {}, "the last run ended worker and owner"
    for run in (ended["run_id"], second["run_id"]):
        checked = json.loads(stoker(place, "ledger", "check", "--run", run, "--json").out)
        assert (checked["rollouts"], checked["finished"], checked["problems"]) == (1, 1, [])
        assert checked["actions"] == 3, "rows of both runs lie in one ledger"
    wait_until_quiet(place)
    other = stoker(place, *arguments("calls", "--resume", ended["run_id"], "--ledger", "other"))
    assert (other.code, "shares" in other.err, "nothing was changed" in other.err) == (
        2,
        True,
        True,
    )
