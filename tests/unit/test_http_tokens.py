"""Exact ids, spans, tool calls: what a trainer is given is what the server sampled."""

import asyncio
from typing import Any

import pytest

from stoker.errors import ModelUnavailable
from stoker.inference.policy import Answer, AnswerCall
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    Message,
    Role,
    VersionSpan,
    unpack_logprobs,
    unpack_tokens,
)
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import RUN_PYTHON, request
from support.served import grown, opening, serving

MORE = Message(role=Role.USER, content="more")
ID_FLAVOURS = pytest.mark.parametrize("flavour", ["vllm", "sglang"])


async def two_turns(
    features: Features, said: Any = "first", *, settings: dict[str, Any] | None = None, **keys: Any
) -> tuple[Generation, Generation, OpenAIServer]:
    """Sample two turns of one history under ids that a re-tokenisation would change."""
    async with serving(said, features=features, settings=settings, odd_ids=True) as (server, model):
        one = await model.generate(0, request(messages=opening(), **keys))
        two = await model.generate(0, grown(one, MORE, **keys))
        return one, two, server


def test_c4_the_route_that_says_each_tokens_weights_keeps_exact_ids() -> None:
    features = Features(scale_out=True)
    one, two, server = asyncio.run(two_turns(features, settings={"api": "generate"}))
    assert two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert not two.rerendered
    for said in (one, two):
        count = said.token_count
        assert count == len(unpack_logprobs(said.logprobs)) == said.spans[-1].end > 0
        assert said.text == "first"
    sampling = [asked.path for asked in server.requests if asked.path.endswith("e/v1/generate")]
    assert len(sampling) == 3  # the trial and both turns


@ID_FLAVOURS
@pytest.mark.parametrize("api", ["auto", "ids"])
def test_c4_turn_two_shows_exactly_the_sampled_ids(flavour: Any, api: str) -> None:
    route = {"vllm": "completions", "sglang": "generate"}[flavour]
    settings = {"api": route if api == "ids" else "auto"}
    one, two, server = asyncio.run(two_turns(Features(flavour=flavour), settings=settings))
    known = one.prompt_ids + one.token_ids
    assert unpack_tokens(one.token_ids)[0] > 511  # sampled ids are not the rendered ones
    assert two.prompt_ids.startswith(known)
    assert not two.rerendered
    assert unpack_tokens(two.prompt_ids[len(known) :]) == [257, *b"more", 260, 258]
    assert server.engine.calls[-1].prompt == unpack_tokens(two.prompt_ids)
    for said in (one, two):
        count = said.token_count
        assert count == len(unpack_logprobs(said.logprobs)) == said.spans[-1].end


def test_c4_ids_under_sglangs_first_names_are_as_exact() -> None:
    features = Features(flavour="sglang", early_sglang=True)
    one, two, _ = asyncio.run(two_turns(features))
    assert one.token_count == len(unpack_logprobs(one.logprobs)) == 6
    assert two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert not two.rerendered


@ID_FLAVOURS
@pytest.mark.parametrize("api", ["auto", "ids"])
def test_c4_a_history_that_is_rerendered_is_the_servers_rendering(flavour: Any, api: str) -> None:
    route = {"vllm": "completions", "sglang": "generate"}[flavour]
    settings = {"api": route if api == "ids" else "auto", "history": "rerender"}
    one, two, _ = asyncio.run(two_turns(Features(flavour=flavour), settings=settings))
    assert two.rerendered
    assert not two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert unpack_tokens(two.prompt_ids)[-8:] == [260, 257, *b"more", 260, 258]
    assert b"first" in bytes(one for one in unpack_tokens(two.prompt_ids) if one < 256)


@ID_FLAVOURS
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_c4_a_turn_that_was_cut_is_ended_by_the_bridge(flavour: Any, cut: int) -> None:
    one, two, _ = asyncio.run(two_turns(Features(flavour=flavour), tokens_max=cut))
    known = one.prompt_ids + one.token_ids
    assert one.finish_reason is FinishReason.LENGTH
    assert two.prompt_ids.startswith(known)
    assert unpack_tokens(two.prompt_ids[len(known) :]) == [260, 257, *b"more", 260, 258]


@pytest.mark.parametrize(
    ("features", "settings"),
    [
        (Features(tokenizes=False), {}),
        (Features(), {"api": "chat"}),
        (Features(flavour="openai"), {}),
    ],
    ids=["no tokenize", "chat", "any server"],
)
def test_c4_a_history_that_cannot_be_continued_by_ids_begins_a_segment(
    features: Features, settings: dict[str, Any]
) -> None:
    one, two, _ = asyncio.run(two_turns(features, settings=settings))
    assert not one.rerendered
    assert two.rerendered
    assert not two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert len(unpack_logprobs(two.logprobs)) == two.token_count


