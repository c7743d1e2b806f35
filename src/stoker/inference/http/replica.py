"""One server as one replica: chooses the route of a call, and turns its answer into a generation.

``auto`` asks by chat while no ids of the history are known (the server's template and its reader of
tool calls do their work) and by exact ids from then on. Where a history did not only grow, or the
server must read its tool calls, a chat renders it anew and the generation says so.
"""

import asyncio
import re
from array import array
from contextlib import suppress
from typing import Any

import msgspec

from stoker.config.tree import ModelSettings
from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.continuing import SEAM_TOKENS_MAX, cut, is_aborted, is_seam, joined, rest_of
from stoker.inference.http import answers, bodies
from stoker.inference.http.answers import Answered
from stoker.inference.http.interrupting import Interruption
from stoker.inference.http.link import ServerLink
from stoker.inference.http.probe import SCALE_OUT, Offer, probe, reach
from stoker.inference.http.rendering import Renderer
from stoker.inference.http.weights import Weights, gapless, spans
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    ToolCall,
)
from stoker.model.toolcalls import parse_tool_calls
from stoker.seams.entropy import fresh_id

_ABORT_SECONDS = 5.0
_TOO_LONG = re.compile(
    r"context length|context window|max_model_len|too long|longer than", re.IGNORECASE
)
_NO_PARSER = re.compile(r"tool[ _-]choice|tool-call-parser", re.IGNORECASE)


class ToolReading(msgspec.Struct):
    """Who reads tool calls; shared by all replicas of a model, which serve the same one."""

    server: bool | None = None
    """``None``: not decided, since no call was seen yet."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt by ids."""

    ids: "array[int]"
    rerendered: bool


