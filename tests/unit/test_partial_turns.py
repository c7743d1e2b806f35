"""Turns that are aborted go on from what they had: at our word, and at the engine's own."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from stoker.coordinator.lane import Lane
from stoker.coordinator.lane_tries import TakenBack
from stoker.errors import ModelUnavailable
from stoker.inference.callable import CallableModel, flaw
from stoker.inference.continuing import cut, is_seam, joined, rest_of
from stoker.inference.http.model import HttpModel
from stoker.inference.http.rendering import Renderer
from stoker.inference.token_callable import TokenAnswer, TokenCallable, TokenRequest
from stoker.inference.tokens.base import Reading, RenderedPrompt
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    VersionSpan,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import EngineCall, Features
from stoker.testing.virtual_clock import run_virtual
from support.inference import RUN_PYTHON, lane_over, request
from support.served import serving

SECONDS = 0.002
"""Of a token: long enough that a turn is caught in its middle."""
TEXT = "0123456789" * 20
CALL = (
    '<tool_call>\n{"name": "run_python", "arguments": {"code": "' + "9" * 120 + '"}}\n</tool_call>'
)
SERVERS = {
    "vllm": (Features(), {}),
    "vllm-scaled-out": (Features(scale_out=True, development=False), {"api": "generate"}),
    "sglang": (Features(flavour="sglang"), {}),
}
servers = pytest.mark.parametrize(("features", "settings"), SERVERS.values(), ids=SERVERS)


def following(model: HttpModel) -> Lane:
    """Return a lane that follows the model's pauses, as the coordinator makes it."""
    lane = lane_over(model)
    model.watch_pauses(lane.pause, lane.resume)
    return lane


async def taken_back_under_way(
    server: OpenAIServer, lane: Lane, asked: GenerateRequest, *, tokens: int = 5
) -> tuple[Generation, TakenBack]:
    """Ask, take the call back when it has ``tokens``, and give the weights another name."""
    call = asyncio.create_task(lane.generate(asked, (0,)))
    await server.engine.until_sampled(tokens)
    lane.pause("test")
    ended = await lane.take_back()
    await lane.until_idle()
    server.engine.weight_version = "step-7"
    lane.resume("test")
    return await call, ended


def sampled(server: OpenAIServer) -> list[EngineCall]:
    """Return the calls of one rollout: without those of the model's start."""
    return [call for call in server.engine.calls if call.request_id.startswith("rol_")]


# --- servers ----------------------------------------------------------------------------------


@servers
@pytest.mark.parametrize("said", [TEXT, CALL], ids=["text", "call"])
def test_c5_a_turn_taken_back_goes_on_under_the_new_weights(
    features: Features, settings: dict[str, Any], said: str
) -> None:
    async def main() -> tuple[Generation, TakenBack, list[EngineCall]]:
        policy: Any = {"text": said}
        async with serving(
            lambda _: policy, features=features, settings=settings, token_seconds=SECONDS,
            odd_ids=True,
        ) as (server, model):  # fmt: skip
            asked = request(tools=(RUN_PYTHON,), seed=3)
            turn, ended = await taken_back_under_way(server, following(model), asked)
            return turn, ended, sampled(server)

    turn, ended, (first, then) = asyncio.run(main())
    count = len(first.tokens)
    assert ended == TakenBack(continued=1, anew=0)
    assert first.aborted
    assert 5 <= count < turn.token_count
    assert unpack_tokens(turn.token_ids) == first.tokens + then.tokens, (
        "nothing twice, nothing lost"
    )
    assert unpack_tokens(turn.prompt_ids) == first.prompt
    assert then.prompt == first.prompt + first.tokens, "the rest is asked for by exact ids"
    assert turn.text == said
    assert [call.name for call in turn.tool_calls] == (["run_python"] if said is CALL else [])
    assert turn.spans == (VersionSpan(0, 0, count), VersionSpan(7, count, turn.token_count))
    assert flaw(turn) == ""
    assert len(unpack_logprobs(turn.logprobs)) == turn.token_count
    assert not turn.reissued, "nothing was lost"
    ends = FinishReason.TOOL_CALLS if said is CALL else FinishReason.STOP
    assert turn.finish_reason is ends


@servers
def test_c5_the_limit_of_tokens_is_that_of_the_whole_turn(
    features: Features, settings: dict[str, Any]
) -> None:
    async def main() -> Generation:
        async with serving(TEXT, features=features, settings=settings, token_seconds=SECONDS) as (
            server,
            model,
        ):
            asked = request(tokens_max=40)
            return (await taken_back_under_way(server, following(model), asked))[0]

    turn = asyncio.run(main())
    assert (turn.token_count, turn.finish_reason) == (40, FinishReason.LENGTH)
    assert turn.text == TEXT[:40]


