"""Chat histories of one rollout, stored once: each model call is its parent's plus a suffix.

A rollout of 20 turns holds every message one time, however often it is sent, and every token id
one time: of a prompt that goes on with known ids only what is new is kept. Token ids of a history
that only grew are the parent's prompt plus what was sampled there, never a re-tokenisation.
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
    answer: Message | None = None
    prompt_ids: bytes = b""
    """Of its prompt, int32: those after the ids known before it where it ``grew``, else all."""
    sampled_ids: bytes = b""
    has_ids: bool = False
    """The server said the ids of its prompt."""
    grew: bool = False


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
        node, known = self._node(path), self.known_ids(path)
        node.answer = Message(
            role=Role.ASSISTANT, content=generation.text, tool_calls=generation.tool_calls
        )
        node.has_ids = bool(generation.prompt_ids)
        node.grew = bool(known) and generation.prompt_ids.startswith(known)
        node.prompt_ids = generation.prompt_ids[len(known) if node.grew else 0 :]
        node.sampled_ids = generation.token_ids

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
        parts: list[bytes] = []
        at = self._node(path).parent
        while at is not None and (node := self._node(at)).has_ids:
            parts += node.sampled_ids, node.prompt_ids
            at = node.parent if node.grew else None
        return b"".join(reversed(parts))

    def known_messages(self, path: CallPath) -> int:
        """Return how many messages ``known_ids`` covers; 0 where no ids are known."""
        node = self._node(path)
        if node.parent is None or not self._node(node.parent).has_ids:
            return 0
        return len(self.messages(path)) - len(node.suffix)

    def _answer(self, path: CallPath) -> Message:
        answer = self._node(path).answer
        if answer is None:
            raise InternalError(f"model call {path} is continued before it returned")
        return answer

    def _node(self, path: CallPath) -> _Node:
        node = self._nodes.get(path)
        if node is None:
            raise InternalError(f"model call {path} was never issued")
        return node
