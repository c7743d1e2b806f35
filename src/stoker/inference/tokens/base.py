"""The contract of a renderer: messages to prompt ids, sampled ids to text and tool calls."""

from array import array
from typing import Literal, Protocol

import msgspec

from stoker.model.generation import GenerateRequest, ToolCall

History = Literal["append", "rerender"]
"""``append``: the prompt goes on from exactly what was sampled, for as long as the template shows
the past as it did. ``rerender``: the template renders the whole history in every turn."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is asked with."""

    ids: "array[int]"
    """int32; ends where the model's turn begins."""
    rerendered: bool = False
    """The history did not go on from ``request.prompt_ids``: a segment begins."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What sampled ids say."""

    text: str
    """Without the ids that end the turn; half a character at a cut is replaced."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Checked against the tools offered."""


class Renderer(Protocol):
    """One model's way to write a history."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the model's turn when sampled; they are part of what was sampled."""
        ...

    def prompt(self, request: GenerateRequest) -> RenderedPrompt:
        """Return the ids to sample after: those the request brings, untouched, and the rest.

        Raises:
            ModelRefused: the template cannot render these messages.
        """
        ...

    def read(self, token_ids: "array[int]", request: GenerateRequest) -> Reading:
        """Return what ``token_ids``, sampled for ``request``, say; never raises for any ids."""
        ...

    def text(self, token_ids: "array[int]") -> str:
        """Return the plain text of ids, specials left out: for stop texts and for showing."""
        ...
