"""Tools and values at the border of a program: what is declared, what is sent, what is refused."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
import stoker.rollout.host as host_module
from stoker.errors import BoxFailed, ProgramInvalid, VerbMisused
from stoker.model.action import Effect
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import Verb
from stoker.model.given import duration
from stoker.model.ids import CallPath
from stoker.rollout.arguments import BranchedOff
from stoker.rollout.plain import json_value
from stoker.rollout.program import Rollout
from stoker.testing.driver import Asked, drive, replay_every_prefix


@stoker.tool(effect="idempotent", worker_class="tests", timeout="90s", on_timeout=stoker.retry(2))
def grade(answer: str, *, weight: float = 1.0, **more: int) -> float:
    """Grade an answer."""
    return len(answer) * weight + sum(more.values())


def test_a_tool_stays_callable() -> None:
    assert grade("abc", weight=2.0, bonus=1) == 7.0


def test_a_call_sends_file_name_keywords_and_what_the_tool_declares() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.call(grade, "abc", bonus=3)
        await ctx.call(grade, answer="x", worker_class="fast", timeout=5, effect="external")
        return 1.0

    declared, overridden = (call.arguments for call in drive(program).calls)
    assert Path(declared.request.module) == Path(__file__).resolve()
    assert declared.request.function == "grade"
    assert declared.request.arguments == {"answer": "abc", "bonus": 3}
    assert (declared.effect, declared.worker_class) == (Effect.IDEMPOTENT, "tests")
    assert (declared.timeout_seconds, declared.on_timeout.times) == (90.0, 2)
    assert (overridden.effect, overridden.worker_class) == (Effect.EXTERNAL, "fast")
    assert overridden.timeout_seconds == 5.0


@pytest.mark.parametrize(
    "bad",
    [
        {"answer": math.nan},
        {"answer": {1, 2}},
        {"answer": {1: 2}},
        {"answer": b"bytes"},
        {"answer": 2**70},
        {"answer": "lone \ud800 surrogate"},
        {"wrong": "name"},
        {},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_sent_are_refused_before_anything_is_issued(bad: Any) -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.call(grade, **bad)
        return 1.0

    result = drive(program)
    assert result.calls == ()
    assert result.outcome is not None
    assert result.outcome.fault is not None
    assert result.outcome.fault.code == "verb_misused"


def test_json_values_come_out_as_json_would_bring_them_back() -> None:
    assert json_value({"a": (1, [True, None])}, "x") == {"a": [1, [True, None]]}
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="holds itself"):
        json_value(endless, "x")


def test_durations() -> None:
    assert [duration(value, "x") for value in ("10s", "2m", 3, 0.5)] == [10.0, 120.0, 3.0, 0.5]
    for bad in ("ten", -1, math.nan, math.inf, True, "5 parsecs", None):
        with pytest.raises(ValueError, match=r"10s|no duration|one of|finite"):
            duration(bad, "x")  # type: ignore[arg-type]


def test_mutating_arguments_after_the_await_changes_nothing() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        files = {"a": b"1"}
        box = await ctx.environment("python", files=files)
        files["a"] = b"2"
        argv = ["python", "a"]
        running = box.run(argv, stdin="text")
        argv.append("b")
        await running
        await box.export()
        assert (await box.read_file("a")).content == b""
        return 1.0

    result = drive(program)
    assert result.calls[0].arguments.files == {"a": b"1"}
    assert result.calls[1].request.argv == ("python", "a")
    assert result.calls[1].request.stdin == b"text"
    assert [call.verb for call in result.calls[2:]] == [Verb.EXPORT, Verb.READ]
    assert result.calls[1].arguments.environment == "0"
    replay_every_prefix(program, result)


def test_an_argument_of_local_that_cannot_be_journalled_is_told_by_its_type() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.local(str, object())
        return 1.0

    result = drive(program)
    assert result.calls[0].arguments.arguments == ({"object": "builtins.object"},)
    assert result.outcome is not None
    assert result.outcome.fault is None


def test_declarations_that_cannot_work_are_refused_with_their_line() -> None:
    with pytest.raises(ProgramInvalid, match=r"test_rollout_tools\.py:\d+: a tool is a top-level"):

        @stoker.tool
        def local_tool() -> None: ...

    with pytest.raises(ProgramInvalid, match="no_such"):
        stoker.tool(effect="no_such")(grade.function)
    with pytest.raises(ProgramInvalid, match="boxes=-1"):

        @stoker.rollout(boxes=-1)
        async def program(ctx: stoker.Context, task: stoker.Task) -> float:
            return 1.0


def test_one_program_may_await_another() -> None:
    @stoker.rollout
    async def inner(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.sleep(1)
        return 0.25

    @stoker.rollout
    async def outer(ctx: stoker.Context, task: stoker.Task) -> float:
        return float(await inner(ctx, task)) * 2

    assert isinstance(outer, Rollout)
    outcome = drive(outer).outcome
    assert outcome is not None
    assert outcome.reward == 0.5


@stoker.rollout(boxes=3)
async def _branching(ctx: stoker.Context, task: stoker.Task) -> float:
    box = await ctx.environment("py", worker_class="code", files={"a": "1"})
    assert not box._asked.files, "what was written once is not kept as long as its environment"
    one, two = await box.branch(2)
    await ctx.gather(one.run(["true"]), two.run(["true"]))
    with pytest.raises(VerbMisused, match="boxes=3; nothing was done"):
        await one.branch(1)
    ctx.recovered("verb_misused")
    return 1.0


def test_branches_of_an_environment_begin_at_a_checkpoint_that_is_journalled() -> None:
    saved = Checkpoint(digest="d" * 64, parent="p", generation=0)
    result = drive(_branching, lambda asked: saved if asked.verb is Verb.CHECKPOINT else None)
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    opened = [asked.arguments for asked in result.calls if asked.verb is Verb.ENVIRONMENT]
    assert opened[0].begins is msgspec.UNSET
    assert opened[0].files == {"a": b"1"}
    for branch in opened[1:]:
        assert (branch.baseline, branch.worker_class, branch.files) == ("py", "code", {})
        assert branch.begins == BranchedOff(environment=CallPath("0"), checkpoint=saved)
    verbs = [asked.verb for asked in result.calls]
    assert verbs.count(Verb.CHECKPOINT) == 1, "the refused branch has taken none"
    assert replay_every_prefix(_branching, result) == len(result.history) == 7


def test_a_branch_that_cannot_be_opened_takes_the_others_with_it_and_may_be_tried_again() -> None:
    @stoker.rollout(boxes=4)
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        box = await ctx.environment("py", worker_class="code")
        with pytest.raises(BoxFailed):
            await box.branch(2)
        ctx.recovered(BoxFailed.code)
        await box.branch(2)
        return 1.0

    saved = Checkpoint(digest="d" * 64, parent="p", generation=0)

    def answer(asked: Asked) -> Any:
        if asked.path == CallPath("2.0.0"):
            return BoxFailed("no room for a box")
        return saved if asked.verb is Verb.CHECKPOINT else None

    result = drive(program, answer)
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    assert [path for turn in result.history for path in turn.withdrawn] == ["2.1.0"]
    replay_every_prefix(program, result)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_a_number_of_branches_that_is_none_is_refused_before_anything_is_done(count: Any) -> None:
    @stoker.rollout(boxes=9)
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        box = await ctx.environment()
        with pytest.raises(VerbMisused, match="at least 1; nothing was done"):
            box.branch(count)
        return 1.0

    assert [asked.verb for asked in drive(program).calls] == [Verb.ENVIRONMENT]


def test_a_branch_that_is_never_awaited_costs_the_reward_and_is_named() -> None:
    @stoker.rollout(boxes=2)
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        box = await ctx.environment()
        box.branch(1)
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert "never awaited" in outcome.fault.message


def test_the_public_names_are_there_however_the_package_is_imported() -> None:
    assert host_module.Host.__name__ == "Host"
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    assert isinstance(stoker.rollout(version="2")(_empty), Rollout)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stoker.nothing  # type: ignore[attr-defined]


async def _empty(ctx: stoker.Context, task: stoker.Task) -> float:
    return 0.0
