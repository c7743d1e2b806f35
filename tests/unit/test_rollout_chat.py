"""Histories are sent once: parent and suffix, forks, failed calls, two calls at once."""

from array import array
from typing import Any

import pytest

import stoker
from stoker.errors import ModelUnavailable, VerbMisused
from stoker.model.generation import Generation, Role, ToolSpec, VersionSpan, pack_logprobs
from stoker.testing.driver import Asked, drive, replay_every_prefix

TOOL = ToolSpec(name="t")


def sent(asked: Asked) -> tuple[str | None, list[str], int]:
    arguments = asked.arguments
    return arguments.parent, [m.content for m in arguments.suffix], len(arguments.tools)


def test_a_chat_sends_each_message_once_and_its_tools_with_the_first_call() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("q1", system="s", tools=[TOOL])
        await ctx.generate(chat)
        chat.user("q2")
        await ctx.generate(chat)
        await ctx.generate(chat)
        assert [m.role for m in chat.messages] == [
            Role.SYSTEM,
            Role.USER,
            Role.ASSISTANT,
            Role.USER,
            Role.ASSISTANT,
            Role.ASSISTANT,
        ]
        return 1.0

    result = drive(program, lambda asked: f"answer {asked.path}")
    assert [sent(call) for call in result.calls] == [
        (None, ["s", "q1"], 1),
        ("0", ["q2"], 0),
        ("1", [], 0),
    ]
    assert result.outcome is not None
    assert result.outcome.fault is None


def test_a_fork_continues_from_the_same_call() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("q1")
        await ctx.generate(chat)
        other = chat.fork()
        chat.user("left")
        other.user("right")
        await ctx.gather(ctx.generate(chat), ctx.generate(other))
        assert chat.messages[:2] == other.messages[:2]
        return 1.0

    result = drive(program, lambda _asked: "a")
    assert [sent(call) for call in result.calls[1:]] == [("0", ["left"], 0), ("0", ["right"], 0)]
    replay_every_prefix(program, result)


def test_a_failed_call_leaves_the_chat_as_it_was() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("q", tools=[TOOL])
        try:
            await ctx.generate(chat)
        except ModelUnavailable as fault:
            ctx.recovered(fault)
        await ctx.generate(chat)
        return 1.0

    def script(asked: Asked) -> Any:
        return ModelUnavailable("replica 0 hung") if asked.path == "0" else "fine"

    result = drive(program, script)
    assert [sent(call) for call in result.calls] == [(None, ["q"], 1)] * 2


def test_two_calls_at_once_on_one_chat_are_refused() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("q")
        with pytest.raises(VerbMisused, match=r"chat\.fork"):
            await ctx.gather(ctx.generate(chat), ctx.generate(chat))
        await ctx.generate(chat)  # the cancelled call let go of it
        return 1.0

    result = drive(program, lambda _asked: "a")
    assert len(result.calls) == 2


def test_what_is_added_while_a_call_runs_follows_its_answer() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("q1")

        async def adds() -> None:
            await ctx.sleep(1)
            chat.user("q2")

        await ctx.gather(adds(), ctx.generate(chat))
        assert [m.content for m in chat.messages] == ["q1", "a", "q2"]
        await ctx.generate(chat)
        return 1.0

    result = drive(program, lambda asked: "a" if asked.verb == "generate" else None)
    assert result.outcome is not None
    assert result.outcome.fault is None
    assert sent(result.calls[-1]) == ("0.1.0", ["q2"], 0)


def test_tokens_and_logprobs_are_arrays_and_spans_come_along() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        turn = await ctx.generate("q")
        assert turn.token_ids == array("i", [1, 2])
        assert list(turn.logprobs) == [-0.5, -1.0]
        assert turn.spans[0].policy_version == 7
        return 1.0

    generation = Generation(
        text="x",
        token_ids=array("i", [1, 2]).tobytes(),
        logprobs=pack_logprobs([-0.5, -1.0]),
        spans=(VersionSpan(7, 0, 2),),
    )
    outcome = drive(program, lambda _asked: generation).outcome
    assert outcome is not None
    assert outcome.fault is None
