"""What comes back: each route's answer as one record. Pure functions.

A field that is missing is what the server does not offer; a field that contradicts another one
(ids and log-probabilities of different length) makes the whole answer unusable, since a trainer
would be fed shifted arrays.
"""

from typing import Any

import msgspec

from stoker.errors import ModelUnavailable
from stoker.model.generation import FinishReason

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "abort": FinishReason.ABORTED,
}


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` were sampled by weights ``version``."""

    version: str
    start: int
    end: int


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    text: str
    finish_reason: FinishReason
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls the server read itself."""
    prompt_ids: tuple[int, ...] | None = None
    """``None``: not said."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    token_texts: tuple[str, ...] = ()
    """Each token as text, where given."""
    weights: tuple[WeightSpan, ...] = ()
    """Where the server says which weights sampled what."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were in the server's prefix cache; ``None``: not said."""


def read_chat(answer: Any) -> Answered:  # noqa: ANN401 - JSON
    """Read an answer of ``/v1/chat/completions``.

    Raises:
        ModelUnavailable: it is no such answer, or contradicts itself.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought:
            text = f"<think>{thought}</think>{text}"
        content = (choice.get("logprobs") or {}).get("content")
        ids, logprobs = _pairs(choice.get("meta_info") or {})
        if ids is None or choice.get("token_ids") is not None:
            ids = _ints(choice.get("token_ids"))
            logprobs = _floats(entry["logprob"] for entry in content) if content else None
        return _checked(
            Answered(
                text=text,
                finish_reason=_reason(choice.get("finish_reason")),
                calls=tuple(message.get("tool_calls") or ()),
                prompt_ids=_ints(answer.get("prompt_token_ids", choice.get("prompt_token_ids"))),
                token_ids=ids,
                logprobs=logprobs,
                token_texts=tuple(entry.get("token", "") for entry in content or ()),
                weights=_weights(choice, answer.get("metadata") or choice.get("meta_info") or {}),
                prompt_tokens=_used(answer, "prompt_tokens"),
                sampled_tokens=_used(answer, "completion_tokens"),
                cached_tokens=_cached(answer),
            )
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable("/v1/chat/completions", answer, error) from error


def read_completion(answer: Any) -> Answered:  # noqa: ANN401 - JSON
    """Read an answer of ``/v1/completions``; raises as ``read_chat``."""
    try:
        choice = answer["choices"][0]
        said = choice.get("logprobs") or {}
        values = said.get("token_logprobs")
        return _checked(
            Answered(
                text=choice["text"],
                finish_reason=_reason(choice.get("finish_reason")),
                prompt_ids=_ints(choice.get("prompt_token_ids", answer.get("prompt_token_ids"))),
                token_ids=_ints(choice.get("token_ids")),
                logprobs=_floats(values) if values is not None else None,
                token_texts=tuple(said.get("tokens") or ()),
                weights=_weights(choice, answer.get("metadata") or {}),
                prompt_tokens=_used(answer, "prompt_tokens"),
                sampled_tokens=_used(answer, "completion_tokens"),
                cached_tokens=_cached(answer),
            )
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable("/v1/completions", answer, error) from error


def read_scale_out(answer: Any) -> Answered:  # noqa: ANN401 - JSON
    """Read an answer of vLLM's ``/inference/v1/generate``; raises as ``read_chat``."""
    try:
        choice = answer["choices"][0]
        content = (choice.get("logprobs") or {}).get("content")
        ids = _ints(choice.get("token_ids"))
        return _checked(
            Answered(
                text=choice["text"],
                finish_reason=_reason(choice.get("finish_reason")),
                token_ids=ids,
                logprobs=_floats(entry["logprob"] for entry in content) if content else None,
                token_texts=tuple(entry.get("token", "") for entry in content or ()),
                weights=_weights(choice, {}),
                sampled_tokens=len(ids or ()),
            )
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable("/inference/v1/generate", answer, error) from error


def read_generate(answer: Any) -> Answered:  # noqa: ANN401 - JSON
    """Read an answer of SGLang's ``/generate``; raises as ``read_chat``."""
    try:
        meta = answer["meta_info"]
        ids, logprobs = _pairs(meta)
        return _checked(
            Answered(
                text=answer["text"],
                finish_reason=_reason((meta.get("finish_reason") or {}).get("type")),
                token_ids=ids if ids is not None else _ints(answer.get("output_ids")),
                logprobs=logprobs,
                weights=_weights(meta, meta),
                prompt_tokens=int(meta.get("prompt_tokens") or 0),
                sampled_tokens=int(meta.get("completion_tokens") or 0),
                cached_tokens=_count(meta.get("cached_tokens")),
            )
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable("/generate", answer, error) from error


def _pairs(
    meta: dict[str, Any],
) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Return ids and log-probabilities as SGLang pairs them."""
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        return None, None
    return _ints(pair[1] for pair in pairs), _floats(pair[0] for pair in pairs)


def _checked(answered: Answered) -> Answered:
    ids, logprobs = answered.token_ids, answered.logprobs
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities")
    return answered


def _reason(said: str | None) -> FinishReason:
    return _REASONS.get(said or "stop", FinishReason.STOP)


def _ints(values: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - JSON
    if values is None:
        return None
    found = tuple(values)
    if not all(type(value) is int for value in found):
        raise ValueError("token ids that are no integers")
    return found


def _floats(values: Any) -> tuple[float, ...]:  # noqa: ANN401 - JSON
    return tuple(float(value) for value in values)


def _weights(choice: dict[str, Any], other: dict[str, Any]) -> tuple[WeightSpan, ...]:
    spans = choice.get("weight_versions")
    if spans:
        return tuple(WeightSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
    version = other.get("weight_version")
    return (WeightSpan(str(version), 0, -1),) if version is not None else ()


def _used(answer: dict[str, Any], field: str) -> int:
    return int((answer.get("usage") or {}).get(field) or 0)


def _cached(answer: dict[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return _count(details.get("cached_tokens"))


def _count(said: Any) -> int | None:  # noqa: ANN401 - JSON
    return None if said is None else int(said)


def _unreadable(route: str, answer: object, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"an answer of {route} cannot be used ({type(error).__name__}: {error}): {answer!r:.300}"
    )
