"""Tool calls as models sample them: parsed, checked against what was offered, never a crash.

A call that is not JSON, misses a field, has a field of the wrong type or names an unknown tool
keeps its place and carries an ``error`` that the policy can be shown. Pure functions: the same text
and tools give the same calls wherever they run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from stoker.model.generation import ToolCall, ToolSpec

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_SHOWN_CHARACTERS = 200
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def parse_tool_calls(
    sampled: str | Sequence[ToolCall | Mapping[str, Any]], tools: Sequence[ToolSpec]
) -> tuple[ToolCall, ...]:
    """Return the tool calls in ``sampled``, each checked against ``tools``.

    ``sampled`` is text with ``<tool_call>{"name": …, "arguments": …}</tool_call>`` blocks, or calls
    a server has parsed already (``ToolCall`` or the OpenAI form). Call ids that are missing are
    ``call_0``, ``call_1`` …
    """
    if isinstance(sampled, str):
        found = [_from_block(match[1], closed=bool(match[2])) for match in _BLOCK.finditer(sampled)]
    else:
        found = [_from_struct(item) for item in sampled]
    offered = {tool.name: tool for tool in tools}
    return tuple(
        check_tool_call(_with_id(call, index), offered) for index, call in enumerate(found)
    )


def check_tool_call(call: ToolCall, offered: Mapping[str, ToolSpec]) -> ToolCall:
    """Return ``call``, with an ``error`` where it does not fit the tools that were offered."""
    if call.error is not None:
        return call
    spec = offered.get(call.name)
    if spec is None:
        names = ", ".join(sorted(offered)) or "none"
        return _wrong(call, f"there is no tool {call.name!r:.100}; the tools are: {names}")
    problems = list(_problems(call.arguments, spec.parameters))
    return _wrong(call, "; ".join(problems)) if problems else call


def _problems(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterable[str]:
    required = schema.get("required", ())
    for name in required if isinstance(required, list | tuple) else ():
        if name not in arguments:
            yield f"the argument {name!r} is missing"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return
    for name, value in arguments.items():
        expected = properties.get(name)
        if isinstance(expected, Mapping):
            if not _fits(value, expected.get("type")):
                yield f"the argument {name!r} must be {_type_name(expected.get('type'))}"
        elif name not in properties and schema.get("additionalProperties") is False:
            yield f"there is no argument {name!r:.100}"


def _fits(value: object, kinds: object) -> bool:
    names = kinds if isinstance(kinds, list | tuple) else (kinds,)
    if not all(isinstance(name, str) and name in _JSON_TYPES for name in names):
        return True  # a schema we do not judge: the tool itself will
    return any(_is(value, name) for name in names)


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):  # which Python counts among the integers
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _JSON_TYPES[name])


def _type_name(kinds: object) -> str:
    return " or ".join(kinds) if isinstance(kinds, list | tuple) else f"of type {kinds}"


def _from_block(block: str, *, closed: bool) -> ToolCall:
    raw = block.strip()
    if not closed:
        return ToolCall(
            call_id="",
            name="",
            raw=raw,
            error="the tool call was cut off before </tool_call>; nothing was run",
        )
    parsed, error = _json(raw)
    if error is not None:
        return ToolCall(call_id="", name="", raw=raw, error=error)
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return ToolCall(
            call_id="",
            name="",
            raw=raw,
            error='a tool call is a JSON object {"name": …, "arguments": {…}}; nothing was run',
        )
    return _with_arguments(
        str(parsed.get("id") or ""), parsed["name"], parsed.get("arguments", {}), raw
    )


def _from_struct(item: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(item, ToolCall):
        return item
    function = item.get("function", item)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return ToolCall(
            call_id=str(item.get("id") or ""),
            name="",
            raw=repr(item)[:_SHOWN_CHARACTERS],
            error="the tool call names no function; nothing was run",
        )
    arguments = function.get("arguments", {})
    raw = arguments if isinstance(arguments, str) else ""
    return _with_arguments(str(item.get("id") or ""), function["name"], arguments, raw)


def _with_arguments(call_id: str, name: str, arguments: object, raw: str) -> ToolCall:
    error: str | None = None
    if isinstance(arguments, str):
        arguments, error = _json(arguments) if arguments.strip() else ({}, None)
    if error is None and not isinstance(arguments, dict):
        error = "the arguments of a tool call are a JSON object; nothing was run"
    return ToolCall(
        call_id=call_id,
        name=name,
        arguments=arguments if isinstance(arguments, dict) else {},
        error=error,
        raw=raw,
    )


def _json(text: str) -> tuple[Any, str | None]:
    try:
        return msgspec.json.decode(text), None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return None, f"the tool call is not JSON ({error}); nothing was run"


def _with_id(call: ToolCall, index: int) -> ToolCall:
    return call if call.call_id else msgspec.structs.replace(call, call_id=f"call_{index}")


def _wrong(call: ToolCall, problem: str) -> ToolCall:
    return msgspec.structs.replace(call, error=f"{problem}; nothing was run")
