"""Guarded close: nasty programs end, nothing is issued, nothing of ours is released."""

import contextlib
import gc
from typing import Any

import pytest

import stoker
from stoker.errors import Evicted
from stoker.model.ids import RolloutId
from stoker.model.task import Task
from stoker.rollout.messages import StartRollout, Turn
from stoker.rollout.program import Rollout
from stoker.rollout.trampoline import Trampoline

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


async def _in_finally(ctx: stoker.Context) -> None:
    try:
        await ctx.sleep(1)
    finally:
        await ctx.call(["cleanup"])


async def _bare_except(ctx: stoker.Context) -> None:
    try:
        await ctx.sleep(1)
    except BaseException:
        await ctx.call(["swallowed"])


async def _retry_loop(ctx: stoker.Context) -> None:
    for _ in range(5):
        with contextlib.suppress(BaseException):
            await ctx.call(["again"])


async def _async_with(ctx: stoker.Context) -> None:
    async with _Session(ctx), ctx.timeout(5):
        await ctx.sleep(1)


class _Session:
    def __init__(self, ctx: stoker.Context) -> None:
        self.ctx = ctx

    async def __aenter__(self) -> None:
        await self.ctx.call(["open"])

    async def __aexit__(self, *_: object) -> None:
        await self.ctx.call(["close"])


async def _gather_in_finally(ctx: stoker.Context) -> None:
    try:
        await ctx.gather(_in_finally(ctx), _retry_loop(ctx), _bare_except(ctx))
    finally:
        await ctx.gather(ctx.sleep(1), _in_finally(ctx))


async def _held_verb(ctx: stoker.Context) -> None:
    cleanup = ctx.call(["cleanup"])
    try:
        await ctx.sleep(1)
    finally:
        await cleanup


async def _generator(ctx: stoker.Context) -> None:
    async def numbers() -> Any:
        try:
            yield 1
        finally:
            await ctx.call(["cleanup"])

    async for _ in numbers():
        await ctx.sleep(1)


async def _nested_errors(ctx: stoker.Context) -> None:
    try:
        await ctx.first(_in_finally(ctx), _async_with(ctx))
    finally:
        raise KeyError("while being thrown away")


NASTY = [
    _in_finally,
    _bare_except,
    _retry_loop,
    _async_with,
    _gather_in_finally,
    _held_verb,
    _generator,
    _nested_errors,
]


@pytest.mark.parametrize("nasty", NASTY, ids=lambda nasty: str(nasty.__name__))
def test_a_guarded_close_ends_nasty_programs_and_issues_nothing(nasty: Any) -> None:
    ended: list[bool] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await nasty(ctx)
        finally:
            ended.append(True)
        return 1.0

    trampoline, turn = begun(program)
    before = len(turn.calls)
    assert before > 0
    trampoline.close()
    gc.collect()
    assert ended == [True]
    after = trampoline._turn()
    assert after.calls == ()
    assert after.withdrawn == (), "an eviction releases nothing"


def test_verbs_raise_evicted_when_called_and_take_no_number() -> None:
    raised: list[BaseException] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await ctx.sleep(1)
        finally:
            for verb in (lambda: ctx.sleep(1), ctx.new_id, ctx.now, lambda: ctx.random):
                try:
                    verb()
                except BaseException as error:
                    raised.append(error)
        return 1.0

    trampoline, _ = begun(program)
    trampoline.close()
    assert [type(error) for error in raised] == [Evicted] * 4


def test_closing_twice_and_closing_the_finished_is_harmless() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        return 1.0

    trampoline, turn = begun(program)
    assert turn.outcome is not None
    trampoline.close()
    trampoline.close()


def begun(program: Rollout) -> tuple[Trampoline, Turn]:
    start = StartRollout(
        rollout_id=RolloutId("rol_1"),
        task=Task(task_id="t"),
        epoch="e",
        index=0,
        group_id="g",
        at=0.0,
    )
    trampoline = Trampoline(program, start)
    return trampoline, trampoline.begin()
