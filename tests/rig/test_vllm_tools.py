"""Tool calls of a real server: what a small model makes of them is data, never a crash."""

import asyncio

import pytest

from stoker.errors import ModelRefused
from stoker.inference.http.model import HttpModel
from stoker.model.generation import FinishReason, Generation, Message, Role
from support.inference import RUN_PYTHON
from support.served import grown
from support.vllm_calls import asked, asking, say
from support.vllm_server import Server

PROMPT = "Print the number 1 with python."


async def forced(model: HttpModel, tokens_max: int) -> Generation:
    """Sample a call: the server holds the model to the form, not to what the tool takes."""
    model.replicas[0]._tool_choice = "required"
    return await model.generate(0, asked(text=PROMPT, tokens_max=tokens_max, tools=(RUN_PYTHON,)))


def test_c3_a_call_with_wrong_arguments_is_an_observation_and_the_history_goes_on(
    main_server: Server,
) -> None:
    async def main() -> tuple[Generation, Generation]:
        async with asking(main_server) as model:
            one = await forced(model, 100)
            start = asked(text=PROMPT).messages
            error = Message(
                role=Role.TOOL, content=one.tool_calls[0].error or "1",
                tool_call_id=one.tool_calls[0].call_id,
            )  # fmt: skip
            again = grown(one, error, before=start, tools=(RUN_PYTHON,), tokens_max=8)
            return one, await model.generate(0, again)

    one, two = asyncio.run(main())
    (call,) = one.tool_calls
    assert call.name == "run_python"
    assert call.error is not None, f"the model wrote a right call: {call}"
    assert one.finish_reason is FinishReason.TOOL_CALLS
    assert two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert not two.rerendered
    say(f"{call.raw!r}: {call.error}")


def test_c3_an_end_by_length_inside_a_call_is_a_cut_and_runs_nothing(main_server: Server) -> None:
    async def main() -> list[Generation]:
        async with asking(main_server) as model:
            return list(await asyncio.gather(*(forced(model, count) for count in (1, 8, 9, 20))))

    for said in asyncio.run(main()):
        assert said.finish_reason is FinishReason.LENGTH
        assert all("cut off" in (call.error or "") for call in said.tool_calls)
    assert said.tool_calls  # the longest one had begun


def test_c3_a_choice_of_a_tool_that_was_not_offered_is_refused(main_server: Server) -> None:
    async def main() -> None:
        async with asking(main_server) as model:
            choice = {"type": "function", "function": {"name": "nope"}}
            model.replicas[0]._tool_choice = choice  # type: ignore[assignment]
            with pytest.raises(ModelRefused, match=r"400: .*tool_choice"):
                await model.generate(0, asked(tools=(RUN_PYTHON,)))

    asyncio.run(main())
