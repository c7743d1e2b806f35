"""Per-model knowledge of the PyPI package ``renderers``: bridges, tool calls, ids that end a turn.

A model of the package is taken for a folder only when it renders a handful of conversations with
exactly the ids of the folder's own template: a name says little about a fine-tune's template. Where
none does, nothing here is used. The package's look-ups by name are never asked for (they would
reach a hub), nor is its ``gpt-oss``, which fetches its vocabulary. Its per-model code meets
arbitrary ids here; what it raises means that it has no answer.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    Renderer,
    ToolCallParseStatus,
    create_renderer,
)
from renderers.configs import config_from_name

from stoker.errors import ModelRefused
from stoker.inference.tokens.folder import FolderTokenizer
from stoker.inference.tokens.messages import Fields
from stoker.inference.tokens.template import ChatTemplate, template_tools
from stoker.model.generation import ToolCall, ToolSpec
from stoker.model.toolcalls import parse_tool_calls

_FETCHES = {"gpt-oss"}

_TOOLS: list[Fields] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_ASKED: Fields = {"role": "user", "content": "Is it warm in Bergen?"}
_CALL: Fields = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Bergen"}},
        }
    ],
}
_RESULT: Fields = {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "rain"}
_THOUGHT = "<think>\nRain is cold.\n</think>\n\nNo."
_PROBES: tuple[tuple[list[Fields], list[Fields] | None, bool], ...] = (
    ([_ASKED], None, True),
    ([{"role": "system", "content": "Be brief."}, _ASKED], _TOOLS, True),
    ([_ASKED, {"role": "assistant", "content": "No."}], None, False),
    ([_ASKED, {"role": "assistant", "content": "No."}, _ASKED], None, True),
    ([_ASKED, {"role": "assistant", "content": _THOUGHT}, _ASKED], None, True),
    ([_ASKED, _CALL, _RESULT], _TOOLS, True),
)


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What the package makes of sampled ids."""

    calls: tuple[ToolCall, ...]
    """Checked against the tools offered; a malformed one has an ``error``."""
    calls_begin: int | None
    """Where the first begins in the ids; ``None``: not known."""
    said: str
    """Thought and answer, without the calls."""


class Packaged:
    """One model of the package, found to fit a folder."""

    def __init__(self, name: str, renderer: Renderer) -> None:
        self.name = name
        self._renderer = renderer
        self.stop_ids = tuple(renderer.get_stop_token_ids())

    def bridged(
        self,
        prompt: list[int],
        sampled: list[int],
        more: list[Fields],
        tools: tuple[ToolSpec, ...],
    ) -> list[int] | None:
        """Return what follows ``prompt`` and ``sampled`` when ``more`` is said next.

        ``None``: the package has no way to go on.
        """
        found = _tried(
            self._renderer.bridge_to_next_turn,
            prompt,
            sampled,
            more,
            tools=template_tools(tools),
        )
        ids: list[int] = found.token_ids if found is not None else []
        known = prompt + sampled
        # The package cuts off what was sampled after a turn's end: we do not.
        return ids[len(known) :] if ids[: len(known)] == known else None

    def parsed(
        self, sampled: list[int], opening: list[int], tools: tuple[ToolSpec, ...]
    ) -> Parsed | None:
        """Return what ``sampled`` says; ``opening`` are the ids that opened the model's turn."""
        found: ParsedResponse | None = _tried(
            self._renderer.parse_response,
            sampled,
            tools=template_tools(tools),
            prompt_ids=opening,
        )
        if found is None:
            return None
        begins = [call.token_span[0] for call in found.tool_calls if call.token_span is not None]
        thought = found.reasoning_content
        return Parsed(
            calls=_calls(found.tool_calls, tools),
            calls_begin=min(begins) if len(begins) == len(found.tool_calls) and begins else None,
            said=f"<think>{thought}</think>{found.content}" if thought else found.content,
        )


def fitting(
    tokenizer: FolderTokenizer, template: ChatTemplate, names: Sequence[str]
) -> Packaged | None:
    """Return the package's model that renders as ``template`` does; ``None`` where none does.

    ``names`` are what the folder's model may be published as: those are tried first.
    """
    wanted = [_wanted(probe, tokenizer, template) for probe in _PROBES]
    likely = [name for name in names if name in MODEL_RENDERER_MAP]
    kinds = [MODEL_RENDERER_MAP[name] for name in likely] + list(MODEL_RENDERER_MAP.values())
    tokenizer.name_or_path = likely[0] if likely else ""
    for kind in dict.fromkeys(kinds):
        if kind in _FETCHES:
            continue
        renderer = _tried(create_renderer, tokenizer, config_from_name(kind))
        if renderer is not None and _agrees(renderer, wanted):
            return Packaged(kind, renderer)
    return None


def _wanted(
    probe: tuple[list[Fields], list[Fields] | None, bool],
    tokenizer: FolderTokenizer,
    template: ChatTemplate,
) -> list[int] | None:
    messages, tools, opens = probe
    try:
        return tokenizer.encode(template.rendered(messages, tools, open_turn=opens))
    except ModelRefused:
        return None


def _agrees(renderer: Renderer, wanted: list[list[int] | None]) -> bool:
    if wanted[0] is None:
        return False
    for (messages, tools, opens), ids in zip(_PROBES, wanted, strict=True):
        if ids is None:
            continue  # the template itself refuses it
        found = _tried(renderer.render_ids, messages, tools=tools, add_generation_prompt=opens)
        if found != ids:
            return False
    return True


def _calls(found: list[ParsedToolCall], tools: tuple[ToolSpec, ...]) -> tuple[ToolCall, ...]:
    return parse_tool_calls([_call(call) for call in found], tools)


def _call(call: ParsedToolCall) -> ToolCall | Fields:
    malformed = call.status not in {ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL}
    if malformed or not call.name:
        return ToolCall(
            call_id=call.id or "",
            name=call.name or "",
            raw=call.raw,
            error=f"the tool call is malformed ({call.status.value}); nothing was run",
        )
    arguments = call.arguments or {}
    # As text: our own reader refuses what strict JSON does (NaN, lone surrogates).
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.id, "function": {"name": call.name, "arguments": text}}


def _tried(ask: Callable[..., Any], *values: Any, **named: Any) -> Any:  # noqa: ANN401 - any call
    try:
        return ask(*values, **named)
    except Exception:  # noqa: BLE001 - see the module
        return None
