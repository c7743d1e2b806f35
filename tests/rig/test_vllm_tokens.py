"""Exact ids on a real server: what it sampled is what it is shown, whatever a tokenizer says."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec

from stoker.inference.http.model import HttpModel
from stoker.model.generation import (
    Generation,
    LogprobKind,
    Message,
    Role,
    VersionSpan,
    unpack_logprobs,
    unpack_tokens,
)
from support.served import grown
from support.vllm_calls import MORE, asked, asking, at, say
from support.vllm_server import NAME, Server

SEEDS = range(1, 9)
TURNS = 3
HOT = 2.0


class Told(msgspec.Struct):
    """One history as it went."""

    turns: list[Generation]
    messages: tuple[Message, ...]
    """The history that the last turn was asked with."""


async def conversation(model: HttpModel, seed: int) -> Told:
    """Sample ``TURNS`` turns, hot enough that words come in pieces no tokenizer would choose."""
    request = asked(f"rol_{seed}", temperature=HOT, tokens_max=10, seed=seed)
    told = Told(turns=[await model.generate(0, request)], messages=request.messages)
    for _ in range(TURNS - 1):
        more = grown(told.turns[-1], MORE, before=told.messages, tokens_max=10, seed=seed)
        more = at(HOT, more)
        told.turns.append(await model.generate(0, more))
        told.messages = more.messages
    return told


def test_c4_histories_that_retokenise_differently_continue_by_exact_ids(
    main_server: Server,
) -> None:
    async def main() -> tuple[list[Told], list[Any], list[list[int]]]:
        async with asking(main_server) as model:
            posted = noted(model)
            told = await asyncio.gather(*(conversation(model, seed) for seed in SEEDS))
            anew = [
                await model.replicas[0].link.post(
                    "/tokenize", {"model": NAME, "messages": _plain(one.messages)}
                )
                for one in told
            ]
            return told, posted, [one["tokens"] for one in anew]

    told, posted, anew = asyncio.run(main())
    for one in told:
        for before, after in pairwise(one.turns):
            assert after.prompt_ids.startswith(before.prompt_ids + before.token_ids)
            assert not after.rerendered
        for turn in one.turns:
            assert turn.token_count == len(unpack_logprobs(turn.logprobs)) > 0
            assert turn.spans == (VersionSpan(turn.spans[0].policy_version, 0, turn.token_count),)
            assert turn.logprob_kind is LogprobKind.RAW
    by_ids = [(body, answer) for path, body, answer in posted if path == "/v1/completions"]
    assert len(by_ids) == len(SEEDS) * (TURNS - 1)
    for body, answer in by_ids:  # the server says what it was shown
        assert answer["choices"][0]["prompt_token_ids"] == body["prompt"]
    last = [unpack_tokens(one.turns[-1].prompt_ids) for one in told]
    differ = [shown[: len(ids)] != ids for shown, ids in zip(anew, last, strict=True)]
    assert any(differ), "no history re-tokenises differently: nothing was shown"
    say(f"{sum(differ)} of {len(differ)} histories re-tokenise differently")


def noted(model: HttpModel) -> list[tuple[str, Any, Any]]:
    """Return a list that fills with what is posted from now on, and answered."""
    posted: list[tuple[str, Any, Any]] = []
    link = model.replicas[0].link
    honest = link.post

    async def noting(path: str, body: Any, request_id: str = "") -> Any:
        answer = await honest(path, body, request_id)
        posted.append((path, body, answer))
        return answer

    link.post = noting  # type: ignore[method-assign]
    return posted


def _plain(history: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": one.role.value, "content": one.content} for one in history]


def test_c4_a_turn_that_was_cut_is_ended_as_the_template_ends_it(main_server: Server) -> None:
    async def main() -> tuple[Generation, Generation, list[int]]:
        async with asking(main_server) as model:
            one = await model.generate(0, asked(tokens_max=3))
            history = asked().messages
            two = await model.generate(0, grown(one, MORE, before=history, tokens_max=3))
            answer = Message(role=Role.ASSISTANT, content=one.text)
            body = {"model": NAME, "messages": _plain((*history, answer, MORE))}
            rendered = await model.replicas[0].link.post("/tokenize", body)
            return one, two, rendered["tokens"]

    one, two, rendered = asyncio.run(main())
    known = one.prompt_ids + one.token_ids
    assert two.prompt_ids.startswith(known)
    # This short text happens to be tokenised as it was sampled, so the two ways must agree.
    assert unpack_tokens(two.prompt_ids) == rendered
