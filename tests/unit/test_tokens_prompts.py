"""Prompts of model folders: what was sampled is what is shown, whatever the template."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from stoker.inference.tokens.open import open_renderer
from support.token_templates import QWEN_SPECIALS, qwen
from support.tokens import (
    CHATML,
    asked,
    assistant,
    letters_json,
    model_folder,
    needs_tokens,
    tool,
    user,
)

pytestmark = needs_tokens


def encoded(renderer: object, text: str) -> list[int]:
    ids: list[int] = renderer._tokenizer.encode(text)  # type: ignore[attr-defined]
    return ids


def decoded(renderer: object, ids: "array[int]") -> str:
    text: str = renderer._tokenizer.decode(ids.tolist())  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    ("sampled", "bridge"),
    [
        ("yes<|im_end|>", "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        ("yes<|im_end|>\n", "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        ("yes", "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        ("", "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_c4_a_history_goes_on_by_its_ids_and_a_bridge(
    sampled: str, bridge: str, tmp_path: Path
) -> None:
    renderer = open_renderer(model_folder(tmp_path))
    first = renderer.prompt(asked([user("hello")]))
    assert (
        decoded(renderer, first.ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = array("i", encoded(renderer, sampled))
    said = renderer.read(ids, asked([user("hello")])).text
    known = first.ids + ids
    second = renderer.prompt(
        asked([user("hello"), assistant(said), user("more")], known=known, covered=2)
    )
    assert second.ids[: len(known)] == known
    assert decoded(renderer, second.ids[len(known) :]) == bridge
    assert not second.rerendered


def test_c4_ids_that_tokenise_differently_stay_as_they_were_sampled(tmp_path: Path) -> None:
    """``hello`` sampled letter by letter: tokenised again it would be one id."""
    append = open_renderer(model_folder(tmp_path))
    anew = open_renderer(tmp_path, history="rerender")
    first = append.prompt(asked([user("hi")]))
    letters = array("i", [encoded(append, letter)[0] for letter in "hello"])
    assert len(encoded(append, "hello")) == 1
    known = first.ids + letters
    request = asked([user("hi"), assistant("hello"), user("more")], known=known, covered=2)
    on, off = append.prompt(request), anew.prompt(request)
    assert on.ids[: len(known)] == known
    assert not on.rerendered
    assert off.ids[: len(known)] != known
    assert off.rerendered
    assert decoded(append, on.ids) == decoded(append, off.ids)


@pytest.mark.parametrize(
    ("sampled", "bridge"),
    [
        ("yes<|im_end|>", "\n"),
        ("yes", "<|im_end|>\n"),
        ("<think>\nhm", "</think><|im_end|>\n"),  # the package knows what it must close
        ("<think>\nhm\n</think>\n\nyes<|im_end|>", "\n"),
    ],
)
def test_c4_the_packages_bridge_is_used_where_it_keeps_every_id(
    sampled: str, bridge: str, tmp_path: Path
) -> None:
    renderer: Any = open_renderer(model_folder(tmp_path, qwen(), specials=QWEN_SPECIALS))
    assert renderer.kind == "qwen3"
    ids = array("i", encoded(renderer, sampled))
    known = renderer.prompt(asked([user("a")])).ids + ids
    said = renderer.read(ids, asked([user("a")])).text
    history = [user("a"), assistant(said), tool("b"), tool("c", "call_1")]
    prompt = renderer.prompt(asked(history, known=known, covered=2))
    assert prompt.ids[: len(known)] == known
    results = "".join(f"\n<tool_response>\n{one}\n</tool_response>" for one in "bc")
    more = f"<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(renderer, prompt.ids[len(known) :]) == bridge + more


def test_c4_the_packages_bridge_is_not_used_where_it_cuts_ids_off(tmp_path: Path) -> None:
    """An engine that samples on after a turn's end: the package would drop what came then."""
    renderer: Any = open_renderer(model_folder(tmp_path, qwen(), specials=QWEN_SPECIALS))
    ids = array("i", encoded(renderer, "yes<|im_end|>no"))
    known = renderer.prompt(asked([user("a")])).ids + ids
    assert renderer.read(ids, asked([user("a")])).text == "yesno"
    history = [user("a"), assistant("yesno"), tool("b")]
    prompt = renderer.prompt(asked(history, known=known, covered=2))
    assert prompt.rerendered
    assert "yesno<|im_end|>" in decoded(renderer, prompt.ids)


def test_c4_an_empty_turn_is_ended_though_its_opening_ends_alike(tmp_path: Path) -> None:
    """The line feed the prompt ends with opened the turn; it is no part of the turn's end."""
    template = (
        "{% for one in messages %}{{ one.role + ':' + one.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:<think>\\n' }}{% endif %}"
    )
    renderer = open_renderer(model_folder(tmp_path, template))
    known = renderer.prompt(asked([user("a")])).ids
    history = [user("a"), assistant(""), user("b")]
    prompt = renderer.prompt(asked(history, known=known, covered=2))
    assert (
        decoded(renderer, prompt.ids) == "user:a\nassistant:<think>\n\nuser:b\nassistant:<think>\n"
    )


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_bridge_is_what_stands_in_a_whole_rendering(scheme: str, tmp_path: Path) -> None:
    """Tokenizers with a blank for each word put one before a text of its own."""
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").write_text(letters_json(scheme))
    renderer: Any = open_renderer(folder)
    first = renderer.prompt(asked([user("a b")])).ids
    end = renderer._tokenizer.convert_tokens_to_ids("<|im_end|>")
    history = [user("a b"), assistant("c"), user("d")]
    whole = renderer.prompt(asked(history))
    at = whole.ids.tolist().index(end, len(first)) + 1
    known = whole.ids[:at]
    assert renderer._bridge(asked(history, covered=2), known) == whole.ids[at:].tolist()


def test_known_ids_that_are_the_whole_prompt_are_left_alone(tmp_path: Path) -> None:
    renderer = open_renderer(model_folder(tmp_path))
    known = array("i", [5, 6, 7])
    assert renderer.prompt(asked([user("a")], known=known)).ids == known
    cut = asked([user("a"), assistant("b")], known=known, covered=2)
    assert renderer.prompt(cut).ids == known
    opened = renderer.prompt(asked([user("a"), assistant("b"), user("c")])).ids
    said_nothing = asked([user("a"), assistant("b"), user("c")], known=opened)
    assert renderer.prompt(said_nothing).ids == opened


def test_a_template_that_drops_earlier_thinking_begins_a_segment(tmp_path: Path) -> None:
    content = "message.content.split('</think>')[-1] if not loop.last else message.content"
    drops = CHATML.replace("'\\n' + message.content", f"'\\n' + ({content})")
    assert drops != CHATML
    renderer = open_renderer(model_folder(tmp_path, drops))
    first = renderer.prompt(asked([user("a")]))
    known = first.ids + array("i", encoded(renderer, "<think>b</think>c<|im_end|>"))
    thought = assistant("<think>b</think>c")
    second = renderer.prompt(asked([user("a"), thought, tool("d")], known=known, covered=2))
    assert second.rerendered
    assert "<think>" not in decoded(renderer, second.ids)
    plain = first.ids + array("i", encoded(renderer, "c<|im_end|>"))
    third = renderer.prompt(asked([user("a"), assistant("c"), tool("d")], known=plain, covered=2))
    assert not third.rerendered