@ID_FLAVOURS
def test_c4_a_template_that_drops_thinking_begins_a_segment(flavour: Any) -> None:
    features = Features(flavour=flavour, drops_thinking=True)
    _, two, _ = asyncio.run(two_turns(features, "<think>so</think>yes"))
    assert two.rerendered
    shown = unpack_tokens(two.prompt_ids)
    assert bytes(token for token in shown if token < 256) == b"goyesmore"
    route = {"vllm": "completions", "sglang": "generate"}[flavour]
    forced = asyncio.run(two_turns(features, "<think>so</think>yes", settings={"api": route}))
    assert forced[1].rerendered
    assert forced[1].prompt_ids == two.prompt_ids
    # A tool's result does not end the thinking: the template keeps it, and so do we.
    same = asyncio.run(_after_a_tool(features))
    assert not same.rerendered


async def _after_a_tool(features: Features) -> Generation:
    async with serving("<think>so</think>yes", features=features, odd_ids=True) as (_, model):
        one = await model.generate(0, request(messages=opening()))
        return await model.generate(0, grown(one, Message(role=Role.TOOL, content="seen")))


def test_c4_without_token_ids_nothing_is_made_up() -> None:
    features = Features(flavour="openai", token_ids=False)
    settings = {"require_token_ids": "degrade"}
    one, two, _ = asyncio.run(two_turns(features, settings=settings))
    for said in (one, two):
        assert said.text == "first"
        assert (said.token_ids, said.prompt_ids, said.logprobs, said.spans) == (b"", b"", b"", ())
        assert said.logprob_kind is LogprobKind.NONE
    assert not two.rerendered  # nothing was known that could have been continued


def test_logprobs_say_of_which_kind_they_are() -> None:
    async def kind(features: Features, **settings: str) -> LogprobKind:
        async with serving(features=features, settings=settings) as (_, model):
            said = await model.generate(0, request())
            assert said.logprob_kind is model.info().logprob_kind
            assert bool(said.logprobs) == (said.logprob_kind is not LogprobKind.NONE)
            return said.logprob_kind

    assert asyncio.run(kind(Features())) is LogprobKind.RAW
    assert asyncio.run(kind(Features(flavour="sglang"))) is LogprobKind.SAMPLED
    assert asyncio.run(kind(Features(), logprobs="sampled")) is LogprobKind.SAMPLED
    assert asyncio.run(kind(Features(), logprobs="none")) is LogprobKind.NONE


# --- C5: which weights sampled what -----------------------------------------------------------


@pytest.mark.parametrize(
    "features",
    [Features(), Features(flavour="sglang"), Features(weight_spans=True)],
    ids=["asked", "in the answer", "spans"],
)
def test_c5_weights_that_change_between_turns_are_in_the_spans(features: Features) -> None:
    async def main() -> list[tuple[VersionSpan, ...]]:
        async with serving("four", features=features) as (server, model):
            server.engine.weight_version = "step-7"
            one = await model.generate(0, request(messages=opening()))
            server.engine.weight_version = "step-8"
            two = await model.generate(0, grown(one, MORE))
            assert two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
            return [one.spans, two.spans]

    assert asyncio.run(main()) == [(VersionSpan(7, 0, 5),), (VersionSpan(8, 0, 5),)]


async def _changed_inside_a_turn(features: Features, **settings: Any) -> Generation:
    async with serving("0123456789", features=features, settings=settings, token_seconds=0.001) as (
        server,
        model,
    ):
        server.engine.weight_version = "v1"
        task = asyncio.create_task(model.generate(0, request()))
        await server.engine.until_in_flight(1)
        while len(server.engine.calls[-1].tokens) < 3:
            await asyncio.sleep(0.001)
        server.engine.pause()
        sampled = len(server.engine.calls[-1].tokens)
        server.engine.weight_version = "v2"
        server.engine.resume()
        said = await task
        versions = server.engine.calls[-1].versions
        assert versions == ["v1"] * sampled + ["v2"] * (11 - sampled)
        return said


@pytest.mark.parametrize(
    ("features", "api"),
    [(Features(weight_spans=True), "auto"), (Features(scale_out=True), "generate")],
    ids=["chat", "scale-out"],
)
def test_c5_weights_that_change_inside_a_turn_are_in_its_spans(
    features: Features, api: str
) -> None:
    said = asyncio.run(_changed_inside_a_turn(features, api=api))
    first, second = said.spans
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert (first.start, second.start, second.end) == (0, first.end, 11)


@ID_FLAVOURS
def test_c5_a_server_that_does_not_say_where_understates_no_staleness(flavour: Any) -> None:
    said = asyncio.run(_changed_inside_a_turn(Features(flavour=flavour)))
    assert said.spans == (VersionSpan(1, 0, 11),)


# --- C3: tool calls ---------------------------------------------------------------------------

