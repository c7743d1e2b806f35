"""Sampled ids as text and tool calls: whatever they are, an observation and never a crash."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ModelRefused
from stoker.inference.tokens.base import Reading, Renderer
from stoker.inference.tokens.open import open_renderer
from stoker.model.generation import ToolCall
from support.inference import RUN_PYTHON
from support.token_templates import LLAMA_SPECIALS, QWEN_SPECIALS, llama, qwen
from support.tokens import CHATML, asked, assistant, model_folder, needs_tokens, tool, user

pytestmark = needs_tokens
GOOD = '<tool_call>\n{"name": "run_python", "arguments": {"code": "1"}}\n</tool_call>'


def opened(kind: str, place: Path) -> Any:
    if kind == "chatml":
        return open_renderer(model_folder(place, CHATML))
    if kind == "qwen3":
        return open_renderer(model_folder(place, qwen(), specials=QWEN_SPECIALS))
    begins = "<|begin_of_text|>"
    return open_renderer(
        model_folder(place, llama(), specials=LLAMA_SPECIALS, eos="<|eot_id|>", bos_token=begins)
    )


@pytest.fixture(scope="module", params=["chatml", "qwen3"])
def hermes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models whose calls are JSON between ``<tool_call>`` marks."""
    return opened(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["chatml", "qwen3", "llama-3"])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(request.param, tmp_path_factory.mktemp("model"))


def ids(renderer: Any, text: str) -> "array[int]":
    return array("i", renderer._tokenizer.encode(text))


def read(renderer: Renderer, text: str) -> Reading:
    return renderer.read(ids(renderer, text), asked([user("go")], tools=(RUN_PYTHON,)))


def errors(calls: tuple[ToolCall, ...]) -> list[str]:
    return [call.error or "" for call in calls]


def test_c3_two_calls_at_once(hermes: Any) -> None:
    said = read(hermes, f"Both:\n{GOOD}\n{GOOD}<|im_end|>")
    assert [call.call_id for call in said.tool_calls] == ["call_0", "call_1"]
    assert [call.name for call in said.tool_calls] == ["run_python"] * 2
    assert [call.arguments for call in said.tool_calls] == [{"code": "1"}] * 2
    assert errors(said.tool_calls) == ["", ""]
    assert said.text.startswith("Both:")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "run_python", "parameters": {"code": "1"}}', ""),
        ('{"name": "run_python", "parameters": {}}', "'code' is missing"),
        ('{"name": "rm", "parameters": {}}', "there is no tool 'rm'"),
    ],
)
def test_c3_calls_in_another_syntax(text: str, problem: str, tmp_path: Path) -> None:
    (call,) = read(opened("llama-3", tmp_path), f"{text}<|eot_id|>").tool_calls
    assert problem in (call.error or "")
    assert bool(problem) == bool(call.error)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{'name': 1}", "nothing was run"),
        ('{"name": "run_python", "arguments": {}}', "'code' is missing"),
        ('{"name": "run_python", "arguments": {"code": 1}}', "must be of type string"),
        ('{"name": "rm", "arguments": {}}', "there is no tool 'rm'"),
        ('{"name": "run_python", "arguments": {"code": NaN}}', "nothing was run"),
        ('{"name": "run_python", "arguments": {"code": "\\ud800"}}', "nothing was run"),
        ('{"arguments": {"code": "1"}}', "nothing was run"),
        ("[1]", "nothing was run"),
        ("", "nothing was run"),
    ],
)
def test_c3_a_malformed_call_is_an_observation(hermes: Any, body: str, problem: str) -> None:
    said = read(hermes, f"<tool_call>\n{body}\n</tool_call>\n{GOOD}<|im_end|>")
    bad, good = said.tool_calls
    assert problem in str(bad.error)
    assert good.error is None
    # Shown again, it is the text that it was, and the answer to it is shown too.
    history = [user("go"), assistant(said.text, *said.tool_calls), tool("no"), tool("1", "call_1")]
    anew = hermes.prompt(asked(history, tools=(RUN_PYTHON,)))
    assert body in hermes._tokenizer.decode(anew.ids.tolist())


