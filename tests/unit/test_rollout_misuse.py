"""Verbs used wrongly: refused by name, with the line and what to do, and never a reward."""

import contextlib
import threading
from typing import Any

import pytest

import stoker
from stoker.errors import StokerError, VerbMisused
from stoker.model.events import Verb
from stoker.model.task import Task
from stoker.testing.driver import drive


def test_a_verb_awaited_twice_is_refused_and_ran_once() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        verb = ctx.call(["once"])
        await verb
        with contextlib.suppress(VerbMisused):
            await verb
        return 1.0

    result = drive(program)
    assert len(result.calls) == 1
    assert result.outcome is not None
    assert result.outcome.reward is None, "misuse that was caught bars a reward"
    assert result.outcome.fault is not None
    assert "awaited twice" in result.outcome.fault.message


def test_a_verb_never_awaited_is_reported_with_its_line() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        ctx.call(["forgotten"])
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.reward is None
    assert "never awaited" in outcome.fault.message
    assert "test_rollout_misuse.py:" in outcome.fault.message


def test_a_result_asked_of_a_verb_that_was_not_awaited_names_what_is_missing() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        box: Any = ctx.environment()
        await box.run(["true"])
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert "no 'run' before the verb made at test_rollout_misuse.py:" in outcome.fault.message
    assert "is awaited; write await" in outcome.fault.message


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda ctx: ctx.gather(7), "coroutines, not int"),
        (lambda ctx: ctx.first(), "wait for ever"),
        (lambda ctx: ctx.call("ls -l"), "neither"),
        (lambda ctx: ctx.call(len), "@stoker.tool"),
        (lambda ctx: ctx.sleep("soon"), "soon"),
        (lambda ctx: ctx.timeout(-1), "at least 0"),
        (lambda ctx: ctx.branch(0), "at least 1"),
        (lambda ctx: ctx.gather(ctx.branch(2)), "await it outside of them"),
        (lambda ctx: ctx.generate(7), "chat or text"),
        (lambda ctx: ctx.generate("x", temperature=float("nan")), "finite"),
        (lambda ctx: ctx.generate("x", tokens_max=0), "at least 1"),
        (lambda ctx: ctx.chat([{"role": "robot"}]), "no message"),
        (lambda ctx: ctx.environment(files={"a": 7}), "text or bytes"),
    ],
)
def test_misuse_is_a_named_error_that_says_what_to_do(misuse: Any, says: str) -> None:
    raised: list[StokerError] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await misuse(ctx)
        except VerbMisused as error:
            raised.append(error)
        return 1.0

    result = drive(program)
    assert says in raised[0].message
    assert result.calls == ()
    assert [fault.code for fault in result.tainted] == ["verb_misused"]


def test_a_field_of_a_wrong_type_never_leaves_the_host() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("x")
        chat.user(7)  # type: ignore[arg-type]
        await ctx.generate(chat)
        return 1.0

    result = drive(program)
    assert result.calls == ()
    assert result.outcome is not None
    assert result.outcome.fault is not None
    assert result.outcome.fault.code == "verb_misused"


def test_environments_over_the_declared_boxes_are_refused_at_issue() -> None:
    @stoker.rollout(boxes=2)
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        for _ in range(3):
            await ctx.environment("python")
        return 1.0

    result = drive(program)
    assert len(result.calls) == 2
    assert result.outcome is not None
    assert result.outcome.fault is not None
    assert "boxes=2" in result.outcome.fault.message


def test_verbs_outside_the_running_program_are_refused() -> None:
    raised: list[StokerError] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        def in_a_thread() -> None:
            thread = threading.Thread(target=uses_it)
            thread.start()
            thread.join()

        def uses_it() -> None:
            try:
                ctx.sleep(1)
            except VerbMisused as error:
                raised.append(error)

        in_a_thread()
        with pytest.raises(VerbMisused, match="outside its running rollout"):
            await ctx.local(ctx.now)
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.reward == 1.0
    assert "another thread" in raised[0].message


def test_an_abandoned_async_generator_that_awaits_in_its_cleanup_is_an_error() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def numbers(*, clean: bool) -> Any:
            try:
                yield 1
                yield 2
            finally:
                if clean:
                    await ctx.call(["cleanup"])

        async for _ in numbers(clean=task.data["clean"]):
            break
        await ctx.sleep(1)
        return 1.0

    harmless = drive(program, task=Task(task_id="t", data={"clean": False}))
    assert harmless.outcome is not None
    assert harmless.outcome.reward == 1.0
    awaiting = drive(program, task=Task(task_id="t", data={"clean": True}))
    assert awaiting.outcome is not None
    assert awaiting.outcome.fault is not None
    assert "aclosing" in awaiting.outcome.fault.message
    assert [call.verb for call in awaiting.calls] == [Verb.SLEEP], "no cleanup ran as a step"
