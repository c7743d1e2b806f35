"""Messages as chat templates take them: dictionaries whose tool calls have arguments as objects.

What the model wrote wrongly (a call with an ``error``) is shown to it again as the text it was:
templates print arguments as JSON, and there is none to print. ``plain_messages`` shows all calls so
and results as a user's words, for templates that refuse what a model can sample (two calls at once,
a result of no call).
"""

from typing import Any

from stoker.inference.byte_tokens import render_call
from stoker.model.generation import Message, Role, ToolCall

Fields = dict[str, Any]
CALL_OPEN = "<tool_call>"


def template_messages(history: tuple[Message, ...]) -> list[Fields]:
    """Return ``history`` as a template takes it."""
    names = {call.call_id: call.name for message in history for call in message.tool_calls}
    return [_fields(message, names) for message in history]


def plain_messages(history: tuple[Message, ...]) -> list[Fields]:
    """Return ``history`` with tool calls and their results as text."""
    return [
        {
            "role": (Role.USER if message.role is Role.TOOL else message.role).value,
            "content": _as_text(message),
        }
        for message in history
    ]


def _fields(message: Message, names: dict[str, str]) -> Fields:
    fields: Fields = {"role": message.role.value, "content": message.content}
    if message.role is Role.TOOL and message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
        if names.get(message.tool_call_id):
            fields["name"] = names[message.tool_call_id]
    if not message.tool_calls:
        return fields
    if any(call.error is not None for call in message.tool_calls):
        fields["content"] = _as_text(message)
        return fields
    # The text may hold the calls already: a template would show them twice.
    fields["content"] = message.content.partition(CALL_OPEN)[0].rstrip("\n")
    fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    return fields


def _as_text(message: Message) -> str:
    missing = [
        render_call(call.name, call.raw or call.arguments)
        for call in message.tool_calls
        if CALL_OPEN not in message.content and (not call.raw or call.raw not in message.content)
    ]
    return "\n".join(filter(None, [message.content, *missing]))


def _call(call: ToolCall) -> Fields:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
