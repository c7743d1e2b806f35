"""Prompts as exact ids: a history is continued by what was sampled, never by tokenising it again.

The server's own template renders (``/tokenize`` with messages). A grown history is the known ids
plus the *bridge*: what the template puts after the model's last turn. It is the difference between
the whole history and its known part as the template renders them, and there is one only where the
first begins with the second. Templates that drop earlier thinking have none there: such a history
is rendered anew and begins a new segment.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.errors import ModelRefused
from stoker.inference.http import bodies
from stoker.inference.http.link import ServerLink
from stoker.model.generation import GenerateRequest, Message, Role, ToolSpec

_OPENING = Message(role=Role.USER, content="a")


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's template puts around the model's turns."""

    turn_open: tuple[int, ...]
    """Opens the model's turn; a prompt that ends so is whole."""
    turn_end: tuple[int, ...]
    """Ends it; the model samples some of it itself, usually the first id."""


class Renderer:
    """Asks one server to render."""

    def __init__(self, link: ServerLink, name: str) -> None:
        self._link = link
        self._name = name
        self.template: Template | None = None
        """``None`` until learned, and where it cannot be."""

    async def learn(self) -> None:
        """Learn the template's turn marks from two tiny histories; without them nothing is bridged.

        Raises:
            ModelUnavailable: the server did not answer.
        """
        answers = [Message(role=Role.ASSISTANT, content=text) for text in ("a", "b")]
        try:
            closed = await self.ids((_OPENING,), (), open_turn=False)
            opened = await self.ids((_OPENING,), (), open_turn=True)
            one = await self.ids((_OPENING, answers[0]), (), open_turn=False)
            two = await self.ids((_OPENING, answers[1]), (), open_turn=False)
        except ModelRefused:
            return
        end = _common_tail(one, two)
        if end and one != two and opened[: len(closed)] == closed and len(opened) > len(closed):
            self.template = Template(turn_open=tuple(opened[len(closed) :]), turn_end=tuple(end))

    async def ids(
        self, history: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, open_turn: bool
    ) -> list[int]:
        """Return ``history`` as the server's template renders it.

        Raises:
            ModelRefused: the server does not render messages, or not these.
        """
        body = bodies.tokenize(self._name, history, tools, open_turn=open_turn)
        answer: Any = await self._link.post("/tokenize", body)
        found = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise ModelRefused(
                f"replica {self._link.replica} ({self._link.url}) renders no ids: {answer!r:.200}"
            )
        return found

    def is_whole(self, request: GenerateRequest) -> bool:
        """Whether the known ids are the whole prompt already."""
        if request.known_messages:
            return request.known_messages >= len(request.messages)
        opening = self.template.turn_open if self.template is not None else ()
        known = array("i", request.prompt_ids)
        return not _answered_messages(request) or tuple(known[-len(opening) :]) == opening

    async def continued(self, request: GenerateRequest) -> "array[int] | None":
        """Return the known ids and what follows them; ``None`` where the history did not only grow.

        Raises:
            ModelUnavailable: the server did not answer.
        """
        known = array("i", request.prompt_ids)
        if self.is_whole(request):
            return known
        if self.template is None:
            return None
        covered = request.known_messages or _answered_messages(request)
        try:
            before = await self.ids(request.messages[:covered], request.tools, open_turn=False)
            whole = await self.ids(request.messages, request.tools, open_turn=True)
        except ModelRefused:
            return None
        suffix = bridge(known, before, whole, self.template.turn_end)
        return known + array("i", suffix) if suffix is not None else None


def bridge(
    known: Sequence[int], before: Sequence[int], whole: Sequence[int], turn_end: tuple[int, ...]
) -> list[int] | None:
    """Return what follows ``known`` in a history that grew from ``before`` to ``whole``.

    First the part of the turn's end that was not sampled (all of it where the turn was cut), then
    what the template adds. ``None``: ``whole`` does not begin with ``before``.
    """
    if list(whole[: len(before)]) != list(before):
        return None
    sampled = next(
        count
        for count in range(len(turn_end), -1, -1)
        if tuple(known[len(known) - count :]) == turn_end[:count]
    )
    return [*turn_end[sampled:], *whole[len(before) :]]


def _answered_messages(request: GenerateRequest) -> int:
    """Return how many messages lead up to and include the model's last turn."""
    turns = [at for at, message in enumerate(request.messages, 1) if message.role is Role.ASSISTANT]
    return turns[-1] if turns else 0


def _common_tail(one: list[int], two: list[int]) -> list[int]:
    count = 0
    while count < min(len(one), len(two)) and one[-1 - count] == two[-1 - count]:
        count += 1
    return one[len(one) - count :]
