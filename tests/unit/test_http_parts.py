"""The pure parts: bridges, metrics pages, versions, messages, answers."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ModelUnavailable
from stoker.inference.http import answers, bodies
from stoker.inference.http.answers import WeightSpan
from stoker.inference.http.link import retry_after
from stoker.inference.http.metrics import read_page
from stoker.inference.http.rendering import Renderer
from stoker.inference.http.weights import gapless, policy_version, spans
from stoker.inference.tokens.bridging import bridge
from stoker.model.generation import (
    FinishReason,
    Message,
    Role,
    ToolCall,
    VersionSpan,
    pack_tokens,
)
from support.inference import request

END, LINE = 100, 10  # as ChatML: the model samples the end, the template adds a line feed
ids = st.lists(st.integers(0, 9), max_size=8)


@given(prompt=ids, said=ids, reread=ids, more=ids, ended=st.sampled_from([[], [END]]))
def test_c4_a_bridge_never_touches_what_is_known(
    prompt: list[int], said: list[int], reread: list[int], more: list[int], ended: list[int]
) -> None:
    known = [*prompt, *said, *ended]
    before = [*prompt, *reread, END, LINE]  # the same text, tokenised in another way
    found = bridge(known, before, [*before, *more], (END, LINE))
    assert found == [*([] if ended else [END]), LINE, *more]


@given(before=ids, whole=ids)
def test_a_bridge_exists_only_where_the_history_grew(before: list[int], whole: list[int]) -> None:
    found = bridge([1, END], before, whole, (END,))
    assert (found is None) == (whole[: len(before)] != before)


START, LINE_FEED = 1000, 1001
ROLES = {"user": 1, "assistant": 2, "tool": 3}


class ChatMl:
    """A server that renders ChatML word by word: a start, the role, the words, an end."""

    replica, url = 0, "http://chatml"

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes

    async def post(self, path: str, body: Any) -> Any:
        assert path == "/tokenize"
        found: list[int] = []
        for message in body["messages"]:
            words = [ord(letter) for letter in message["content"]]
            found += [START, ROLES[message["role"]], LINE_FEED, *words, END, LINE_FEED]
        if body["add_generation_prompt"] or not self._closes:
            found += [START, ROLES["assistant"], LINE_FEED]
        return {"tokens": found}


@pytest.mark.parametrize("closes", [True, False], ids=["vllm", "sglang"])
@pytest.mark.parametrize("ended", [True, False])
def test_c4_chatml_is_continued_whichever_way_a_server_renders(
    *, closes: bool, ended: bool
) -> None:
    renderer = Renderer(ChatMl(closes=closes), "m")  # type: ignore[arg-type]
    prompt = [START, 1, LINE_FEED, ord("q"), END, LINE_FEED, START, 2, LINE_FEED]
    sampled = [7001, 7002, *([END] if ended else [])]  # ids that no rendering has
    history = (
        Message(role=Role.USER, content="q"),
        Message(role=Role.ASSISTANT, content="hi"),
        Message(role=Role.TOOL, content="t"),
    )
    known = prompt + sampled

    async def main() -> tuple[Any, bool]:
        await renderer.learn()
        asked = request(messages=history, prompt_ids=pack_tokens(known))
        found = await renderer.continued(asked)
        assert found is not None
        whole = request(messages=history, prompt_ids=pack_tokens(found.tolist()))
        return found, renderer.is_whole(whole)

    found, whole = asyncio.run(main())
    suffix = [LINE_FEED, START, 3, LINE_FEED, ord("t"), END, LINE_FEED, START, 2, LINE_FEED]
    assert found.tolist() == [*known, *([] if ended else [END]), *suffix]
    assert whole


PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
vllm:num_requests_running{engine="1",model_name="smol"} 2.0
vllm:num_requests_waiting{engine="0",model_name="smol"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="smol"} 0.5
vllm:num_preemptions_total{engine="0",model_name="smol"} 7.0
vllm:prefix_cache_queries_total{engine="0",model_name="smol"} 601.0
vllm:prefix_cache_hits_total{engine="0",model_name="smol"} 512.0
vllm:prompt_tokens_total{engine="0",model_name="smol"} 1.2e+03
vllm:generation_tokens_total{engine="0",model_name="smol"} 24.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="smol"} 23.0
vllm:iteration_tokens_total_count{engine="0",model_name="smol"} 24.0
vllm:iteration_tokens_total_sum{engine="0",model_name="smol"} 1224.0
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="364"} 1.0
python_gc_objects_collected_total{generation="0"} 9.0
"""


