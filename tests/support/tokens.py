"""Model folders made by the test: a byte-level tokenizer without a download, and templates."""

import importlib.util
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.model.generation import (
    GenerateRequest,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolSpec,
)
from stoker.model.ids import RolloutId

NEEDED = ("jinja2", "renderers", "tokenizers")
needs_tokens = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs the extra `tokens`: pip install -c constraints.txt -e '.[tokens]'",
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_MERGES = (
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ t",
    "Ġt h",
    "c a",
    "ca ll",
    "Ċ Ċ",
    "u s",
    "e r",
    "us er",
)

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def tokenizer_json(specials: Sequence[str] = SPECIALS, markers: Sequence[str] = MARKERS) -> str:
    """Return a byte-level BPE tokenizer of 256 bytes and a few merges, as its file holds it."""
    import tokenizers  # noqa: PLC0415 - an extra
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415 - an extra

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = [(left, right) for left, right in map(str.split, _MERGES)]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(specials))
    made.add_tokens([tokenizers.AddedToken(one, normalized=False) for one in markers])
    text: str = made.to_str()
    return text


def letters_json(prepend_scheme: str) -> str:
    """Return a tokenizer of single letters that marks blanks as SentencePiece does."""
    import tokenizers  # noqa: PLC0415 - an extra
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415 - an extra

    letters = sorted({*"▁\n", *map(chr, range(33, 127))})
    made = tokenizers.Tokenizer(models.BPE({one: at for at, one in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    made.add_special_tokens(list(SPECIALS))
    text: str = made.to_str()
    return text


def model_folder(
    place: Path,
    template: str | None = CHATML,
    *,
    specials: Sequence[str] = SPECIALS,
    markers: Sequence[str] = MARKERS,
    eos: str = "<|im_end|>",
    **config: Any,
) -> Path:
    """Write what a model folder holds beside its weights into ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer.json").write_text(tokenizer_json(specials, markers))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **config}))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return place


def asked(
    messages: Sequence[Message],
    *,
    known: "array[int] | None" = None,
    covered: int = 0,
    tools: tuple[ToolSpec, ...] = (),
) -> GenerateRequest:
    """Return a request for the turn after ``messages``."""
    return GenerateRequest(
        request_id="rol_a/0",
        rollout_id=RolloutId("rol_a"),
        task_id="t",
        step=0,
        messages=tuple(messages),
        tools=tools,
        sampling=Sampling(),
        seed=1,
        prompt_ids=known.tobytes() if known is not None else b"",
        known_messages=covered,
    )


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, content=text)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=text, tool_calls=calls)


def tool(text: str, call_id: str = "call_0") -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call_id)
