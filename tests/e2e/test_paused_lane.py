"""CASES B19 whole: room for one result, the lane paused, every action finishing at once."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.model.events import Delivered
from support.command import wait_until_quiet
from support.postgres import drop_schema, fresh_schema, server
from support.runs_records import read
from support.training import Engine, Looks, model_of, request

ENGINES = ("sqlite", "postgres")
ROLLOUTS = 6
SECONDS = 60
PROGRAM = """
import stoker


@stoker.rollout(version="1", boxes=0, timeout="2m")
async def acts(ctx, task):
    chat = ctx.chat("go")
    await ctx.generate(chat)
    argv = ["sh", "-c", 'echo "$STOKER_ACTION_KEY" >> "$1"', "sh", task.data["log"]]
    seen = await ctx.call(argv, effect="external")
    chat.user("on")
    await ctx.generate(chat)
    return 1.0 if seen.run.ok else 0.0
"""
SETTINGS = (
    "ledger.results_max=1",
    "admission.mode=fixed",
    f"admission.active_max={ROLLOUTS}",
    "workers.count=1",
    "workers.classes.fast.isolation=process",
    "workers.classes.fast.trust=trusted",
    f"workers.classes.fast.slots={ROLLOUTS}",
    "sandbox.accept_shared_kernel=true",
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    line = '{{"task_id": "t{}", "data": {{"log": "{}"}}}}\n'
    tasks = (line.format(number, tmp_path / "tools.log") for number in range(ROLLOUTS))
    (tmp_path / "tasks.jsonl").write_text("".join(tasks))
    yield tmp_path
    wait_until_quiet(tmp_path)


@pytest.fixture
def ledger(engine: str) -> Iterator[list[str]]:
    """Settings of where the ledger lies."""
    if engine == "sqlite":
        yield []
        return
    schema = fresh_schema()
    yield [f"ledger.url={server('on').url().reveal()}", f"ledger.db_schema={schema}"]
    drop_schema(server("on"), schema)


def test_b19_results_are_applied_one_by_one_while_the_lane_is_paused(
    engine: str, place: Path, ledger: list[str]
) -> None:
    looks, model = Looks(), Engine(gated=True)

    async def applied_meanwhile() -> None:
        """A weight update that lasts until each rollout has its result and wants to go on."""
        for call in list(model.gates):
            model.gates[call].set()
        paused = await looks.until(lambda one: one.lane.ready == ROLLOUTS)
        assert paused.lane.paused
        assert len(model.asked) == ROLLOUTS, "no second call was issued"

    async def trainer() -> Path:
        asked = request(place, *SETTINGS, *ledger)
        async with stoker.start_run(asked, model=model_of(model), observer=looks) as run:
            await model.until(ROLLOUTS)
            async with asyncio.timeout(SECONDS):
                await run.publish_policy(1, weights=applied_meanwhile)
            for call in await model.until(ROLLOUTS):
                model.gates[call].set()
            async with asyncio.timeout(SECONDS):
                rewards = [one.reward async for group in run.groups() for one in group.rollouts]
            assert rewards == [1.0] * ROLLOUTS
        return Path(looks.all[-1].run_directory)

    records = read(asyncio.run(trainer()))
    assert bool(list(place.rglob("ledger.db"))) == (engine == "sqlite")
    caps = [one.caps for one in looks.all if one.caps is not None]
    assert {one.results_max for one in caps} == {1}
    assert max(one.unacknowledged for one in caps) <= 1
    ran = (place / "tools.log").read_text().splitlines()
    assert len(set(ran)) == len(ran) == ROLLOUTS, "each ran once"
    for rollout in records.rollouts.values():
        given = Counter(event.path for event in rollout.events if isinstance(event, Delivered))
        assert set(given.values()) == {1}, "and was applied once"
