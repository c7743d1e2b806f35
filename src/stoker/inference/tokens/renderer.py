"""One model folder's renderer: the contract of ``base`` by the folder's own template.

The template always renders; the package ``renderers`` helps with bridges and tool calls where it
knows the model (``packaged``). A history goes on by, in this order: the package's bridge; what the
whole rendering shows after the text of the known ids, where it begins with that text (the ids may
be others); the difference of two renderings (the known part closed, the whole with the next turn
opened), where the second begins with the first. Otherwise it is rendered anew and begins a segment.
Keeps nothing between calls: several threads may use one.
"""

from array import array

import msgspec

from stoker.errors import ModelRefused
from stoker.inference.tokens.base import History, Reading, RenderedPrompt
from stoker.inference.tokens.bridging import answered_messages, common_tail, sampled_of
from stoker.inference.tokens.folder import FolderTokenizer
from stoker.inference.tokens.messages import template_messages
from stoker.inference.tokens.packaged import Packaged, Parsed
from stoker.inference.tokens.template import ChatTemplate
from stoker.model.generation import GenerateRequest, Message, Role
from stoker.model.toolcalls import parse_tool_calls

_OPENING = Message(role=Role.USER, content="a")
_ANSWERS = tuple(Message(role=Role.ASSISTANT, content=text) for text in ("a", "b"))
_ID_BYTES = 4


class TurnMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What the template puts around the model's turns; empty where that cannot be told."""

    opening: tuple[int, ...] = ()
    """Opens the model's turn."""
    end: tuple[int, ...] = ()
    """Ends it; the model samples some of it itself, usually the first id."""
    rests: tuple[str | None, ...] = ()
    """What is left of the end after its first n ids; ``None``: cut inside a character."""
    end_text: str = ""


