"""The contract every model of the family keeps; each test runs on all of them."""

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from stoker.inference.base import Model
from stoker.inference.open import start_model
from stoker.inference.policy import Answer, AnswerCall, FunctionPolicy, Policy
from stoker.inference.scripted import ScriptedModel
from stoker.inference.sim import SimModel
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    Role,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from stoker.testing.openai_server_engine import Features
from stoker.testing.virtual_clock import run_virtual
from support.inference import RUN_PYTHON, profile, request
from support.served import ServedModel, called

Make = Callable[[Policy], Model]
MODELS: dict[str, Make] = {
    "scripted": ScriptedModel,
    "sim": lambda policy: SimModel(profile(c=0.1, p=0.01, kv_tokens=100_000), policy),
    "http-vllm": lambda policy: ServedModel(policy, Features()),
    "http-sglang": lambda policy: ServedModel(policy, Features(flavour="sglang")),
    "callable": lambda policy: called(ScriptedModel(policy)),
}
if importlib.util.find_spec("torch") is not None:  # a floor of its own: make torch-env
    from support.torch_scripted import scripted_torch

    MODELS["torch"] = scripted_torch
REAL_TIME = {"http-vllm", "http-sglang", "torch"}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
_T = TypeVar("_T")


def _run(make: Make, main: Coroutine[Any, Any, _T]) -> _T:
    """Run in virtual time what waits for no socket."""
    return asyncio.run(main) if _is_real(make) else run_virtual(main)


def _is_real(make: Make) -> bool:
    return any(make is MODELS.get(name) for name in REAL_TIME)


def _ask(make: Make, answer: object, *asked: GenerateRequest) -> list[Generation]:
    async def main() -> list[Generation]:
        model = make(FunctionPolicy("test", lambda _: answer))
        await start_model(model)
        answers = [await model.generate(0, one) for one in asked]
        await model.close()
        return answers

    return _run(make, main())


@each_model
def test_ids_logprobs_and_spans_have_one_length(make: Make) -> None:
    (said,) = _ask(make, "héllo ☃", request())
    count = len("héllo ☃".encode()) + 1
    assert said.token_count == count
    logprobs = unpack_logprobs(said.logprobs)
    assert len(logprobs) == count
    assert all(-2 <= value <= 0 for value in logprobs)
    assert [(span.start, span.end) for span in said.spans] == [(0, count)]
    assert said.text == "héllo ☃"
    assert said.finish_reason is FinishReason.STOP


@each_model
def test_the_same_request_is_answered_the_same(make: Make) -> None:
    first, second, other = _ask(make, "x" * 50, request(), request(), request(seed=2))
    assert first == second
    assert first.token_ids == other.token_ids
    if make is not MODELS.get("torch"):  # whose log-probabilities are those of its weights
        assert first.logprobs != other.logprobs


@each_model
@pytest.mark.parametrize("cut", [None, 3])
def test_c4_an_append_history_shows_exactly_what_was_sampled(make: Make, cut: int | None) -> None:
    # Cut at 3 tokens, "a☃" ends inside a character: its text would not tokenise back.
    text = "a☃ more"
    opening = (Message(role=Role.USER, content="go"),)
    (first,) = _ask(make, text, request(messages=opening, tokens_max=cut or 1000))
    grown = (
        *opening,
        Message(role=Role.ASSISTANT, content=first.text, tool_calls=first.tool_calls),
        Message(role=Role.TOOL, content="seen"),
    )
    known = first.prompt_ids + first.token_ids
    (second,) = _ask(make, "done", request(step=1, messages=grown, prompt_ids=known))
    assert second.prompt_ids.startswith(known)
    end = [] if cut is None else [260]  # what was cut before its end is ended by the next message
    rest = unpack_tokens(second.prompt_ids[len(known) :])
    assert rest == [*end, 259, *b"seen", 260, 258]
    (replayed,) = _ask(make, "done", request(step=1, messages=grown, prompt_ids=second.prompt_ids))
    assert replayed.prompt_ids == second.prompt_ids
    if cut is None:  # nothing was lost in the text, so rendering it gives the same ids
        (rendered,) = _ask(make, "done", request(step=1, messages=grown))
        assert rendered.prompt_ids == second.prompt_ids