CALL = Answer(text="try", tool_calls=(AnswerCall(name="run_python", arguments={"code": "1"}),))


@ID_FLAVOURS
def test_c3_tool_calls_of_the_server_and_of_the_text_are_the_same(flavour: Any) -> None:
    one, two, server = asyncio.run(two_turns(Features(flavour=flavour), CALL, tools=(RUN_PYTHON,)))
    for said in (one, two):  # by chat, read by the server; then by ids, read by us
        assert [(c.name, c.arguments) for c in said.tool_calls] == [("run_python", {"code": "1"})]
        assert said.finish_reason is FinishReason.TOOL_CALLS
    assert two.prompt_ids.startswith(one.prompt_ids + one.token_ids)
    assert server.requests[-1].path != "/v1/chat/completions" or flavour == "sglang"


def test_c3_calls_that_only_the_server_reads_are_left_to_it() -> None:
    features = Features(foreign_calls=True)
    one, two, server = asyncio.run(two_turns(features, CALL, tools=(RUN_PYTHON,)))
    assert [call.name for call in one.tool_calls] == ["run_python"]
    assert [call.name for call in two.tool_calls] == ["run_python"]
    assert two.rerendered
    posts = [one.path for one in server.requests if one.method == "POST"]
    assert posts[-1] == "/v1/chat/completions"


def test_c3_a_server_without_a_tool_parser_shows_the_tools_and_we_read() -> None:
    features = Features(tool_parser=False)
    one, two, server = asyncio.run(two_turns(features, CALL, tools=(RUN_PYTHON,)))
    assert [call.name for call in one.tool_calls] == ["run_python"]
    assert [call.name for call in two.tool_calls] == ["run_python"]
    assert 261 in server.engine.calls[-2].prompt  # the tools are in the prompt


def test_c3_calls_marked_by_special_tokens_are_read_from_the_tokens() -> None:
    async def main() -> Generation:
        async with serving(CALL, odd_ids=True) as (_, model):  # type: ignore[arg-type]
            link = model.replicas[0].link
            honest = link.post

            async def without_specials(path: str, body: object, request_id: str = "") -> Any:
                answer = await honest(path, body, request_id)
                if path == "/v1/completions":
                    choice = answer["choices"][0]
                    for mark in ("<tool_call>", "</tool_call>"):
                        choice["text"] = choice["text"].replace(mark, "")
                return answer

            link.post = without_specials  # type: ignore[method-assign]
            one = await model.generate(0, request(messages=opening(), tools=(RUN_PYTHON,)))
            return await model.generate(0, grown(one, MORE, tools=(RUN_PYTHON,)))

    said = asyncio.run(main())
    assert "<tool_call>" not in said.text
    assert [(c.name, c.arguments) for c in said.tool_calls] == [("run_python", {"code": "1"})]


@pytest.mark.parametrize("arguments", ["{oops", "[1]", '{"wrong": 1}', ""])
@pytest.mark.parametrize("api", ["auto", "chat"])
def test_c3_what_the_model_wrote_wrongly_is_shown_to_it_again(arguments: str, api: str) -> None:
    answer = Answer(tool_calls=(AnswerCall(name="run_python", arguments=arguments),))

    async def main() -> tuple[Generation, Generation]:
        settings = {"api": api}
        async with serving(answer, settings=settings) as (_, model):  # type: ignore[arg-type]
            one = await model.generate(0, request(messages=opening(), tools=(RUN_PYTHON,)))
            (call,) = one.tool_calls
            seen = Message(role=Role.TOOL, content=str(call.error), tool_call_id=call.call_id)
            two = await model.generate(0, grown(one, seen, tools=(RUN_PYTHON,)))
            return one, two

    one, two = asyncio.run(main())
    assert one.tool_calls[0].error
    assert two.tool_calls[0].error


# --- what else is sent ------------------------------------------------------------------------


def test_priority_is_sent_where_it_is_asked_for() -> None:
    async def main(**settings: Any) -> int:
        async with serving(settings=settings) as (server, model):
            asked = request()
            fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
            await model.generate(0, GenerateRequest(**{**fields, "priority": 7}))
            return server.engine.calls[-1].priority

    assert asyncio.run(main()) == 0
    assert asyncio.run(main(priority=True)) == 7


def test_spans_with_gaps_are_not_handed_on() -> None:
    async def main() -> None:
        async with serving("x", features=Features(weight_spans=True)) as (_, model):
            replica = model.replicas[0]
            honest = replica.link.post

            async def gappy(path: str, body: object, request_id: str = "") -> Any:
                answer = await honest(path, body, request_id)
                answer["choices"][0]["weight_versions"][0]["start"] = 1
                return answer

            replica.link.post = gappy  # type: ignore[method-assign]
            with pytest.raises(ModelUnavailable, match="do not cover its 2 tokens"):
                await model.generate(0, request())

    asyncio.run(main())