def test_c3_a_call_that_was_cut_is_an_observation(hermes: Any) -> None:
    (call,) = read(hermes, GOOD[:40]).tool_calls
    assert "nothing was run" in str(call.error)


def test_a_call_that_is_right_is_shown_once_when_rendered_anew(renderer: Any) -> None:
    if renderer.kind == "llama-3":
        text, end = '{"name": "run_python", "parameters": {"code": "1"}}', "<|eot_id|>"
    else:
        text, end = GOOD, "<|im_end|>"
    said = read(renderer, text + end)
    history = [user("go"), assistant(said.text, *said.tool_calls), tool("out")]
    anew = renderer._tokenizer.decode(renderer.prompt(asked(history)).ids.tolist())
    assert anew.count('{"code": "1"}') == 1


def test_c3_calls_that_the_template_refuses_are_shown_as_text(tmp_path: Path) -> None:
    """Llama's template raises for two calls at once; what a policy samples must not end there."""
    renderer = opened("llama-3", tmp_path)
    said = read(renderer, f"{GOOD}{GOOD}<|eot_id|>")
    assert len(said.tool_calls) == 2
    history = [
        user("go"),
        assistant(said.text, *said.tool_calls),
        tool("one"),
        tool("two", "call_1"),
    ]
    anew = renderer._tokenizer.decode(renderer.prompt(asked(history)).ids.tolist())
    assert anew.count(GOOD) == 2
    assert "user<|end_header_id|>\n\ntwo<|eot_id|>" in anew
    with pytest.raises(ModelRefused, match="two users"):
        opened_strict(tmp_path / "strict").prompt(asked([user("a"), user("b")]))


def opened_strict(place: Path) -> Any:
    """Open a template that takes one message only, and says so."""
    strict = "{% if messages | length > 1 %}{{ raise_exception('two users') }}{% endif %}a"
    return open_renderer(model_folder(place, strict))


def test_empty_and_cut_and_broken_completions(renderer: Any) -> None:
    assert read(renderer, "") == Reading(text="")
    stop = min(renderer.stop_ids)
    request = asked([user("go")], tools=(RUN_PYTHON,))
    assert renderer.read(array("i", [stop]), request) == Reading(text="")
    half = ids(renderer, "aé")[:-1]  # cut inside a character
    assert renderer.read(half, request).text == "a\ufffd"
    assert renderer.text(half) == "a\ufffd"
    assert renderer.read(array("i", [-1, 10**9, 2**31 - 1]), request) == Reading(text="")


def test_any_ids_are_read_and_gone_on_from(renderer: Any) -> None:
    """Ids at random, specials and bytes that are no UTF-8 among them."""
    draw = random.Random(7)
    first = renderer.prompt(asked([user("go")], tools=(RUN_PYTHON,)))
    marks = ids(renderer, '<tool_call></tool_call><think></think>{}:"').tolist()
    for _ in range(300):
        sampled = array("i")
        for _ in range(draw.randrange(12)):
            sampled.append(
                draw.choice([draw.randrange(280), draw.choice(marks), *renderer.stop_ids])
            )
        said = renderer.read(sampled, asked([user("go")], tools=(RUN_PYTHON,)))
        known = first.ids + sampled
        history = [user("go"), assistant(said.text, *said.tool_calls), tool("out")]
        after = renderer.prompt(asked(history, known=known, covered=2, tools=(RUN_PYTHON,)))
        assert after.rerendered == (after.ids[: len(known)] != known), sampled


def test_lone_surrogates_in_messages_are_replaced(renderer: Any) -> None:
    history = [user("a\ud800b"), assistant("c\udfff"), tool("\ud800", "call_0")]
    anew = renderer.prompt(asked(history, tools=(RUN_PYTHON,)))
    assert "a?b" in renderer._tokenizer.decode(anew.ids.tolist())


def test_thinking_stays_in_the_text(tmp_path: Path) -> None:
    renderer: Any = open_renderer(model_folder(tmp_path, qwen(), specials=QWEN_SPECIALS))
    said = read(renderer, f"<think>\nhm\n</think>\n\n{GOOD}<|im_end|>")
    assert said.text.strip() == "<think>\nhm\n</think>"
    assert len(said.tool_calls) == 1
