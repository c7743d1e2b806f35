"""From an answer to a generation: what a scripted or simulated model 'samples', token by token.

The answer's text and tool calls are laid out as ids, cut at a stop text and at the token limit, and
read back from what is left: a tool call cut in half is parsed as what it is.
"""

from array import array

import msgspec

from stoker.inference.byte_tokens import derived_logprobs, ids_text, render_call, text_ids
from stoker.inference.policy import Answer
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    VersionSpan,
)
from stoker.model.toolcalls import parse_tool_calls


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as laid out, before any replica has spent time on it."""

    prompt: "array[int]"
    tokens: "array[int]"
    cut: bool
    """The token limit cut it."""


def lay_out(
    request: GenerateRequest,
    answer: Answer,
    prompt: "array[int]",
    *,
    tokens_max: int | None = None,
) -> Sampled:
    """Return what is sampled after ``prompt``; ``tokens_max`` is a limit of the model's own."""
    parts = [answer.text, *(render_call(call.name, call.arguments) for call in answer.tool_calls)]
    text = _stopped("\n".join(filter(None, parts)), request.sampling.stop)
    tokens = text_ids(text)
    limits = (request.sampling.tokens_max, answer.tokens_max, tokens_max)
    limit = max(0, min(one for one in limits if one is not None))
    return Sampled(prompt=prompt, tokens=tokens[:limit], cut=len(tokens) > limit)


def read_back(
    request: GenerateRequest, answer: Answer, sampled: Sampled, *, replica: int, policy_version: int
) -> Generation:
    """Return the generation those ids are; mask, ids and log-probabilities have equal length."""
    text = ids_text(sampled.tokens)
    calls = parse_tool_calls(text, request.tools)
    reason = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    if sampled.cut:
        reason = FinishReason.LENGTH
    elif answer.finish_reason is not None:
        reason = answer.finish_reason
    count = len(sampled.tokens)
    return Generation(
        text=text,
        tool_calls=calls,
        finish_reason=reason,
        prompt_ids=sampled.prompt.tobytes(),
        token_ids=sampled.tokens.tobytes(),
        logprobs=derived_logprobs(sampled.tokens, request.seed).tobytes(),
        logprob_kind=LogprobKind.SAMPLED,
        spans=(VersionSpan(policy_version, 0, count),) if count else (),
        replica=replica,
    )


def _stopped(text: str, stops: tuple[str, ...]) -> str:
    ends = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(ends)] if ends else text