@servers
def test_c1_a_turn_the_server_aborts_of_itself_goes_on(
    features: Features, settings: dict[str, Any]
) -> None:
    async def main() -> tuple[Generation, int, int]:
        async with serving(TEXT, features=features, settings=settings, token_seconds=SECONDS) as (
            server,
            model,
        ):
            lane = following(model)
            call = asyncio.create_task(lane.generate(request(), (0,)))
            for _ in range(2):
                await server.engine.until_sampled(5)
                await server.engine.until_in_flight(1)
                server.engine.end()
                await server.engine.until_quiet()
            turn, totals = await call, lane.totals()
            assert (totals.continued, totals.anew, totals.calls) == (2, 0, 1)
            assert totals.tokens == turn.token_count, "each counted once"
            return turn, totals.retries, totals.failures

    turn, retries, failures = asyncio.run(main())
    assert turn.text == TEXT
    assert (retries, failures) == (0, 0), "the server did nothing wrong"


@pytest.mark.parametrize(
    ("features", "settings", "tools"),
    [
        (Features(), {"api": "chat"}, ()),
        (Features(tokenizes=False), {}, ()),
        (Features(development=False), {}, ()),
        (Features(), {"tool_calls": "server"}, (RUN_PYTHON,)),
    ],
    ids=["by chat alone", "no ids taken", "no aborts", "calls that only the server reads"],
)
def test_c5_what_cannot_be_gone_on_from_is_asked_anew(
    features: Features, settings: dict[str, Any], tools: Any
) -> None:
    async def main() -> tuple[Generation, TakenBack, int, int]:
        async with serving(TEXT, features=features, settings=settings, token_seconds=SECONDS) as (
            server,
            model,
        ):
            lane = following(model)
            turn, ended = await taken_back_under_way(server, lane, request(tools=tools))
            return turn, ended, len(sampled(server)), lane.totals().failures

    turn, ended, calls, failures = asyncio.run(main())
    assert (ended, calls, failures) == (TakenBack(continued=0, anew=1), 2, 0)
    assert [(span.start, span.end) for span in turn.spans] == [(0, turn.token_count)]
    assert turn.text == TEXT
    assert turn.reissued


def test_c5_half_a_character_and_half_a_stop_text_are_sampled_again() -> None:
    async def main(text: str, stop: str, tokens: int) -> tuple[Generation, list[EngineCall]]:
        async with serving(text, token_seconds=SECONDS, settings={"scrape": "1h"}) as (
            server,
            model,
        ):
            asked = request(stop=(stop,) if stop else ())
            call = asyncio.create_task(model.generate(0, asked))
            await server.engine.until_sampled(tokens)
            server.engine.end()
            part = await call
            rest = await model.generate(0, begun_with(asked, part))
            return rest, sampled(server)

    turn, (first, then) = asyncio.run(main("a\u2603" * 40, "", 6))
    assert turn.text == "a\u2603" * 40
    kept = len(then.prompt) - len(first.prompt)
    assert 0 <= len(first.tokens) - kept < 3
    assert kept % 4 in {0, 1}, "between two characters"
    turn, (first, then) = asyncio.run(main("ab" * 40 + "END" + "c" * 9, "bac", 6))
    assert (len(then.prompt) - len(first.prompt)) % 2 == 1, "after an a: ba may become bac"
    assert turn.text == "ab" * 40 + "END" + "c" * 9


def test_c5_a_part_that_begins_with_a_space_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text_of = Renderer.text

    async def as_sentencepiece(self: Renderer, ids: "array[int]") -> str:
        return (await text_of(self, ids)).removeprefix(" ")  # of what it is given, the first

    monkeypatch.setattr(Renderer, "text", as_sentencepiece)

    async def main() -> Generation:
        async with serving("x" + " " * 200, token_seconds=SECONDS) as (server, model):
            call = asyncio.create_task(following(model).generate(request(), (0,)))
            for _ in range(2):
                await server.engine.until_sampled(5)
                await server.engine.until_in_flight(1)
                server.engine.end()
                await server.engine.until_quiet()
            return await call

    assert asyncio.run(main()).text == "x" + " " * 200


def begun_with(asked: GenerateRequest, begun: Generation) -> GenerateRequest:
    """Return ``asked`` with what was begun of its turn."""
    assert begun.finish_reason is FinishReason.ABORTED
    return msgspec.structs.replace(asked, begun=begun)


