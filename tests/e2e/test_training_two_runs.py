"""Two runs with a trainer each, on one model server, one ledger and one pool of workers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.coordinator.request import RunRequest
from stoker.inference.policy import FunctionPolicy
from stoker.model.ids import RunId
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from stoker.training.groups import Group
from support.command import SECONDS_MAX, processes_about, wait_until_quiet
from support.command import stoker as command

PROGRAM = """\
import stoker


@stoker.tool(effect="pure")
def add(a, b):
    return a + b


@stoker.rollout(version="1", timeout="5m")
async def adds(ctx, task):
    chat = ctx.chat("go")
    total = 0
    for _ in range(2):
        await ctx.generate(chat)
        total = (await ctx.call(add, a=total, b=task.data["b"])).value
        chat.user("on")
    return float(total)
"""
TASKS = 3
POOL = "workers.classes.fast={isolation='process', trust='trusted', slots=2}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    wait_until_quiet(tmp_path)


def request(place: Path, url: str, name: str, b: int) -> RunRequest:
    tasks = place / f"{name}.jsonl"
    lines = [json.dumps({"task_id": f"{name}{i}", "data": {"b": b}}) for i in range(TASKS)]
    tasks.write_text("\n".join(lines) + "\n")
    settings = stoker.load_settings(
        sets=[f"ledger.directory={json.dumps(str(place / 'pool'))}", POOL, "run.group_size=2",
              "program.hosts=1", "program.check_replays=0", "model.scrape=0.1"]
    ).settings  # fmt: skip
    return stoker.RunRequest(
        program=place / "program.py", program_name=None, tasks=tasks, model=url,
        settings=settings, runs_directory=place / "runs", run_id=RunId(name),
    )  # fmt: skip


async def train(asked: RunRequest, after_first: object, *, publishes: bool) -> list[Group]:
    """Take and commit every group; tell of a policy after the first one."""
    found: list[Group] = []
    async with stoker.start_run(asked) as run:
        async for group in run.groups():
            found.append(group)
            await run.commit(group)
            if len(found) == 1:
                weights = after_first if publishes else None
                await run.publish_policy(1, weights=weights)  # type: ignore[arg-type]
    assert run.report is not None
    assert run.report.snapshot.faults == {}
    return found


def test_two_trainers_share_a_server_and_a_pool_of_workers(place: Path) -> None:
    async def both() -> tuple[list[Group], list[Group]]:
        policy = FunctionPolicy("says", lambda _request: "ok")
        async with OpenAIServer(policy, features=Features(weight_spans=True)) as server:

            async def transfer() -> None:
                assert server.engine.paused, "for both runs"

            one = train(request(place, server.url, "one", 1), transfer, publishes=True)
            two = train(request(place, server.url, "two", 10), transfer, publishes=False)
            async with asyncio.timeout(SECONDS_MAX):
                return await asyncio.gather(one, two)

    one, two = asyncio.run(both())
    for name, groups, reward in (("one", one, 2.0), ("two", two, 20.0)):
        assert sorted(group.task.task_id for group in groups) == [
            f"{name}{i}" for i in range(TASKS)
        ]
        assert {one.reward for group in groups for one in group.rollouts} == {reward}
    homes = [home.name for home in (place / "pool" / "workers").iterdir() if home.is_dir()]
    assert homes == ["w0"], "one worker served both"
    assert processes_about(place) == {}, "the last run ended worker and owner"
    checked = json.loads(command(place, "ledger", "check", "--run", "one", "--json").out)
    assert (checked["finished"], checked["problems"]) == (2 * TASKS, [])
