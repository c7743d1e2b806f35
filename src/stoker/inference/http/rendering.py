"""Prompts as exact ids: a history is continued by what was sampled, never by tokenising it again.

The server's own template renders (``/tokenize`` with messages). A grown history is the known ids
plus the *bridge*: what the template puts after the model's last turn. Where a server renders a
history without opening the next turn (vLLM), it is the difference between the whole history and
its known part. Where every rendering opens a turn (SGLang), it is what two renderings have in
common at their end that differ in the model's last turn only.

There is a bridge only where the template still shows the past as it did. Templates that drop
earlier thinking do not: such a history is rendered anew and begins a new segment.
"""

import re
from array import array
from typing import Any

import msgspec

from stoker.errors import ModelRefused
from stoker.inference.http import bodies
from stoker.inference.http.link import ServerLink
from stoker.inference.tokens.bridging import answered_messages, bridge, common_tail, unsampled
from stoker.model.generation import GenerateRequest, Message, Role, ToolSpec

_OPENING = Message(role=Role.USER, content="a")
_ANSWERS = tuple(Message(role=Role.ASSISTANT, content=text) for text in ("a", "b"))
_THOUGHT = re.compile(r".*</think>\s*", re.DOTALL)


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's template puts around the model's turns."""

    turn_open: tuple[int, ...]
    """Opens the model's turn; a prompt that ends so is whole."""
    turn_end: tuple[int, ...]
    """Ends it; the model samples some of it itself, usually the first id."""
    closes: bool
    """Histories can be rendered without opening the next turn."""


class Renderer:
    """Asks one server to render."""

    def __init__(self, link: ServerLink, name: str) -> None:
        self._link = link
        self._name = name
        self.template: Template | None = None
        """``None`` until learned, and where it cannot be."""

    async def learn(self) -> None:
        """Learn the template's turn marks from tiny histories; without them nothing is bridged.

        Raises:
            ModelUnavailable: the server did not answer.
        """
        try:
            closed = await self.ids((_OPENING,), (), open_turn=False)
            opened = await self.ids((_OPENING,), (), open_turn=True)
            if closed != opened:
                self.template = await self._learn_closing(closed, opened)
            else:
                self.template = await self._learn_opening(opened)
        except ModelRefused:
            return

    async def _learn_closing(self, closed: list[int], opened: list[int]) -> Template | None:
        one, two = [await self.ids((_OPENING, answer), (), open_turn=False) for answer in _ANSWERS]
        end = common_tail(one, two)
        if not end or one == two or opened[: len(closed)] != closed:
            return None
        return Template(turn_open=tuple(opened[len(closed) :]), turn_end=tuple(end), closes=True)

    async def _learn_opening(self, opened: list[int]) -> Template | None:
        """Tell the ends of turns apart from what follows them: a user's turn, or the model's."""
        one, two = [
            await self.ids((_OPENING, answer, _OPENING), (), open_turn=True) for answer in _ANSWERS
        ]
        other = await self.ids((Message(role=Role.USER, content="b"),), (), open_turn=True)
        after_model, after_user = common_tail(one, two), common_tail(opened, other)
        count = 0
        while count < min(len(after_model), len(after_user)):
            if after_model[count] != after_user[count]:
                break
            count += 1
        if one == two or not count or count == len(after_user):
            return None
        return Template(
            turn_open=tuple(after_user[count:]), turn_end=tuple(after_user[:count]), closes=False
        )

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

    async def text(self, ids: "array[int]") -> str:
        """Return the text of ``ids``; specials in it or not, as the server does.

        Raises:
            ModelUnavailable: the server did not answer.
            ModelRefused: it tells no text.
        """
        body = {"model": self._name, "tokens": ids.tolist()}
        answer: Any = await self._link.post("/detokenize", body)
        # vLLM and SGLang name it differently.
        found = answer.get("prompt", answer.get("text")) if isinstance(answer, dict) else None
        if not isinstance(found, str):
            raise ModelRefused(
                f"replica {self._link.replica} ({self._link.url}) tells no text: {answer!r:.200}"
            )
        return found

    def is_whole(self, request: GenerateRequest) -> bool:
        """Whether the known ids are the whole prompt already."""
        if request.known_messages:
            return request.known_messages >= len(request.messages)
        if not answered_messages(request) or self.template is None:
            return not answered_messages(request)
        opening = self.template.turn_open
        return tuple(array("i", request.prompt_ids)[-len(opening) :]) == opening

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
        covered = request.known_messages or answered_messages(request)
        try:
            whole = await self.ids(request.messages, request.tools, open_turn=True)
            if self.template.closes:
                before = await self.ids(request.messages[:covered], request.tools, open_turn=False)
                suffix = bridge(known, before, whole, self.template.turn_end)
            else:
                suffix = await self._common_suffix(request, covered, whole, self.template)
        except ModelRefused:
            return None
        return known + array("i", suffix) if suffix is not None else None

    async def _common_suffix(
        self, request: GenerateRequest, covered: int, whole: list[int], template: Template
    ) -> list[int] | None:
        """Return the bridge by renderings that all open a turn; see the module."""
        asked, answer = request.messages[: covered - 1], request.messages[covered - 1]
        more = request.messages[covered:]
        prompt = await self.ids(asked, request.tools, open_turn=True)
        if whole[: len(prompt)] != prompt:
            return None
        if answer.content != (said := _THOUGHT.sub("", answer.content)):
            bare = msgspec.structs.replace(answer, content=said)
            if whole == await self.ids((*asked, bare, *more), request.tools, open_turn=True):
                return None  # what the model thought is not shown to it again
        one, two = [
            await self.ids((*asked, other, *more), request.tools, open_turn=True)
            for other in _ANSWERS
        ]
        tail = common_tail(one, two)
        if one == two or whole[len(whole) - len(tail) :] != tail:
            return None
        return unsampled(array("i", request.prompt_ids), tail, template.turn_end)