# --- engines of this process ------------------------------------------------------------------


class Letters:
    """Every id is a letter, and 9 ends a turn."""

    stop_ids = frozenset({9})

    def prompt(self, asked: GenerateRequest) -> RenderedPrompt:
        return RenderedPrompt(ids=array("i", [1, 2]), rerendered=True)

    def read(self, token_ids: "array[int]", asked: GenerateRequest) -> Reading:
        return Reading(text=self.text(token_ids))

    def text(self, token_ids: "array[int]") -> str:
        return "".join(chr(96 + one) for one in token_ids if one != 9)


class IdEngine:
    """Samples 3, 4, 5, 6, 9, one a second, until it is told to abort; as ``version``."""

    def __init__(self) -> None:
        self.asked: list[TokenRequest] = []
        self.version = 1
        self._abort = asyncio.Event()

    async def generate_ids(self, asked: TokenRequest) -> TokenAnswer:
        self.asked.append(asked)
        self._abort.clear()
        ids: list[int] = []
        for token in [3, 4, 5, 6, 9][len(asked.prompt_ids) - 2 :][: asked.sampling.tokens_max]:
            try:
                async with asyncio.timeout(1):
                    await self._abort.wait()
                return self._answer(ids, FinishReason.ABORTED)
            except TimeoutError:
                ids.append(token)
        return self._answer(ids, None)

    async def abort(self) -> None:
        self._abort.set()

    def _answer(self, ids: Sequence[int], reason: FinishReason | None) -> TokenAnswer:
        return TokenAnswer(
            token_ids=ids,
            logprobs=[-float(one) for one in ids],
            finish_reason=reason,
            policy_version=self.version,
        )


def test_c5_an_engine_of_ids_goes_on_with_ids_and_a_seed_of_the_rest_s_own() -> None:
    async def main() -> tuple[Generation, list[TokenRequest]]:
        engine = IdEngine()
        model = TokenCallable(engine.generate_ids, Letters(), window=1, interrupt=engine.abort)
        lane = lane_over(model)
        call = asyncio.create_task(lane.generate(request(seed=5, tokens_max=30), (0,)))
        await asyncio.sleep(2.5)
        lane.pause("test")
        assert await lane.take_back() == TakenBack(continued=1, anew=0)
        engine.version = 2
        lane.resume("test")
        return await call, engine.asked

    turn, (first, then) = run_virtual(main())
    assert unpack_tokens(turn.token_ids) == [3, 4, 5, 6, 9]
    assert unpack_logprobs(turn.logprobs) == [-3, -4, -5, -6, -9]
    assert turn.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 5))
    assert (turn.text, turn.finish_reason) == ("cdef", FinishReason.STOP)
    assert turn.rerendered, "as its beginning was"
    assert then.prompt_ids == [1, 2, 3, 4]
    assert then.sampling.tokens_max == 28
    assert first.seed == 5
    assert then.seed not in {5, first.seed}


@pytest.mark.parametrize(
    ("ids", "reason"), [([3, 4, 9], FinishReason.STOP), ([3, 4, 5, 6], FinishReason.LENGTH)]
)
def test_c5_a_turn_that_is_whole_when_it_is_aborted_is_not_gone_on_with(
    ids: list[int], reason: FinishReason
) -> None:
    asked: list[TokenRequest] = []

    async def generate_ids(one: TokenRequest) -> TokenAnswer:
        asked.append(one)
        return TokenAnswer(token_ids=ids, finish_reason=FinishReason.ABORTED)

    async def main() -> Generation:
        model = TokenCallable(generate_ids, Letters(), window=1)
        return await lane_over(model).generate(request(tokens_max=4), (0,))

    turn = run_virtual(main())
    assert (unpack_tokens(turn.token_ids), turn.finish_reason, len(asked)) == (ids, reason, 1)


def test_c5_an_owner_s_function_is_given_what_was_begun_and_may_pass_over_it() -> None:
    seen: list[Generation | None] = []

    async def main(*, heeds: bool) -> Generation:
        async def generate(asked: GenerateRequest) -> Generation:
            seen.append(asked.begun)
            if asked.begun is None:
                return part([1, 2], FinishReason.ABORTED, version=1)
            rest = part([3], FinishReason.STOP, version=2)
            return joined(asked.begun, rest) if heeds else rest

        return await lane_over(CallableModel(generate, window=1)).generate(request(), (0,))

    whole = run_virtual(main(heeds=True))
    assert not whole.reissued
    assert unpack_tokens(whole.token_ids) == [1, 2, 3]
    assert whole.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))
    anew = run_virtual(main(heeds=False))
    assert (unpack_tokens(anew.token_ids), anew.reissued) == ([3], True), "sampled anew"
    assert [begun is not None for begun in seen] == [False, True] * 2