class FolderRenderer:
    """Renders and reads for one model folder."""

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        template: ChatTemplate,
        *,
        stop_ids: tuple[int, ...],
        packaged: Packaged | None,
        history: History,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._packaged = packaged
        self._appends = history == "append"
        self._marks = _learned(template, tokenizer)
        own = packaged.stop_ids if packaged is not None else ()
        # A base model's files name the end of a document; the template says what ends a turn.
        ends = self._marks.end[:1]
        marked = ends if not tokenizer.decode(ends, skip_special_tokens=True) else ()
        self._stop_ids = frozenset((*stop_ids, *own, *marked))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the model's turn."""
        return self._stop_ids

    @property
    def kind(self) -> str:
        """Which model of the package helps; ``template`` where none does."""
        return self._packaged.name if self._packaged is not None else "template"

    def prompt(self, request: GenerateRequest) -> RenderedPrompt:
        """Return the ids to sample after.

        Raises:
            ModelRefused: the template cannot render these messages.
        """
        known = array("i", request.prompt_ids)
        if known and self._is_whole(request, known):
            return RenderedPrompt(ids=known)
        if known and self._appends:
            more = self._bridge(request, known)
            if more is not None:
                return RenderedPrompt(ids=known + array("i", more))
        text = self._template.text(request.messages, request.tools, open_turn=True)
        ids = array("i", self._tokenizer.encode(text))
        return RenderedPrompt(ids=ids, rerendered=ids[: len(known)] != known)

    def read(self, token_ids: "array[int]", request: GenerateRequest) -> Reading:
        """Return what ``token_ids`` say; never raises."""
        sampled = token_ids.tolist()
        if sampled and sampled[-1] in self._stop_ids:
            del sampled[-1]
        shown = self._tokenizer.decode(sampled, skip_special_tokens=True)
        if not request.tools:
            return Reading(text=shown)
        raw = self._tokenizer.decode(sampled)
        parsed = None
        if self._packaged is not None:
            parsed = self._packaged.parsed(sampled, list(self._marks.opening), request.tools)
        if parsed is None or not parsed.calls:
            return Reading(text=shown, tool_calls=parse_tool_calls(raw, request.tools))
        if any(call.error is not None for call in parsed.calls):
            return Reading(text=raw, tool_calls=parsed.calls)  # to be shown again as it was
        return Reading(text=self._before_calls(sampled, parsed), tool_calls=parsed.calls)

    def text(self, token_ids: "array[int]") -> str:
        """Return the plain text of ids, specials left out."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def _before_calls(self, sampled: list[int], parsed: Parsed) -> str:
        if parsed.calls_begin is None:
            return parsed.said
        return self._tokenizer.decode(sampled[: parsed.calls_begin], skip_special_tokens=True)

    def _is_whole(self, request: GenerateRequest, known: "array[int]") -> bool:
        """Whether the known ids are the whole prompt already."""
        if request.known_messages:
            return request.known_messages >= len(request.messages)
        opening = self._marks.opening
        if not answered_messages(request):
            return True
        return bool(opening) and tuple(known[-len(opening) :]) == opening

    def _bridge(self, request: GenerateRequest, known: "array[int]") -> list[int] | None:
        """Return what follows the known ids; ``None`` where the past is shown differently now."""
        covered = request.known_messages or answered_messages(request)
        began = _last(known, self._marks.opening)
        if self._packaged is not None and began:
            ids = known.tolist()
            more = template_messages(request.messages)[covered:]
            found = self._packaged.bridged(ids[:began], ids[began:], more, request.tools)
            if found is not None:
                return found
        try:
            whole = self._template.text(request.messages, request.tools, open_turn=True)
            shown = self._tokenizer.decode(known)
            if whole.startswith(shown):
                return self._encoded_after(known[-1], whole[len(shown) :])
            before = self._template.text(request.messages[:covered], request.tools, open_turn=False)
        except ModelRefused:
            return None
        end = self._marks.end_text
        if not end or not before.endswith(end) or not whole.startswith(before):
            return None
        rest = self._marks.rests[sampled_of(known[began:], self._marks.end)]
        if rest is None:
            return None
        return self._encoded_after(known[-1], rest + whole[len(before) :])

    def _encoded_after(self, last: int, text: str) -> list[int]:
        """Return the ids of ``text`` where it follows ``last``.

        Some tokenizers put a blank before whatever they are given: alone, the text would begin with
        an id that stands nowhere in a whole rendering.
        """
        ids = self._tokenizer.encode(self._tokenizer.decode([last]) + text)
        return ids[1:] if ids[:1] == [last] else self._tokenizer.encode(text)


def _learned(template: ChatTemplate, tokenizer: FolderTokenizer) -> TurnMarks:
    """Learn the marks of turns from tiny histories."""
    try:
        closed = template.text((_OPENING,), (), open_turn=False)
        opened = template.text((_OPENING,), (), open_turn=True)
    except ModelRefused:
        return TurnMarks()
    opens = opened.startswith(closed) and opened != closed
    opening = tuple(tokenizer.encode(opened[len(closed) :])) if opens else ()
    try:
        one, two = [template.text((_OPENING, one), (), open_turn=False) for one in _ANSWERS]
    except ModelRefused:
        return TurnMarks(opening=opening)
    text = str(common_tail(one, two))
    if not opens or not text or one == two:
        return TurnMarks(opening=opening)
    end = tuple(tokenizer.encode(text))
    begun = [tokenizer.decode(end[:count]) for count in range(len(end) + 1)]
    rests = [text[len(one) :] if text.startswith(one) else None for one in begun]
    return TurnMarks(opening=opening, end=end, rests=tuple(rests), end_text=text)


def _last(ids: "array[int]", part: tuple[int, ...]) -> int:
    """Return where the last ``part`` in ``ids`` ends; 0 where there is none."""
    packed, wanted = ids.tobytes(), array("i", part).tobytes()
    at = packed.rfind(wanted) if wanted else -1
    while at > 0 and at % _ID_BYTES:
        at = packed.rfind(wanted, 0, at + len(wanted) - 1)
    return (at + len(wanted)) // _ID_BYTES if at >= 0 else 0
