"""Chats and what a model call returns.

A history is sent once: a call names the call it continues and brings only the messages since then.
A fork continues from the same call. Tokens and log-probabilities stay packed until they are asked
for.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stoker.errors import VerbMisused
from stoker.model.generation import (
    FinishReason,
    Generation,
    Message,
    Role,
    ToolCall,
    ToolSpec,
    VersionSpan,
)
from stoker.model.ids import CallPath
from stoker.model.toolcalls import parse_tool_calls

Misused = Callable[[str], VerbMisused]
Prompt = str | Iterable[Message | Mapping[str, Any]]
"""A user message, or messages; a mapping has ``role`` and ``content``."""


class ModelTurn:
    """What one model call returned."""

    __slots__ = ("generation", "tool_calls")

    def __init__(self, generation: Generation, tool_calls: tuple[ToolCall, ...]) -> None:
        self.generation = generation
        """The record itself."""
        self.tool_calls = tool_calls
        """Checked against the tools offered: look at ``call.error`` before ``call.arguments``."""

    @property
    def text(self) -> str:
        """What the model said."""
        return self.generation.text

    @property
    def token_ids(self) -> "array[int]":
        """Sampled tokens, int32, length T."""
        return array("i", self.generation.token_ids)

    @property
    def logprobs(self) -> "array[float]":
        """Log-probabilities of the sampled tokens, float32, length T or 0."""
        return array("f", self.generation.logprobs)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which policy version sampled which tokens."""
        return self.generation.spans

    @property
    def finish_reason(self) -> FinishReason:
        """Why sampling ended."""
        return self.generation.finish_reason

    @property
    def cut(self) -> bool:
        """Whether the length limit ended it."""
        return self.generation.finish_reason is FinishReason.LENGTH

    def __repr__(self) -> str:
        return f"ModelTurn(text={self.text[:60]!r}, tool_calls={len(self.tool_calls)})"


class Chat:
    """A history that grows: messages of the program, and what the model answered."""

    __slots__ = ("_busy", "_misused", "_parent", "_sent", "_suffix", "messages", "tools")

    def __init__(
        self, misused: Misused, messages: Iterable[Message], tools: tuple[ToolSpec, ...]
    ) -> None:
        self._misused = misused
        self.messages = list(messages)
        """The whole history, to read; add with ``user``, ``system`` and ``tool_result``."""
        self.tools = tools
        """Offered to the model; fixed for the chat."""
        self._parent: CallPath | None = None
        self._suffix = list(self.messages)
        self._sent = 0
        """Messages of the suffix that the running call brought."""
        self._busy = False

    def user(self, text: str) -> None:
        """Add a user message."""
        self._add(Message(role=Role.USER, content=text))

    def system(self, text: str) -> None:
        """Add a system message."""
        self._add(Message(role=Role.SYSTEM, content=text))

    def tool_result(self, call: ToolCall, text: str) -> None:
        """Add what ``call`` returned, or its ``error``."""
        self._add(Message(role=Role.TOOL, content=text, tool_call_id=call.call_id))

    def add(self, message: Message) -> None:
        """Add any message."""
        self._add(message)

    def fork(self) -> "Chat":
        """Return a chat with the same history that goes its own way."""
        copy = Chat(self._misused, self.messages, self.tools)
        copy._parent = self._parent
        copy._suffix = list(self._suffix)
        return copy

    def __copy__(self) -> "Chat":
        return self.fork()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Chat":
        return self.fork()

    def begin(self) -> tuple[CallPath | None, tuple[Message, ...]]:
        """Return parent and suffix of the next call; the chat is busy until it ends."""
        if self._busy:
            raise self._misused(
                "two model calls at once on one chat; the second was not issued; "
                "give each its own with chat.fork()"
            )
        self._busy = True
        self._sent = len(self._suffix)
        return self._parent, tuple(self._suffix)

    def abandon(self) -> None:
        """Be free again without an answer; the next call brings the same messages."""
        self._busy = False

    def answered(self, path: CallPath, generation: Generation) -> ModelTurn:
        """Take in what the call at ``path`` returned."""
        self._busy = False
        calls = generation.tool_calls
        checked = parse_tool_calls(calls or (generation.text if self.tools else ()), self.tools)
        self._parent = path
        # What was added while the call ran has not been sent: it follows the answer.
        self._suffix = self._suffix[self._sent :]
        message = Message(role=Role.ASSISTANT, content=generation.text, tool_calls=checked)
        self.messages.insert(len(self.messages) - len(self._suffix), message)
        return ModelTurn(generation, checked)

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._suffix.append(message)


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return ``prompt`` as messages.

    Raises:
        ValueError: a part is no message.
    """
    if isinstance(prompt, str):
        return (Message(role=Role.USER, content=prompt),)
    return tuple(_message(part) for part in prompt)


def tools_of(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return ``tools``, checked.

    Raises:
        ValueError: one is no ``ToolSpec``, or two have one name.
    """
    for tool in tools:
        if not isinstance(tool, ToolSpec):
            raise ValueError(f"tools holds {tool!r:.100}; it takes stoker.ToolSpec")  # noqa: TRY004 - one kind of refusal
    if len({tool.name for tool in tools}) != len(tools):
        raise ValueError("two of the tools have the same name")
    return tuple(tools)


def _message(part: Message | Mapping[str, Any]) -> Message:
    if isinstance(part, Message):
        return part
    try:
        return Message(role=Role(part["role"]), content=str(part.get("content") or ""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{part!r:.100} is no message; give stoker.Message or "
            '{"role": "user", "content": "…"}'
        ) from error
