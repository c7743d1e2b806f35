"""An engine that takes and gives ids: asked by exact ids, read by the renderer, checked."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.token_callable import TokenAnswer, TokenCallable, TokenRequest
from stoker.inference.tokens.base import Reading, RenderedPrompt
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    ToolCall,
    VersionSpan,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from stoker.testing.virtual_clock import run_virtual
from support.inference import request

STOP = 9


class Plain:
    """A renderer without a tokenizer: every id is a letter, and 9 ends a turn."""

    stop_ids = frozenset({STOP})

    def __init__(self, *calls: ToolCall) -> None:
        self.calls = calls

    def prompt(self, asked: GenerateRequest) -> RenderedPrompt:
        if asked.task_id == "unrenderable":
            raise ModelRefused("no such role")
        return RenderedPrompt(ids=array("i", [1, 2]), rerendered=bool(asked.prompt_ids))

    def read(self, token_ids: "array[int]", asked: GenerateRequest) -> Reading:
        return Reading(text=self.text(token_ids), tool_calls=self.calls)

    def text(self, token_ids: "array[int]") -> str:
        return "".join(chr(96 + one) for one in token_ids if one != STOP)


def sampled(answer: Any, *calls: ToolCall, **fields: Any) -> tuple[Generation, TokenRequest]:
    seen: list[TokenRequest] = []

    async def generate_ids(asked: TokenRequest) -> TokenAnswer:
        seen.append(asked)
        if isinstance(answer, Exception):
            raise answer
        returned: TokenAnswer = answer
        return returned

    model = TokenCallable(generate_ids, Plain(*calls), window=1, logprob_kind=LogprobKind.RAW)
    return run_virtual(model.generate(0, request(**fields))), seen[0]


def test_ids_in_ids_out() -> None:
    answer = TokenAnswer(token_ids=(3, 4, STOP), logprobs=(-1, -2, -3), policy_version=7)
    generation, asked = sampled(answer, seed=5)
    assert asked.prompt_ids == [1, 2]
    assert (asked.seed, asked.request_id) == (5, "rol_a/0")
    assert asked.stop_ids == {STOP}
    assert generation.text == "cd"
    assert unpack_tokens(generation.prompt_ids) == [1, 2]
    assert unpack_tokens(generation.token_ids) == [3, 4, STOP]
    assert unpack_logprobs(generation.logprobs) == [-1, -2, -3]
    assert generation.logprob_kind is LogprobKind.RAW
    assert generation.spans == (VersionSpan(7, 0, 3),)
    assert not generation.rerendered
    assert sampled(answer, prompt_ids=pack_tokens([8]))[0].rerendered


@pytest.mark.parametrize(
    ("ids", "said", "tokens_max", "reason"),
    [
        ((3, STOP), None, 2, FinishReason.STOP),
        ((3, 4), None, 2, FinishReason.LENGTH),
        ((3, 4), None, 9, FinishReason.STOP),  # a stop text, or an engine that keeps the id
        ((), None, 0, FinishReason.LENGTH),
        ((3, 4), FinishReason.LENGTH, 9, FinishReason.LENGTH),  # the end of its context
    ],
)
def test_how_a_turn_ended(
    ids: Sequence[int], said: FinishReason | None, tokens_max: int, reason: FinishReason
) -> None:
    answer = TokenAnswer(token_ids=ids, finish_reason=said)
    generation, _ = sampled(answer, tokens_max=tokens_max)
    assert generation.finish_reason is reason
    assert generation.logprob_kind is LogprobKind.NONE


def test_a_turn_that_ends_with_tool_calls_says_so() -> None:
    call = ToolCall(call_id="call_0", name="", error="not JSON")
    generation, _ = sampled(TokenAnswer(token_ids=(STOP,)), call)
    assert generation.finish_reason is FinishReason.TOOL_CALLS
    assert generation.tool_calls == (call,)
    cut, _ = sampled(TokenAnswer(token_ids=(3,)), call, tokens_max=1)
    assert cut.finish_reason is FinishReason.LENGTH


def test_weights_that_change_inside_a_turn_are_spans() -> None:
    spans = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    assert sampled(TokenAnswer(token_ids=(3, 4), spans=spans))[0].spans == spans


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (TokenAnswer(token_ids=(3, 4), logprobs=(-1,)), "2 token ids and 1 log-probabilities"),
        (TokenAnswer(token_ids=(3, -1)), "-1 is no token id"),
        (TokenAnswer(token_ids=(3.5,)), "TypeError"),  # type: ignore[arg-type]
        (TokenAnswer(token_ids=(3, 4), spans=(VersionSpan(1, 0, 1),)), "end at 1 of 2"),
        (TokenAnswer(token_ids=(), finish_reason=FinishReason.ABORTED), "aborted call rol_a/0"),
        ([3, 4], "is no TokenAnswer"),
        (ValueError("out of memory"), "raised ValueError"),
    ],
)
def test_what_cannot_be_used_is_one_trys_failure(answer: object, says: str) -> None:
    with pytest.raises(ModelUnavailable, match=says):
        sampled(answer)


def test_a_history_the_template_refuses_is_refused() -> None:
    with pytest.raises(ModelRefused, match="no such role"):
        sampled(TokenAnswer(token_ids=(STOP,)), task="unrenderable")
