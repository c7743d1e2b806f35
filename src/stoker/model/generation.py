"""Model calls: what the inference lane is asked and what it answers.

Tokens and log-probabilities are little-endian arrays in bytes, never lists of objects: a history
of 16,000 tokens is 128 KB that way and 1.1 MB as lists (facts).
"""

from array import array
from enum import StrEnum
from typing import Any

import msgspec

from stoker.model.ids import CallPath, RolloutId


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call parsed from what the model sampled."""

    call_id: str
    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None
    """Why the call is unusable (not JSON, a missing field, an unknown tool): an observation."""
    raw: str = ""
    """The arguments as sampled; where the model writes a call as a block of text, the block."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat history."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Which call a ``tool`` message answers."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tool offered to the model, as JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments object."""


class FinishReason(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORTED = "aborted"


class LogprobKind(StrEnum):
    """Which distribution the log-probabilities are of."""

    NONE = "none"
    RAW = "raw"
    """Before temperature."""
    SAMPLED = "sampled"
    """After temperature: the behaviour policy's own."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` were sampled under ``policy_version``."""

    policy_version: int
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Seeds are derived by the coordinator, never passed by a program (facts)."""

    temperature: float = 1.0
    tokens_max: int = 1024
    stop: tuple[str, ...] = ()


class GenerateArguments(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as a program issues it: the history is parent + suffix, sent once."""

    parent: CallPath | None
    """The model call whose prompt and completion this history continues; ``None`` for a new one."""
    suffix: tuple[Message, ...]
    """Messages since then."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools offered; only sent with ``parent=None``, inherited after that."""
    sampling: Sampling = Sampling()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as a replica receives it."""

    request_id: str
    rollout_id: RolloutId
    task_id: str
    step: int
    """Model turn of this rollout, from 0."""
    messages: tuple[Message, ...]
    """The whole history."""
    tools: tuple[ToolSpec, ...]
    sampling: Sampling
    seed: int
    prompt_ids: bytes = b""
    """Exact token ids of the history where known (int32 array)."""
    known_messages: int = 0
    """How many of ``messages`` those ids cover; 0: not said."""
    priority: int = 0
    """Order among ready calls: smaller goes first."""
    history: str = ""
    """Which of the rollout's histories it goes on with: the path of that history's first call."""
    begun: "Generation | None" = None
    """What an aborted try of this turn has sampled; limits and seed are those of the whole turn."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What one model call returned."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    prompt_ids: bytes = b""
    """int32 array, ``P`` tokens; empty where the server does not say."""
    token_ids: bytes = b""
    """int32 array, ``T`` sampled tokens."""
    logprobs: bytes = b""
    """float32 array, ``T`` log-probabilities, or empty."""
    logprob_kind: LogprobKind = LogprobKind.NONE
    spans: tuple[VersionSpan, ...] = ()
    """Cover ``[0, T)`` without gaps."""
    rerendered: bool = False
    """The prompt is not the known ids and a suffix but was rendered anew: a segment begins here."""
    reissued: bool = False
    """An earlier sampling of this call never reached the journal."""
    replica: int = 0
    cached_tokens: int | None = None
    """Prompt tokens the server found in its prefix cache; ``None``: it does not say."""

    @property
    def token_count(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) // 4


def pack_tokens(ids: list[int]) -> bytes:
    """Return ``ids`` as an int32 array in bytes."""
    return array("i", ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids of an int32 array in bytes."""
    return list(array("i", packed))


def pack_logprobs(values: list[float]) -> bytes:
    """Return ``values`` as a float32 array in bytes."""
    return array("f", values).tobytes()


def unpack_logprobs(packed: bytes) -> list[float]:
    """Return the log-probabilities of a float32 array in bytes."""
    return list(array("f", packed))