class Replica:
    """One server. ``start`` first."""

    def __init__(self, url: str, index: int, settings: ModelSettings, reading: ToolReading) -> None:
        self.index = index
        self.link = ServerLink(url, index, settings.api_key)
        self.weights = Weights(self.link)
        self.offer = Offer(flavour="openai", name="")
        self._settings = settings
        self._reading = reading
        self._renderer = Renderer(self.link, "")
        self._tool_choice: str | None = None
        self._interruption = Interruption(self.link)
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Reach the server and learn what it offers.

        Raises:
            ConfigInvalid: it cannot be used as configured.
        """
        served = await reach(self.link, self._settings)
        self._renderer = Renderer(self.link, served.name)
        self.offer = await probe(self.link, self._renderer, self.weights, self._settings, served)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion; raises as ``Model.generate``.

        **Cancellation:** the connection is closed (and SGLang told): the server aborts.
        """
        self._interruption.begun()
        try:
            if request.begun is not None and self.goes_on(request):
                return await self._rest(request, request.begun)
            return await self._turn(request)
        finally:
            self._interruption.over()

    async def interrupt(self) -> None:
        """Let the server abort our calls; they return what they have. See ``Interrupting``."""
        if self.aborts:
            await self._interruption.end(self.offer)

    @property
    def aborts(self) -> bool:
        """Whether calls can be ended without losing what they have sampled."""
        offer = self.offer
        asked = offer.flavour == "sglang" or offer.pauses or offer.scale_out
        return asked and offer.takes_ids and self._settings.api != "chat"

    def goes_on(self, request: GenerateRequest) -> bool:
        """Whether the turn of ``request`` can be gone on with by its ids."""
        if not self.offer.takes_ids or self._settings.api == "chat":
            return False
        return not (request.tools and self._server_reads())

    async def _turn(self, request: GenerateRequest) -> Generation:
        before = "" if self.offer.says_spans else await self.weights.look()
        answered, rerendered = await self._sampled(request)
        after = "" if answered.weights else await self.weights.look()
        generation = self._generation(request, answered, before, after, rerendered=rerendered)
        if is_aborted(generation):
            return await self._up_to_a_seam(request, generation)
        return generation

    async def _rest(self, request: GenerateRequest, begun: Generation) -> Generation:
        rest = rest_of(request)
        before = "" if self.offer.says_spans else await self.weights.look()
        answered = await self._from_ids(rest, array("i", rest.prompt_ids))
        after = "" if answered.weights else await self.weights.look()
        # Calls may begin in one part and end in the other: they are read from the whole below.
        bare = msgspec.structs.replace(rest, tools=())
        part = self._generation(bare, answered, before, after, rerendered=False)
        if is_aborted(part):
            return await self._up_to_a_seam(request, part)
        turn = joined(begun, part)
        if not request.tools:
            return turn
        calls = parse_tool_calls(turn.text, request.tools)
        if not calls:  # marks that the server leaves out of the text
            told = await self._renderer.text(array("i", turn.token_ids))
            calls = parse_tool_calls(told, request.tools)
        ended = turn.finish_reason is FinishReason.STOP and calls
        reason = FinishReason.TOOL_CALLS if ended else turn.finish_reason
        return msgspec.structs.replace(turn, tool_calls=calls, finish_reason=reason)

    async def _up_to_a_seam(self, request: GenerateRequest, part: Generation) -> Generation:
        """Return a turn up to where its last ``part`` may be cut, with the text of all its ids.

        Where a turn goes on, the text of its part alone may lack the space that it begins with.

        Raises:
            ModelUnavailable: nothing of it can be gone on from.
        """
        ids = array("i", part.token_ids)
        before = array("i", request.begun.token_ids if request.begun is not None else b"")
        kept = len(ids) if part.prompt_ids and self.goes_on(request) else 0
        with suppress(ModelRefused):
            for count in range(kept, max(0, kept - SEAM_TOKENS_MAX), -1):
                text = await self._renderer.text(before + ids[:count])
                if is_seam(text, request.sampling.stop):
                    turn = joined(request.begun, cut(part, count))
                    return msgspec.structs.replace(turn, text=text)
        raise ModelUnavailable(
            f"replica {self.index} ({self.link.url}) aborted call {request.request_id} after "
            f"{len(ids)} tokens; what it had sampled was thrown away",
            replica=self.index,
            request_id=request.request_id,
        )

    async def close(self) -> None:
        """Let go of every connection; aborts under way are sent first."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_SECONDS)
        await self.link.close()

    # --- routes ------------------------------------------------------------------------------

    async def _sampled(self, request: GenerateRequest) -> tuple[Answered, bool]:
        if request.sampling.tokens_max < 1:
            return no_room(None), False  # which servers refuse
        prompt = await self._prompt(request) if self._by_ids(request) else None
        if prompt is not None:
            return await self._from_ids(request, prompt.ids), prompt.rerendered
        answered = await self._from_chat(request)
        known = request.prompt_ids
        grown = answered.prompt_ids is not None and packed(answered.prompt_ids).startswith(known)
        return answered, bool(known) and not grown

    def _by_ids(self, request: GenerateRequest) -> bool:
        if self._settings.api in {"completions", "generate"}:
            return True
        if self._settings.api == "chat" or self._settings.history == "rerender":
            return False
        if not self.offer.takes_ids or not request.prompt_ids:
            return False
        return not (request.tools and self._server_reads())

    def _server_reads(self) -> bool:
        if self._settings.tool_calls != "auto":
            return self._settings.tool_calls == "server"
        return bool(self._reading.server)

    async def _prompt(self, request: GenerateRequest) -> Prompt | None:
        """Return the prompt by ids; ``None`` where a chat has to render it."""
        if request.prompt_ids and self._settings.history == "append":
            ids = await self._renderer.continued(request)
            if ids is not None:
                return Prompt(ids, rerendered=False)
            if self._settings.api == "auto":
                return None
        rendered = await self._renderer.ids(request.messages, request.tools, open_turn=True)
        ids = array("i", rendered)
        return Prompt(ids, rerendered=not ids.tobytes().startswith(request.prompt_ids))

    async def _from_ids(self, request: GenerateRequest, ids: "array[int]") -> Answered:
        tokens_max = request.sampling.tokens_max
        if self.offer.context_max is not None:
            tokens_max = min(tokens_max, self.offer.context_max - len(ids))
        if tokens_max <= 0:
            return no_room(ids)
        rid = _call_id(request)
        if self.offer.flavour == "sglang":
            body = bodies.generate(request, ids.tolist(), tokens_max, rid)
            answered = answers.read_generate(await self._post("/generate", body, rid))
        elif self.offer.scale_out:
            body = bodies.scale_out(request, self._terms(), ids.tolist(), tokens_max)
            answered = answers.read_scale_out(await self._post(SCALE_OUT, body, rid))
        else:
            body = bodies.completion(request, self._terms(), ids.tolist(), tokens_max)
            answered = answers.read_completion(await self._post("/v1/completions", body, rid))
        # What was sent is what was shown: that a server repeats it is not needed.
        return msgspec.structs.replace(answered, prompt_ids=tuple(ids))

    async def _from_chat(self, request: GenerateRequest) -> Answered:
        try:
            return await self._chat(request, request.sampling.tokens_max)
        except ModelRefused as error:
            said = error.context.get("said", "")
            if request.tools and self._tool_choice is None and _NO_PARSER.search(said):
                self._tool_choice = "none"  # shows the tools and reads nothing: we do
                return await self._from_chat(request)
            if not _TOO_LONG.search(said):
                raise
        return await self._chat_in_the_rest(request)

    async def _chat_in_the_rest(self, request: GenerateRequest) -> Answered:
        """Ask again for what the context leaves: the end of a context is data, not a failure."""
        try:
            return await self._chat(request, None)
        except ModelRefused as error:
            if not _TOO_LONG.search(error.context.get("said", "")):
                raise
        return no_room(None)

    async def _chat(self, request: GenerateRequest, tokens_max: int | None) -> Answered:
        rid = _call_id(request)
        body = bodies.chat(
            request, self._terms(), tokens_max=tokens_max, tool_choice=self._tool_choice
        )
        if self.offer.flavour == "sglang":
            body["rid"] = rid
        return answers.read_chat(await self._post("/v1/chat/completions", body, rid))

    def _terms(self) -> bodies.Terms:
        return bodies.Terms(
            name=self.offer.name,
            token_ids=self.offer.token_ids,
            logprobs=self.offer.logprobs,
            priority=self._settings.priority,
            sglang=self.offer.flavour == "sglang",
        )

    async def _post(self, path: str, body: bodies.Body, rid: str) -> Any:  # noqa: ANN401 - JSON
        self._interruption.sent(rid)
        try:
            return await self.link.post(path, body, rid)
        except asyncio.CancelledError:
            if self.offer.flavour == "sglang":
                task = asyncio.get_running_loop().create_task(self._abort(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._interruption.answered(rid)

    async def _abort(self, rid: str) -> None:
        """Tell SGLang, which may not look whether anybody still waits."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.link.post("/abort_request", {"rid": rid})
        except (ModelUnavailable, ModelRefused, TimeoutError):
            return  # the closed connection has said the same

    # --- answers -----------------------------------------------------------------------------

    def _generation(
        self,
        request: GenerateRequest,
        answered: Answered,
        before: str,
        after: str,
        *,
        rerendered: bool,
    ) -> Generation:
        ids = answered.token_ids or ()
        logprobs = answered.logprobs if answered.token_ids is not None else None
        found = spans(len(ids), answered.weights, before, after)
        if not gapless(found, len(ids)):
            raise ModelUnavailable(
                f"replica {self.index} ({self.link.url}) answered call {request.request_id} with "
                f"weight versions {answered.weights!r:.200}, which do not cover its {len(ids)} "
                "tokens; the answer was not used",
                replica=self.index,
                request_id=request.request_id,
            )
        aborted = answered.finish_reason is FinishReason.ABORTED
        calls = () if aborted else self._tool_calls(request, answered)
        reason = answered.finish_reason
        if reason in {FinishReason.STOP, FinishReason.TOOL_CALLS}:
            reason = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        return Generation(
            text=answered.text,
            tool_calls=calls,
            finish_reason=reason,
            prompt_ids=packed(answered.prompt_ids or ()),
            token_ids=packed(ids),
            logprobs=array("f", logprobs or ()).tobytes(),
            logprob_kind=self.logprob_kind if logprobs else LogprobKind.NONE,
            spans=found,
            rerendered=rerendered,
            replica=self.index,
            cached_tokens=answered.cached_tokens,
        )

    @property
    def logprob_kind(self) -> LogprobKind:
        """Which kind this server gives."""
        said = self._settings.logprobs
        if said == "none" or not (self.offer.token_ids and self.offer.logprobs):
            return LogprobKind.NONE
        if said != "auto":
            return LogprobKind(said)
        return LogprobKind.SAMPLED if self.offer.flavour == "sglang" else LogprobKind.RAW

    def _tool_calls(self, request: GenerateRequest, answered: Answered) -> tuple[ToolCall, ...]:
        if not request.tools:
            return ()
        # Servers leave special tokens out of the text; where calls are marked by such, the single
        # tokens still show them.
        raw = parse_tool_calls("".join(answered.token_texts), request.tools)
        if not answered.calls:
            return parse_tool_calls(answered.text, request.tools) or raw
        calls = parse_tool_calls(answered.calls, request.tools)
        if self._reading.server is None:
            ours, theirs = ([call.name for call in found] for found in (raw, calls))
            self._reading.server = ours != theirs
        return calls


def no_room(ids: "array[int] | None") -> Answered:
    """Return the answer to a prompt that fills the model's context: nothing, cut by length."""
    return Answered(
        text="",
        finish_reason=FinishReason.LENGTH,
        prompt_ids=tuple(ids) if ids is not None else None,
        token_ids=(),
    )


def packed(ids: tuple[int, ...]) -> bytes:
    """Return ``ids`` as an int32 array in bytes."""
    return array("i", ids).tobytes()


def _call_id(request: GenerateRequest) -> str:
    # A try that was aborted may still be known to the server: each try has an id of its own.
    return fresh_id(f"{request.request_id}-")
