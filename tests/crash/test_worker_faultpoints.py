"""Every declared fault point of the worker: killed there with SIGKILL, then started again."""

import asyncio
from pathlib import Path

import pytest

import stoker.worker.main  # noqa: F401 - declares every point
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus, EnvironmentState
from stoker.model.faults import FaultSide
from stoker.seams.faultpoints import TRIED
from support.worker_process import Run

BEFORE_START = (
    "worker.file.write",
    "worker.swept",
    "worker.enrolled",
    "worker.beat.before",
    "worker.leased",
    "worker.started.before",
)
"""Nothing has begun: the action is requeued, its attempt unspent."""
BEFORE_EFFECT = ("worker.started.after",)
AFTER_EFFECT = ("worker.executed", "worker.complete.before")
AFTER_REPLY = ("worker.complete.after",)
ELSEWHERE = ("worker.released", "worker.release.after")
"""Reached by giving leases back: a test of their own below."""


def test_every_declared_point_is_killed_somewhere() -> None:
    declared = {n for n, tried in TRIED.items() if n.startswith("worker.") and "kill" in tried}
    assert declared == {*BEFORE_START, *BEFORE_EFFECT, *AFTER_EFFECT, *AFTER_REPLY, *ELSEWHERE}


async def killed_at(run: Run, point: str, nth: int = 1) -> None:
    """Start a worker that dies at ``point``."""
    await run.ended(run.start(fault=f"{point}=kill@{nth}"))


@pytest.mark.parametrize("point", BEFORE_START)
def test_b1_killed_before_started_requeues_at_no_cost(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            actions = [
                run.append("i", effect=Effect.IDEMPOTENT),
                run.append("e", effect=Effect.EXTERNAL),
            ]
            await run.submit(*actions)
            await killed_at(run, point)
            await run.working(run.start())  # it has swept by then
            for action in actions:
                done = await run.completion(action)
                assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
                assert run.count(action) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("point", [*BEFORE_EFFECT, *AFTER_EFFECT])
@pytest.mark.parametrize(
    "effect",
    [pytest.param(Effect.PURE, marks=pytest.mark.slow), Effect.IDEMPOTENT, Effect.EXTERNAL],
)
def test_b1_killed_after_started_goes_by_effect(tmp_path: Path, point: str, effect: Effect) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            action = run.append(effect=effect)
            await run.submit(action)
            await killed_at(run, point)
            happened = 1 if point in AFTER_EFFECT else 0
            assert run.count(action) == happened
            await run.working(run.start())  # it has swept by then
            done = await run.completion(action)
            if effect is Effect.EXTERNAL:
                assert done.status is CompletionStatus.AMBIGUOUS
                assert done.external_effect_possible
                assert run.count(action) == happened, "I12: at most once at the tool"
            else:
                assert (done.status, done.attempt) == (CompletionStatus.OK, 2)
                assert run.count(action) == happened + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("point", AFTER_REPLY)
def test_b1_killed_after_the_reply_changes_nothing(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            action = run.append(effect=Effect.EXTERNAL)
            await run.submit(action)
            await killed_at(run, point)
            await run.working(run.start())  # it has swept by then
            done = await run.completion(action)
            assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
            after = run.append("after", effect=Effect.EXTERNAL)
            await run.submit(after)
            assert (await run.completion(after)).status is CompletionStatus.OK
            assert (run.count(action), run.count(after)) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("point", ["worker.leased", *BEFORE_EFFECT, *AFTER_EFFECT])
def test_b1_an_environment_goes_with_its_worker(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            process = run.start(fault=f"{point}=kill@2")
            opening = run.opening()
            await run.submit(opening)
            holder = (await run.completion(opening)).worker_id
            assert holder is not None
            step = run.running(holder, "sh", "-c", "echo x >> given", path="step")
            await run.submit(step)
            await run.ended(process)
            await run.working(run.start())  # it has swept by then
            done = await run.completion(step)
            assert done.status is CompletionStatus.ERROR
            assert done.environment is EnvironmentState.LOST
            assert done.fault is not None
            assert done.fault.code == "environment_lost"

    asyncio.run(scenario())


@pytest.mark.parametrize("point", ELSEWHERE)
def test_b8_killed_while_giving_back_a_cancelled_action(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            process = run.start(fault=f"{point}=kill")
            await run.working(process)
            action = run.call(
                "slow_append",
                arguments={"path": str(run.counted), "seconds": 60},
                effect=Effect.EXTERNAL,
            )
            await run.submit(action)
            while not run.count(action):
                await asyncio.sleep(0.02)
            await run.cancel(action)
            assert (await run.completion(action)).status is CompletionStatus.CANCELLED
            await run.ended(process)
            await run.working(run.start())  # it has swept by then
            reclaimed = await run.event(lambda e: e.kind == "reclaimed")
            assert reclaimed.action_id == action.action_id
            assert run.count(action) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "point", ["artifact.write", "artifact.rename.before", "box.write", "worker.file.write"]
)
def test_b12_a_full_disk_costs_a_result_or_a_file_and_the_worker_goes_on(
    tmp_path: Path, point: str
) -> None:
    async def scenario() -> None:
        async with Run(tmp_path) as run:
            process = run.start(fault=f"{point}=disk_full")
            large = run.call("big", arguments={"megabytes": 1}, effect=Effect.PURE)
            await run.submit(large)
            done = await run.completion(large)
            if point != "worker.file.write":
                assert done.status is CompletionStatus.ERROR
                assert done.fault is not None
                assert done.fault.side is FaultSide.INFRASTRUCTURE, "never the policy's doing"
            else:
                assert done.status is CompletionStatus.OK
            after = run.append("after")
            await run.submit(after)
            assert (await run.completion(after)).status is CompletionStatus.OK
            assert process.poll() is None, "the worker lives"

    asyncio.run(scenario())
