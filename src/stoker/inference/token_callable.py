"""A model of the embedding process that takes and gives token ids, and a renderer beside it.

verl's ``server_manager.generate`` and its like know no messages: they sample after ids. The
renderer makes the prompt and reads the answer; what was sampled is what the next turn is asked
with. What the function returns is checked where it enters, as ``CallableModel`` does.
"""

from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from stoker.errors import ModelUnavailable
from stoker.inference.callable import CallableModel, Interrupt, thrown_away
from stoker.inference.continuing import (
    SEAM_TOKENS_MAX,
    cut,
    is_aborted,
    is_seam,
    joined,
    rest_of,
)
from stoker.inference.tokens.base import RenderedPrompt, Renderer
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    Sampling,
    VersionSpan,
)


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of ids is asked."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    """``stop`` holds texts: an engine that ends at ids only need not heed them."""
    seed: int
    stop_ids: frozenset[int]
    """The turn ends with any of them; it is part of what was sampled."""
    priority: int
    """Smaller goes first."""


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What it sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """One per id; ``None``: it gives none."""
    finish_reason: FinishReason | None = None
    """``None``: ended by a stop id or by its length, as the ids say."""
    policy_version: int = 0
    """Of all the ids."""
    spans: tuple[VersionSpan, ...] = ()
    """Instead, where the weights changed while it sampled."""


GenerateIds = Callable[[TokenRequest], Awaitable[TokenAnswer]]


class TokenCallable(CallableModel):
    """``CallableModel`` for a function from ids to ids; ``renderer`` is ``open_renderer``'s.

    ``logprob_kind`` is what the engine's log-probabilities are: ``raw`` before temperature,
    ``sampled`` after. What it aborted, by ``interrupt`` or of itself, is gone on from: its ids are
    part of the next prompt.
    """

    def __init__(
        self,
        generate_ids: GenerateIds,
        renderer: Renderer,
        *,
        window: int,
        name: str = "callable",
        logprob_kind: LogprobKind = LogprobKind.SAMPLED,
        kv_tokens: int | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__(
            self._sampled,
            window=window,
            name=name,
            logprob_kind=logprob_kind,
            kv_tokens=kv_tokens,
            interrupt=interrupt,
        )
        self._generate_ids = generate_ids
        self._renderer = renderer
        self._logprob_kind = logprob_kind

    async def _sampled(self, request: GenerateRequest) -> Generation:
        begun, rest = request.begun, rest_of(request)
        if begun is None:
            prompt = self._renderer.prompt(request)
        else:
            prompt = RenderedPrompt(ids=array("i", rest.prompt_ids), rerendered=False)
        asked = TokenRequest(
            request_id=request.request_id,
            prompt_ids=prompt.ids.tolist(),
            sampling=rest.sampling,
            seed=rest.seed,
            stop_ids=self._renderer.stop_ids,
            priority=request.priority,
        )
        answer = await self._generate_ids(asked)
        ids, logprobs = _arrays(answer, request.request_id)
        whole = (VersionSpan(answer.policy_version, 0, len(ids)),) if ids else ()
        sampled = Generation(
            text="",
            finish_reason=_reason(answer, ids, rest, self._renderer.stop_ids),
            prompt_ids=prompt.ids.tobytes(),
            token_ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
            logprob_kind=self._logprob_kind if logprobs else LogprobKind.NONE,
            spans=answer.spans or whole,
            rerendered=prompt.rerendered,
        )
        if is_aborted(sampled):
            sampled = self._up_to_a_seam(request, sampled)
        return self._read(request, joined(begun, sampled))

    def _read(self, request: GenerateRequest, turn: Generation) -> Generation:
        """Return ``turn`` with its text and calls, which only all of its ids say."""
        if is_aborted(turn):
            return turn
        read = self._renderer.read(array("i", turn.token_ids), request)
        reason = turn.finish_reason
        if reason in {FinishReason.STOP, FinishReason.TOOL_CALLS}:
            reason = FinishReason.TOOL_CALLS if read.tool_calls else FinishReason.STOP
        return msgspec.structs.replace(
            turn, text=read.text, tool_calls=read.tool_calls, finish_reason=reason
        )

    def _up_to_a_seam(self, request: GenerateRequest, part: Generation) -> Generation:
        """Return ``part`` up to where its turn may be cut.

        Raises:
            ModelUnavailable: that leaves nothing.
        """
        ids = array("i", part.token_ids)
        for given_back in range(min(SEAM_TOKENS_MAX, len(ids))):
            kept = ids[: len(ids) - given_back]
            if is_seam(self._renderer.text(kept), request.sampling.stop):
                return cut(part, len(kept))
        raise thrown_away(request.request_id, len(ids))


def _arrays(answer: TokenAnswer, request_id: str) -> tuple["array[int]", "array[float]"]:
    """Return ids and log-probabilities of an answer, checked.

    Raises:
        ModelUnavailable: what came back is no answer.
    """
    if not isinstance(answer, TokenAnswer):
        raise _unusable(request_id, f"{answer!r:.100} is no TokenAnswer")
    ids, logprobs = (
        array("i", answer.token_ids),
        array("f", answer.logprobs if answer.logprobs is not None else ()),
    )
    if answer.logprobs is not None and len(logprobs) != len(ids):
        raise _unusable(request_id, f"{len(ids)} token ids and {len(logprobs)} log-probabilities")
    if ids and min(ids) < 0:
        raise _unusable(request_id, f"{min(ids)} is no token id")
    return ids, logprobs


def _unusable(request_id: str, problem: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the engine returned for call {request_id} what cannot be used: {problem}",
        request_id=request_id,
    )


def _reason(
    answer: TokenAnswer, ids: "array[int]", request: GenerateRequest, stop_ids: frozenset[int]
) -> FinishReason:
    """Return why it ended. What was whole when it was aborted has ended: no more may be asked."""
    said = answer.finish_reason
    stopped = bool(ids) and ids[-1] in stop_ids
    full = len(ids) >= request.sampling.tokens_max
    if said is None or (said is FinishReason.ABORTED and (stopped or full)):
        return FinishReason.LENGTH if full and not stopped else FinishReason.STOP
    return said
