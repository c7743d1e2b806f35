"""Going on with a turn that was aborted: what is asked for then, and how the parts are one turn.

What was sampled is what is shown: the rest is asked for by the prompt's exact ids and the ids
sampled so far. The seam must be one that hides nothing: half a character, or the beginning of a
stop text that the model's own check would not see whole, is given back and sampled again.

The seed of the rest follows from the turn's seed and from how many tokens it has: with the turn's
own seed an engine would draw again the numbers it began the turn with. (An engine whose numbers
are counted per token keeps the turn's seed and goes on counting.)
"""

from array import array
from hashlib import blake2b

import msgspec

from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    VersionSpan,
)

SEAM_TOKENS_MAX = 8
"""Tokens given back at a seam, at most; where that is not enough the turn is sampled anew."""
_HALF = "\ufffd"
_ID_BYTES = 4


def is_aborted(generation: Generation) -> bool:
    """Whether ``generation`` is the beginning of a turn only."""
    return generation.finish_reason is FinishReason.ABORTED


def fresh_tokens(request: GenerateRequest, generation: Generation) -> int:
    """Return how many tokens ``generation`` holds that were not begun before."""
    begun = request.begun
    if begun is None or not generation.token_ids.startswith(begun.token_ids):
        return generation.token_count
    return generation.token_count - begun.token_count


def rest_of(request: GenerateRequest) -> GenerateRequest:
    """Return the request for what follows ``begun``: exact ids, fewer tokens, a seed of its own."""
    begun = request.begun
    if begun is None:
        return request
    count = begun.token_count
    sampling = msgspec.structs.replace(
        request.sampling, tokens_max=request.sampling.tokens_max - count
    )
    return msgspec.structs.replace(
        request,
        begun=None,
        prompt_ids=begun.prompt_ids + begun.token_ids,
        known_messages=len(request.messages),
        sampling=sampling,
        seed=rest_seed(request.seed, count),
    )


def rest_seed(seed: int, count: int) -> int:
    """Return the seed of what follows the first ``count`` tokens of a turn with ``seed``."""
    digest = blake2b(f"{seed}\0{count}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def joined(begun: Generation | None, rest: Generation) -> Generation:
    """Return the turn that begins with ``begun``; how it ended and its calls are ``rest``'s.

    Log-probabilities are kept where both parts have them, of the same kind.
    """
    if begun is None:
        return rest
    known = begun.logprob_kind is rest.logprob_kind or not rest.token_ids
    return msgspec.structs.replace(
        rest,
        text=begun.text + rest.text,
        prompt_ids=begun.prompt_ids,
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=begun.logprobs + rest.logprobs if known else b"",
        logprob_kind=begun.logprob_kind if known else LogprobKind.NONE,
        spans=_one_after_another(begun.spans, rest.spans, begun.token_count),
        rerendered=begun.rerendered,
        cached_tokens=None,  # of the rest's prompt, which is no turn's
    )


def cut(generation: Generation, count: int) -> Generation:
    """Return ``generation`` with its first ``count`` tokens only."""
    return msgspec.structs.replace(
        generation,
        token_ids=generation.token_ids[: count * _ID_BYTES],
        logprobs=generation.logprobs[: count * _ID_BYTES],
        spans=tuple(
            VersionSpan(span.policy_version, span.start, min(span.end, count))
            for span in generation.spans
            if span.start < count
        ),
    )


def is_seam(text: str, stops: tuple[str, ...]) -> bool:
    """Whether a turn may be cut after ``text``: no half character, no stop text begun."""
    if text.endswith(_HALF):
        return False
    return not any(text.endswith(stop[:count]) for stop in stops for count in range(1, len(stop)))


def ids_of(packed: bytes) -> "array[int]":
    """Return packed ids as an array."""
    return array("i", packed)


def _one_after_another(
    first: tuple[VersionSpan, ...], then: tuple[VersionSpan, ...], at: int
) -> tuple[VersionSpan, ...]:
    moved = [VersionSpan(span.policy_version, span.start + at, span.end + at) for span in then]
    if first and moved and first[-1].policy_version == moved[0].policy_version:
        met = moved.pop(0)
        return (*first[:-1], VersionSpan(met.policy_version, first[-1].start, met.end), *moved)
    return (*first, *moved)