@each_model
def test_c4_tool_calls_come_back_as_the_ids_they_were_sampled_as(make: Make) -> None:
    answer = Answer(
        text="try", tool_calls=(AnswerCall(name="run_python", arguments={"code": "1"}),)
    )
    opening = (Message(role=Role.USER, content="go"),)
    (first,) = _ask(make, answer, request(messages=opening, tools=(RUN_PYTHON,)))
    assert [(call.name, call.arguments) for call in first.tool_calls] == [
        ("run_python", {"code": "1"})
    ]
    assert first.finish_reason is FinishReason.TOOL_CALLS
    turn = Message(role=Role.ASSISTANT, content=first.text, tool_calls=first.tool_calls)
    (second,) = _ask(make, "done", request(step=1, messages=(*opening, turn), tools=(RUN_PYTHON,)))
    assert second.prompt_ids.startswith(first.prompt_ids + first.token_ids)


@each_model
def test_c3_a_tool_call_cut_by_length_is_no_crash(make: Make) -> None:
    answer = Answer(tool_calls=(AnswerCall(name="run_python", arguments={"code": "1" * 50}),))
    asked = [request(tools=(RUN_PYTHON,), tokens_max=limit) for limit in range(60)]
    for limit, said in enumerate(_ask(make, answer, *asked)):
        assert said.finish_reason is FinishReason.LENGTH
        assert said.token_count == limit
        assert all(call.error for call in said.tool_calls)


@each_model
def test_c3_arguments_that_are_not_json_are_an_observation(make: Make) -> None:
    answer = Answer(tool_calls=(AnswerCall(name="run_python", arguments="{oops"),))
    (said,) = _ask(make, answer, request(tools=(RUN_PYTHON,)))
    assert len(said.tool_calls) == 1
    assert said.tool_calls[0].error


@each_model
def test_c3_an_empty_completion_is_just_the_end(make: Make) -> None:
    (said,) = _ask(make, "", request())
    assert (said.text, said.token_count, said.finish_reason) == ("", 1, FinishReason.STOP)


@each_model
def test_a_stop_text_ends_the_turn_and_is_left_out(make: Make) -> None:
    (said,) = _ask(make, "one END two", request(stop=("zzz", "END")))
    assert said.text == "one "


@each_model
def test_text_never_becomes_a_special(make: Make) -> None:
    (said,) = _ask(make, "\ud800 Ā", request(messages=(Message(role=Role.USER, content="ĀāĂ"),)))
    prompt = unpack_tokens(said.prompt_ids)
    assert [token for token in prompt if token > 255] == [257, 260, 258]
    assert unpack_tokens(said.token_ids)[-1] == 260
    assert said.text == "? Ā"


@each_model
def test_ids_of_a_whole_prompt_are_taken_as_they_are(make: Make) -> None:
    ids = pack_tokens([257, 1, 2, 3, 260, 258])
    (said,) = _ask(make, "x", request(prompt_ids=ids))
    assert said.prompt_ids == ids


@each_model
@pytest.mark.parametrize("at", [0.0, 2.5, 40.0])
@pytest.mark.parametrize("turns", range(8))
def test_a_cancel_at_any_point_leaves_nothing_running(make: Make, at: float, turns: int) -> None:
    async def main() -> None:
        model = make(FunctionPolicy("test", lambda _: "x" * 20))
        await start_model(model)
        tasks = [asyncio.create_task(model.generate(0, request(f"rol_{n}"))) for n in range(6)]
        await asyncio.sleep(at * (0.001 if _is_real(make) else 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not tasks[0].cancelled()
        assert model.load(0).running == 0
        assert model.load(0).kv_used_share == 0
        await model.generate(0, request("rol_after"))
        await model.close()

    _run(make, main())
