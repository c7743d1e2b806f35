"""Byte-level tokens of scripted and simulated models: exact and reversible.

The UTF-8 bytes of a text are its ids 0 to 255; a few specials above them mark who speaks and where
a turn ends, and can never come from text. So the ids of a history are known exactly, and how many
messages a stretch of ids covers is the number of speaker specials in it: a request may bring the
ids of any prefix of its history (``GenerateRequest.prompt_ids``) and only the rest is rendered.
What was sampled is never tokenised again.

Does not parse tool calls (``model.toolcalls``) and serves no real model.
"""

import json
from array import array
from hashlib import shake_128

from stoker.model.generation import GenerateRequest, Message, Role, ToolSpec
from stoker.model.value import canonical_bytes

SPEAKERS = {Role.SYSTEM: 256, Role.USER: 257, Role.ASSISTANT: 258, Role.TOOL: 259}
END = 260
"""Ends a turn; sampled by the model itself unless it was cut."""
TOOLS = 261
"""Opens the description of the tools offered."""

_BYTES = 256
_CALL_OPEN = "<tool_call>"


def prompt_of(request: GenerateRequest) -> "array[int]":
    """Return the prompt's ids: those the request brings, then the messages they do not cover."""
    ids = array("i", request.prompt_ids)
    if ids and ids[-1] == SPEAKERS[Role.ASSISTANT]:
        return ids
    if ids:
        if ids[-1] != END:  # the turn before was cut by its length
            ids.append(END)
    elif request.tools:
        _append_tools(ids, request.tools)
    covered = sum(ids.count(speaker) for speaker in SPEAKERS.values())
    for message in request.messages[covered:]:
        ids.append(SPEAKERS[message.role])
        ids.extend(message_text(message).encode(errors="replace"))
        ids.append(END)
    ids.append(SPEAKERS[Role.ASSISTANT])
    return ids


def message_text(message: Message) -> str:
    """Return what a message shows: its content, then tool calls its content does not hold yet."""
    if not message.tool_calls or _CALL_OPEN in message.content:
        return message.content
    calls = [render_call(call.name, call.arguments) for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))


def render_call(name: str, arguments: object) -> str:
    """Return one tool call as a model samples it; a string of arguments is put in as it is."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{_CALL_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>'


def text_ids(text: str) -> "array[int]":
    """Return the ids of ``text`` and the end of the turn; a lone surrogate becomes ``?``."""
    ids = array("i")
    ids.extend(text.encode(errors="replace"))
    ids.append(END)
    return ids


def ids_text(ids: "array[int]") -> str:
    """Return the text of ``ids``; half a character at a cut is replaced (the ids stay exact)."""
    return bytes(token for token in ids if token < _BYTES).decode(errors="replace")


def derived_logprobs(ids: "array[int]", seed: int) -> "array[float]":
    """Return one log-probability in [-2, 0] per id, the same for the same ids and seed."""
    stream = shake_128(ids.tobytes() + str(seed).encode()).digest(len(ids))
    return array("f", (byte / -127.5 for byte in stream))


def _append_tools(ids: "array[int]", tools: tuple[ToolSpec, ...]) -> None:
    ids.append(TOOLS)
    ids.extend(canonical_bytes(tools))
    ids.append(END)
