"""Opening a model folder: found offline, or refused with the sentence that says what to do."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigInvalid
from stoker.inference.tokens.open import open_renderer
from support.token_templates import LLAMA_SPECIALS, QWEN_SPECIALS, llama, qwen
from support.tokens import CHATML, asked, model_folder, needs_tokens, user

pytestmark = needs_tokens


def ids_of(renderer: Any, *tokens: str) -> set[int]:
    return set(renderer._tokenizer.convert_tokens_to_ids(tokens))


def test_the_package_helps_where_it_renders_as_the_folder_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name says which model it is, and nobody is asked."""
    monkeypatch.setattr(socket, "getaddrinfo", None)
    monkeypatch.setattr(socket.socket, "connect", None)
    known: Any = open_renderer(model_folder(tmp_path / "q", qwen(), specials=QWEN_SPECIALS))
    assert known.kind == "qwen3"
    assert known.stop_ids == ids_of(known, "<|im_end|>", "<|endoftext|>")
    folder = model_folder(
        tmp_path / "l", llama(), specials=LLAMA_SPECIALS, eos="<|eot_id|>",
        bos_token="<|begin_of_text|>",
    )  # fmt: skip
    other: Any = open_renderer(folder)
    assert other.kind == "llama-3"
    assert other.stop_ids == ids_of(other, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    shown = other._tokenizer.decode(other.prompt(asked([user("hi")])).ids.tolist())
    assert "Today Date: 26 Jul 2024" in shown  # and tomorrow too


def test_a_template_that_was_changed_is_nobody_elses(tmp_path: Path) -> None:
    changed = qwen().replace("<tool_response>\\n", "<tool_response>")
    assert changed != qwen()
    folder = model_folder(tmp_path, changed, specials=QWEN_SPECIALS)
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3-8B"}))
    renderer: Any = open_renderer(folder)
    assert renderer.kind == "template"


def test_ids_that_end_generation_are_read_where_they_are_said(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, eos_token={"content": "<|im_end|>", "special": True})
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    renderer: Any = open_renderer(folder)
    assert renderer.stop_ids == {7, 8} | ids_of(renderer, "<|im_end|>")


def test_the_templates_own_end_of_a_turn_ends_it(tmp_path: Path) -> None:
    renderer: Any = open_renderer(model_folder(tmp_path / "base", eos="<|endoftext|>"))
    assert renderer.stop_ids == ids_of(renderer, "<|endoftext|>", "<|im_end|>")
    lines = CHATML.replace("<|im_end|>", "")  # a turn that ends with a line feed
    plain: Any = open_renderer(model_folder(tmp_path / "plain", lines, eos="<|endoftext|>"))
    assert plain.stop_ids == ids_of(plain, "<|endoftext|>")


def test_templates_by_name_and_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ 'plain' }}"},
        {"name": "tool_use", "template": "t"},
    ]
    folder = model_folder(tmp_path, None, chat_template=named)
    renderer: Any = open_renderer(folder)
    assert renderer._template.rendered([], None, open_turn=True) == "plain"
    assert renderer._template.rendered([], [{"type": "function"}], open_turn=True) == "t"


def test_the_generation_tag_and_loop_controls_are_understood(tmp_path: Path) -> None:
    text = (
        "{% for message in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
        "{% generation %}<{{ message.content }}>{% endgeneration %}{% endfor %}"
    )
    renderer: Any = open_renderer(model_folder(tmp_path, text))
    messages = [{"role": "user", "content": one} for one in "abc"]
    assert renderer._template.rendered(messages, None, open_turn=True) == "<a><b>"


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"tokenizer.json": None}, "holds no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "is no tokenizer that can be read"),
        ({"tokenizer_config.json": "{"}, "is not JSON"),
        ({"tokenizer_config.json": "[]"}, "is no JSON object"),
        ({"chat_template.jinja": None}, "holds no chat template"),
        ({"chat_template.jinja": "{% if %}"}, "template cannot be read"),
        ({"chat_template.jinja": "{{ nothing.at.all }}"}, "cannot render this history"),
        ({"chat_template.jinja": "{{ ''.__class__.mro() }}"}, "cannot render this history"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    spoilt: dict[str, str | None], says: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path)
    for name, text in spoilt.items():
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)
    with pytest.raises(ConfigInvalid, match=says) as refused:
        open_renderer(folder)
    assert "nothing was started" in str(refused.value)


def test_no_folder_and_no_extra_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigInvalid, match="there is no model folder"):
        open_renderer(tmp_path / "nowhere")
    monkeypatch.delitem(sys.modules, "stoker.inference.tokens.packaged")
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    with pytest.raises(ConfigInvalid, match=r"renderers\.base.*stoker\[tokens\]"):
        open_renderer(model_folder(tmp_path, CHATML))
