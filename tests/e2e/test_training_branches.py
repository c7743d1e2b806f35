"""What a trainer sees of programs that branch themselves, and what holds their branches back."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.coordinator.flow import Flow
from stoker.model.generation import GenerateRequest, Generation
from stoker.model.outcome import Outcome, OutcomeKind
from support.command import wait_until_quiet
from support.training import Engine, lay_out, model_of, request

SECONDS = 60
PROGRAM = """
import stoker
from stoker.errors import VerbMisused


@stoker.rollout(version="1", timeout="2m")
async def tree(ctx, task):
    chat = ctx.chat("go")
    await ctx.generate(chat)
    try:
        which = await ctx.branch(3)
    except VerbMisused as error:
        assert "run.branches_max is 1" in error.message, error
        return -1.0
    chat.user("on")
    await ctx.generate(chat)
    return float(which)
"""
ONE_AT_A_TIME = ("admission.mode=fixed", "admission.active_max=1")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    lay_out(tmp_path, ["a"])
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    wait_until_quiet(tmp_path)


async def second_turn(engine: Engine) -> None:
    """Open the gate of the first call, and wait for the next."""
    engine.gates[(await engine.until(1))[0]].set()
    async with engine.news:
        await engine.news.wait_for(lambda: len(engine.gates) == 1 and len(engine.asked) == 2)


class Watching(Engine):
    """Notes how many rollouts are active when it is asked."""

    flow: Flow | None = None
    active: int = 0

    async def generate(self, asked: GenerateRequest) -> Generation:
        if self.flow is not None:
            self.active = max(self.active, len(self.flow.active))
        return await super().generate(asked)


async def whole(asked: stoker.RunRequest, engine: Watching) -> stoker.Group:
    """Run to the end; return the one group."""
    async with asyncio.timeout(SECONDS), stoker.start_run(asked, model=model_of(engine)) as run:
        engine.flow = run._serving.coordinator.flow
        (group,) = [group async for group in run.groups()]
        await run.commit(group)
    assert run.report is not None
    assert not run.report.resumable
    return group


def test_a_group_holds_what_its_programs_branched_off(place: Path) -> None:
    asked = request(place, "run.group_size=2", *ONE_AT_A_TIME)
    engine = Watching()
    group = asyncio.run(whole(asked, engine))
    assert engine.active == 1, "branches are admitted like everything else"
    assert [one.index for one in group.rollouts] == [0, 0, 0, 1, 1, 1]
    for begun in (group.rollouts[:3], group.rollouts[3:]):
        assert {one.sample for one in begun} == {begun[0].rollout_id}
        assert {one.reward for one in begun} == {0.0, 1.0, 2.0}
        assert begun[0].reward == 0.0, "whoever asked goes on as the first"
        assert [len(one.rows) for one in begun] == [2, 1, 1], "the shared call is the first one's"
        assert {one.rows[0].parent for one in begun[1:]} == {begun[0].rollout_id}


def test_more_branches_than_a_run_allows_are_an_error_in_the_program(place: Path) -> None:
    group = asyncio.run(whole(request(place, "run.branches_max=1"), Watching()))
    assert [one.reward for one in group.rollouts] == [-1.0]


def test_branches_that_wait_outlive_a_stop_and_end_with_the_run(place: Path) -> None:
    async def first() -> str:
        engine = Engine(gated=True)
        asked = request(place, *ONE_AT_A_TIME)
        async with asyncio.timeout(SECONDS), stoker.start_run(asked, model=model_of(engine)) as run:
            await second_turn(engine)
        assert run.report is not None
        assert (run.report.resumable, run.report.snapshot.rollouts_total) == (True, 3)
        return run.run_id

    async def then(run_id: str) -> None:
        engine = Engine(gated=True)
        asked = request(place, *ONE_AT_A_TIME, resume=run_id)
        async with asyncio.timeout(SECONDS), stoker.start_run(asked, model=model_of(engine)) as run:
            await engine.until(1)
            assert len(run._serving.coordinator.branches.waiting) == 2
            cut = Outcome(kind=OutcomeKind.CANCELLED, reason="enough")
            run._serving.coordinator.end_all(cut)
            (group,) = [group async for group in run.groups()]
            assert [one.outcome.reason for one in group.rollouts] == ["enough"] * 3
        assert run.report is not None
        assert not run.report.resumable

    asyncio.run(then(asyncio.run(first())))


async def branched(place: Path, run: stoker.Run, *arguments: str) -> dict[str, object]:
    """Have a rollout of a living run branched, as typed."""
    command = [sys.executable, "-m", "stoker.cli.main", "branch", run.run_id, *arguments, "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, "--runs", str(place / "runs"), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    answer: dict[str, object] = json.loads(said)
    return answer


def test_a_living_run_takes_branches_in_and_its_trainer_gets_their_group(place: Path) -> None:
    lay_out(place, ["a"], turns=2)
    engine = Engine(gated=True)

    async def trainer() -> None:
        asked = request(place)
        async with asyncio.timeout(SECONDS), stoker.start_run(asked, model=model_of(engine)) as run:
            await second_turn(engine)
            made = await branched(place, run, "a", "--at-step", "1", "--count", "2")
            assert made["coordinator_lives"]
            for request_id in await engine.until(3):  # the run takes them in
                engine.gates[request_id].set()
            groups = [group async for group in run.groups()]
            state = run.state()
            for group in groups:
                await run.commit(group)
            await run.restore(state)
            again = [group async for group in run.groups()]
        assert run.report is not None
        assert not run.report.resumable
        planned, ours = sorted(groups, key=lambda one: one.parent is not None)
        assert (len(planned.rollouts), planned.parent) == (1, None)
        assert ours.parent == planned.rollouts[0].rollout_id
        assert {one.rollout_id for one in ours.rollouts} == set(made["rollouts"])  # type: ignore[call-overload]
        assert [one.sample for one in ours.rollouts] == [one.rollout_id for one in ours.rollouts]
        assert [sum(row.mask) for one in ours.rollouts for row in one.rows] == [2, 2]
        assert {one.group_id for one in again} == {planned.group_id, ours.group_id}

    asyncio.run(trainer())


def test_branches_are_taken_in_while_a_trainer_that_has_every_group_stays(place: Path) -> None:
    lay_out(place, ["a"], turns=2)
    engine = Engine(gated=True)

    async def trainer() -> None:
        asked = request(place)
        async with asyncio.timeout(SECONDS), stoker.start_run(asked, model=model_of(engine)) as run:
            await second_turn(engine)
            engine.gates[(await engine.until(1))[0]].set()
            (planned,) = [group async for group in run.groups()]
            await run.commit(planned)
            made = await branched(place, run, "a", "--at-step", "1")
            engine.gates[(await engine.until(1))[0]].set()
            (ours,) = [group async for group in run.groups()]
            assert [one.rollout_id for one in ours.rollouts] == made["rollouts"]
            assert ours.parent == planned.rollouts[0].rollout_id
            await run.commit(ours)
        assert run.report is not None
        assert not run.report.resumable

    asyncio.run(trainer())
