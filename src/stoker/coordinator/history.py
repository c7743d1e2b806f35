"""Chat histories of one rollout, stored once: each model call is its parent's plus a suffix.

A rollout of 20 turns holds every message one time, however often it is sent. Token ids of a
history that only grew are the parent's prompt plus what was sampled there, never a
re-tokenisation.
"""

import msgspec

from stoker.errors import InternalError
from stoker.model.generation import (
    GenerateArguments,
    Generation,
    Message,
    Role,
    ToolSpec,
)
from stoker.model.ids import CallPath


class _Node(msgspec.Struct):
    parent: CallPath | None
    root: CallPath
    suffix: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    step: int
    generation: Generation | None = None


class HistoryStore:
    """Every model call of one rollout, by call path."""

    def __init__(self) -> None:
        self._nodes: dict[CallPath, _Node] = {}

    def issue(self, path: CallPath, arguments: GenerateArguments) -> int:
        """Remember a call that was issued; return its step, from 0 in order of issue."""
        step = len(self._nodes)
        self._nodes[path] = _Node(
            parent=arguments.parent,
            root=path if arguments.parent is None else self._node(arguments.parent).root,
            suffix=arguments.suffix,
            tools=arguments.tools,
            step=step,
        )
        return step

    def returned(self, path: CallPath, generation: Generation) -> None:
        """Remember what the call at ``path`` returned."""
        self._node(path).generation = generation

    def step(self, path: CallPath) -> int:
        """Return the step of the call at ``path``."""
        return self._node(path).step

    @property
    def calls(self) -> int:
        """Model calls issued so far."""
        return len(self._nodes)

    def messages(self, path: CallPath) -> tuple[Message, ...]:
        """Return the whole history the call at ``path`` is asked with."""
        parts: list[tuple[Message, ...]] = []
        at: CallPath | None = path
        while at is not None:
            node = self._node(at)
            parts.append(node.suffix)
            at = node.parent
            if at is not None:
                parts.append((self._answer(at),))
        return tuple(message for part in reversed(parts) for message in part)

    def tools(self, path: CallPath) -> tuple[ToolSpec, ...]:
        """Return the tools offered: those of the history's first call."""
        return self._node(self._node(path).root).tools

    def root(self, path: CallPath) -> CallPath:
        """Return the first call of the history that the call at ``path`` goes on with."""
        return self._node(path).root

    def known_ids(self, path: CallPath) -> bytes:
        """Return the exact token ids the history begins with (int32): what the parent was asked
        plus what it sampled; empty at the start of a history or where a server gives none.
        """  # noqa: D205 - one thought
        parent = self._node(path).parent
        generation = self._node(parent).generation if parent is not None else None
        if generation is None or not generation.prompt_ids:
            return b""
        return generation.prompt_ids + generation.token_ids

    def known_messages(self, path: CallPath) -> int:
        """Return how many messages ``known_ids`` covers; 0 where no ids are known."""
        if not self.known_ids(path):
            return 0
        return len(self.messages(path)) - len(self._node(path).suffix)

    def _answer(self, path: CallPath) -> Message:
        generation = self._node(path).generation
        if generation is None:
            raise InternalError(f"model call {path} is continued before it returned")
        return Message(
            role=Role.ASSISTANT, content=generation.text, tool_calls=generation.tool_calls
        )

    def _node(self, path: CallPath) -> _Node:
        node = self._nodes.get(path)
        if node is None:
            raise InternalError(f"model call {path} was never issued")
        return node