def test_c1_an_engine_that_aborts_for_ever_is_a_failure_in_the_end() -> None:
    async def main() -> None:
        async def generate(asked: GenerateRequest) -> Generation:
            return part([asked.begun is None, 7], FinishReason.ABORTED, version=1)

        lane = lane_over(CallableModel(generate, window=1), retries=2)
        with pytest.raises(ModelUnavailable, match=r"failed 3 times.*came no further"):
            await lane.generate(request(), (0,))

    run_virtual(main())


def test_c1_an_engine_that_aborts_past_the_limit_of_tokens_is_a_failure_in_the_end() -> None:
    asked: list[int] = []

    async def main() -> None:
        async def generate(one: GenerateRequest) -> Generation:
            asked.append(one.begun.token_count if one.begun is not None else 0)
            assert len(asked) < 20, "for ever"
            return joined(one.begun, part([7], FinishReason.ABORTED, version=1))

        lane = lane_over(CallableModel(generate, window=1), retries=1)
        with pytest.raises(ModelUnavailable, match=r"failed 2 times.*came no further"):
            await lane.generate(request(tokens_max=3), (0,))

    run_virtual(main())
    assert asked == [0, 1, 2, 3, 3]


def test_an_engine_that_does_not_let_go_is_cancelled() -> None:
    async def main() -> float:
        async def generate(asked: GenerateRequest) -> Generation:
            if asks.pop():
                await asyncio.sleep(1000)
            return part([1], FinishReason.STOP, version=2)

        async def deaf() -> None:
            pass

        asks = [False, True]
        lane = lane_over(CallableModel(generate, window=1, interrupt=deaf))
        call = asyncio.create_task(lane.generate(request(), (0,)))
        await asyncio.sleep(1)
        lane.pause("test")
        began = asyncio.get_running_loop().time()
        assert await lane.take_back() == TakenBack(continued=0, anew=1)
        took = asyncio.get_running_loop().time() - began
        lane.resume("test")
        assert (await call).reissued
        return took

    assert run_virtual(main()) == pytest.approx(5)


# --- the parts themselves ---------------------------------------------------------------------


def part(ids: list[int], reason: FinishReason, *, version: int) -> Generation:
    return Generation(
        text="",
        finish_reason=reason,
        prompt_ids=pack_tokens([7]),
        token_ids=pack_tokens(ids),
        logprobs=pack_logprobs([-1.0] * len(ids)),
        logprob_kind=LogprobKind.SAMPLED,
        spans=(VersionSpan(version, 0, len(ids)),) if ids else (),
    )


def test_parts_of_one_version_are_one_span_and_a_cut_keeps_arrays_equal() -> None:
    one = part([1, 2, 3], FinishReason.ABORTED, version=4)
    whole = joined(cut(one, 2), part([5], FinishReason.LENGTH, version=4))
    assert whole.spans == (VersionSpan(4, 0, 3),)
    assert flaw(whole) == ""
    assert joined(one, part([], FinishReason.LENGTH, version=4)).logprobs == one.logprobs
    bare = joined(
        one, Generation(text="", token_ids=pack_tokens([5]), spans=(VersionSpan(4, 0, 1),))
    )
    assert (bare.logprobs, bare.logprob_kind) == (b"", LogprobKind.NONE), "never shifted arrays"


def test_the_seed_of_the_rest_depends_on_the_turn_and_the_place() -> None:
    begun = part([1, 2], FinishReason.ABORTED, version=1)
    asked = msgspec.structs.replace(request(seed=9), begun=begun)
    longer = msgspec.structs.replace(asked, begun=part([1, 2, 3], FinishReason.ABORTED, version=1))
    other = msgspec.structs.replace(asked, seed=10)
    seeds = [rest_of(one).seed for one in (asked, asked, longer, other)]
    assert seeds[0] == seeds[1]
    assert len({9, 10, *seeds}) == 5


@pytest.mark.parametrize(
    ("text", "stops", "fine"),
    [
        ("abc", (), True),
        ("ab\ufffd", (), False),
        ("ab", ("bc",), False),
        ("abc", ("bc",), True),  # whole: the engine's own check has seen it
        ("ab", ("",), True),
        ("", ("bc",), True),
    ],
)
def test_a_turn_may_be_cut_where_nothing_is_half(
    text: str, stops: tuple[str, ...], *, fine: bool
) -> None:
    assert is_seam(text, stops) is fine