def test_a_page_of_vllm_is_read_and_engines_are_put_together() -> None:
    page = read_page(PAGE)
    assert page is not None
    assert page.kv_tokens == 46_592
    load = page.load
    assert (load.running, load.waiting, load.kv_used_share) == (5, 4, 0.5)
    assert load.waiting_by_reason == {"capacity": 4, "deferred": 0}
    assert (load.preemptions, load.prefix_queries, load.prefix_hits) == (7, 601, 512)
    assert (load.iterations, load.iteration_tokens) == (24, 1224)
    assert (load.tokens_prefilled, load.tokens_sampled) == (1200, 24)


def test_older_names_and_other_pages() -> None:
    page = read_page('vllm:gpu_cache_usage_perc{model_name="x"} 0.125\n')
    assert page is not None
    assert page.load.kv_used_share == 0.125
    assert page.kv_tokens is None
    assert read_page("python_gc_objects_collected_total 9.0\n") is None
    assert read_page("<html>no</html>") is None


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("", 0),
        ("default", 0),
        ("7", 7),
        ("step-12", 12),
        ("v3-final", 3),
        ("run2-step0040", 40),
    ],
)
def test_versions_become_numbers(name: str, number: int) -> None:
    assert policy_version(name) == number


def test_versions_without_a_number_are_told_apart() -> None:
    assert policy_version("blue") == policy_version("blue") != policy_version("green")
    assert 0 <= policy_version("9" * 40) < 2**31


def test_spans_take_what_the_server_says_and_else_the_older_version() -> None:
    said = (WeightSpan("1", 0, 2), WeightSpan("2", 2, 2), WeightSpan("2", 2, 5))
    assert spans(5, said, "0", "2") == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 5))
    assert spans(5, (), "1", "2") == (VersionSpan(1, 0, 5),)
    assert spans(5, (WeightSpan("2", 0, -1),), "", "") == (VersionSpan(2, 0, 5),)
    assert spans(5, (WeightSpan("2", 0, -1),), "1", "") == (VersionSpan(1, 0, 5),)
    assert spans(0, said, "", "") == ()
    assert gapless(spans(5, said, "", ""), 5)
    assert not gapless((VersionSpan(1, 0, 2), VersionSpan(1, 3, 5)), 5)
    assert not gapless((VersionSpan(1, 0, 4),), 5)


def test_a_message_shows_each_tool_call_once() -> None:
    call = ToolCall(call_id="c", name="run", arguments={"x": 1})
    text = 'so\n<tool_call>\n{"name": "run", "arguments": {"x": 1}}\n</tool_call>'
    for content in ("so", text):
        message = Message(role=Role.ASSISTANT, content=content, tool_calls=(call,))
        (shown,) = bodies.messages((message,))
        assert shown["content"] == "so"
        assert shown["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"x":1}'}
    bad = ToolCall(call_id="c", name="run", error="no", raw="{oops")
    (shown,) = bodies.messages((Message(role=Role.ASSISTANT, content="so", tool_calls=(bad,)),))
    assert "tool_calls" not in shown  # servers refuse a history whose arguments are no JSON
    assert "{oops" in shown["content"]


def chat_answer(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop", **choice}]}


def test_thinking_that_a_server_took_out_of_the_text_is_put_back() -> None:
    for field in ("reasoning", "reasoning_content"):
        said = answers.read_chat(chat_answer(message={"content": "yes", field: "so"}))
        assert said.text == "<think>so</think>yes"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"choices": []},
        {"choices": [{}]},
        chat_answer(message=None),
        chat_answer(token_ids=["1"]),
        chat_answer(token_ids=[True]),
        chat_answer(token_ids=[1], logprobs={"content": [{"logprob": -1}, {"logprob": -1}]}),
        chat_answer(token_ids=[1], logprobs={"content": [{"logprob": None}]}),
    ],
)
def test_an_answer_that_makes_no_sense_is_unavailable_and_shown(answer: object) -> None:
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        answers.read_chat(answer)
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        answers.read_completion(answer)
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        answers.read_generate(answer)


def test_an_unknown_finish_reason_is_a_stop() -> None:
    assert answers.read_chat(chat_answer(finish_reason="eos")).finish_reason is FinishReason.STOP
    assert answers.read_chat(chat_answer(finish_reason=None)).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("", None), ("3", 3.0), ("0.5", 0.5), ("-1", None), ("inf", None),
     ("Wed, 21 Oct 2026 07:28:00 GMT", None)],
)  # fmt: skip
def test_retry_after_is_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_what_a_server_had_in_its_prefix_cache_is_read_where_it_says_so() -> None:
    said = {"usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 80}}}
    assert answers.read_chat({**chat_answer(), **said}).cached_tokens == 80
    silent = {"usage": {"prompt_tokens": 90, "prompt_tokens_details": None}}
    assert answers.read_chat({**chat_answer(), **silent}).cached_tokens is None
    answer = {"text": "hi", "meta_info": {"cached_tokens": 7, "finish_reason": {"type": "stop"}}}
    assert answers.read_generate(answer).cached_tokens == 7
