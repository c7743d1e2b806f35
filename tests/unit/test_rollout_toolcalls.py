"""C3: whatever a model samples as a tool call is an observation, never a crash."""

from typing import Any

import pytest

import stoker
from stoker.model.generation import FinishReason, Generation, ToolCall, ToolSpec
from stoker.model.toolcalls import parse_tool_calls
from stoker.testing.driver import drive

PYTHON = ToolSpec(
    name="python",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)


def block(inner: str) -> str:
    return f"thinking… <tool_call>{inner}</tool_call>"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (block('{"name": "python", "arguments": {"code": 1/0}}'), "not JSON"),
        (block("print(1)"), "not JSON"),
        (block(""), "not JSON"),
        (block("[" * 100_000), "not JSON"),
        (block('{"name": "python", "arguments": "{oops"}'), "not JSON"),
        (block('{"name": "python", "arguments": {}}'), "'code' is missing"),
        (block('{"name": "python"}'), "'code' is missing"),
        (block('{"name": "python", "arguments": {"code": 7}}'), "of type string"),
        (block('{"name": "python", "arguments": {"code": "x", "count": true}}'), "of type integer"),
        (block('{"name": "python", "arguments": {"code": "x", "cod": 1}}'), "no argument 'cod'"),
        (block('{"name": "python", "arguments": [1]}'), "JSON object"),
        (block('{"name": "rm", "arguments": {}}'), "no tool 'rm'; the tools are: python"),
        (block('{"arguments": {}}'), "a tool call is a JSON object"),
        (block("17"), "a tool call is a JSON object"),
        ('<tool_call>{"name": "python", "argu', "cut off"),
    ],
)
def test_c3_an_unusable_tool_call_carries_its_error(text: str, error: str) -> None:
    (call,) = parse_tool_calls(text, [PYTHON])
    assert call.error is not None
    assert error in call.error
    assert call.call_id == "call_0"


def test_c3_two_tool_calls_at_once_and_none_at_all() -> None:
    good = '{"name": "python", "arguments": {"code": "1", "count": 2.0}}'
    calls = parse_tool_calls(block(good) + block("nope") + block(good), [PYTHON])
    assert [call.error is None for call in calls] == [True, False, True]
    assert [call.call_id for call in calls] == ["call_0", "call_1", "call_2"]
    assert calls[0].arguments["code"] == "1"
    assert parse_tool_calls("", [PYTHON]) == ()
    assert parse_tool_calls("no call here </tool_call>", [PYTHON]) == ()


def test_calls_a_server_parsed_are_checked_the_same_way() -> None:
    struct: list[Any] = [
        {"id": "c9", "function": {"name": "python", "arguments": '{"code": "1"}'}},
        {"id": "c10", "function": {"name": "python", "arguments": "{"}},
        {"name": "python", "arguments": {"code": "2"}},
        ToolCall(call_id="c11", name="python", arguments={"code": None}),
        {"function": None},
    ]
    calls = parse_tool_calls(struct, [PYTHON])
    assert [call.error is None for call in calls] == [True, False, True, False, False]
    assert calls[0].call_id == "c9"
    again = parse_tool_calls(calls, [PYTHON])
    assert again == calls, "checking twice changes nothing"


@pytest.mark.parametrize(
    "sampled",
    [
        Generation(text=block("oops")),
        Generation(text='<tool_call>{"na', finish_reason=FinishReason.LENGTH),
        Generation(text="", tool_calls=(ToolCall(call_id="", name="rm", arguments={"path": "/"}),)),
    ],
)
def test_c3_a_program_sees_malformed_calls_as_data(sampled: Generation) -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        chat = ctx.chat("go", tools=[PYTHON])
        turn = await ctx.generate(chat)
        for call in turn.tool_calls:
            assert call.error is not None
            chat.tool_result(call, call.error)
        await ctx.generate(chat)
        return float(len(turn.tool_calls))

    result = drive(program, lambda asked: sampled if asked.path == "0" else "done")
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    continued = result.calls[1].arguments
    assert continued.parent == "0"
    assert [message.role for message in continued.suffix] == ["tool"]


def test_c3_an_empty_completion_is_an_ordinary_turn() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        turn = await ctx.generate("hello")
        assert (turn.text, turn.tool_calls, list(turn.token_ids)) == ("", (), [])
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.reward == 1.0
