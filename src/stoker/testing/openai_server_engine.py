"""The engine of the test server: a policy's answers as tokens, in time, under weights that change.

Tokens are bytes (``inference.byte_tokens``). With ``odd_ids`` what is *sampled* has other ids than
the same text *rendered* has, so that a history that was tokenised again cannot go unnoticed. A
pause holds every call between two tokens, and then nothing runs and nothing waits (as vLLM counts).
"""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Literal

import msgspec

from stoker.inference.byte_tokens import END, SPEAKERS, TOOLS, ids_text, prompt_of
from stoker.inference.policy import Policy
from stoker.inference.sampling import Sampled, lay_out
from stoker.model.generation import (
    GenerateRequest,
    Message,
    Role,
    Sampling,
    ToolSpec,
)
from stoker.model.ids import RolloutId

ODD = 512
"""Added to the id of a sampled byte, with ``odd_ids``."""
_CONTEXTS_MAX = 64
_SPEAKER_OF = {token: role for role, token in SPEAKERS.items()}


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What the server can do."""

    flavour: Literal["vllm", "sglang", "openai"] = "vllm"
    token_ids: bool = True
    """Answers hold token ids."""
    tokenizes: bool = True
    """It renders messages (``/tokenize``) and takes ids."""
    development: bool = True
    """vLLM's development routes: ``/is_paused``, ``/weight_info`` …"""
    tool_parser: bool = True
    """Chats return tool calls as a structure; without, tools with ``auto`` are refused."""
    foreign_calls: bool = False
    """Tool calls are sampled in a form that only this server reads."""
    weight_spans: bool = False
    """Answers say which weights sampled which tokens."""
    scale_out: bool = False
    """vLLM started with ``--enable-scale-out``: ids in, and each token's weights out."""
    drops_thinking: bool = False
    """The template leaves out what earlier turns thought."""
    strict: bool = False
    """Unknown fields are refused, as OpenAI's own server does."""
    early_sglang: bool = False
    """Before ``return_token_ids``: ids come under SGLang's first names for them."""
    context_max: int = 1_000_000


class EngineCall(msgspec.Struct, kw_only=True):
    """One call as it was and went."""

    request_id: str
    prompt: list[int]
    name: str = ""
    """What the server calls it: how it is aborted."""
    priority: int = 0
    tokens: list[int] = []
    versions: list[str] = []
    """Weights of each token."""
    done: bool = False
    aborted: bool = False
    """It was not sampled to its end: nobody wanted it any more, or ``ended`` was set."""
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set to have it answered with what it has."""


class Engine:
    """Samples; counts what it does."""

    def __init__(self, policy: Policy, *, token_seconds: float, odd_ids: bool) -> None:
        self._policy = policy
        self._token_seconds = token_seconds
        self._odd = odd_ids
        self._awake = asyncio.Event()
        self._awake.set()
        self._contexts: list[bytes] = []
        self._in_flight = 0
        self.changed = asyncio.Condition()
        """Notified when a call begins or ends, or a pause does."""
        self.weight_version = "default"
        self.calls: list[EngineCall] = []
        self.running_max = 0
        self.prefix_queries = self.prefix_hits = 0
        self.tokens_prefilled = self.tokens_sampled = 0

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled for now."""
        return not self._awake.is_set()

    @property
    def in_flight(self) -> int:
        """Calls that are neither answered nor gone."""
        return self._in_flight

    @property
    def running(self) -> int:
        """Calls as the metrics show them: none while paused."""
        return 0 if self.paused else self._in_flight

    def pause(self) -> None:
        """Hold every call between two tokens."""
        self._awake.clear()

    def resume(self) -> None:
        """Go on."""
        self._awake.set()

    def end(self, *names: str) -> None:
        """Have the calls of these names answered with what they have; of none given, all."""
        for call in self.calls:
            if not names or call.name in names:
                call.ended.set()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._contexts = []

    def lay_out(self, request: GenerateRequest, prompt: "array[int]") -> Sampled:
        """Return what will be sampled after ``prompt``; a turn that it opens is gone on with."""
        begun = _open_turn(prompt)
        sampling = msgspec.structs.replace(
            request.sampling, tokens_max=request.sampling.tokens_max + len(begun)
        )
        whole = msgspec.structs.replace(request, sampling=sampling)
        sampled = lay_out(whole, self._policy.answer(whole), prompt)
        tokens = sampled.tokens
        if self._odd:
            tokens = array("i", (token + ODD if token < END else token for token in tokens))
        if tokens[: len(begun)] == begun:
            tokens = tokens[len(begun) :]
        return msgspec.structs.replace(sampled, tokens=tokens)

    async def tokens(self, call: EngineCall, sampled: Sampled) -> AsyncIterator[int]:
        """Yield the ids of ``sampled`` in the time they take; ``call`` records how it went.

        **Cancellation:** counted as aborted; nothing of it runs on.
        """
        self.calls.append(call)
        self._prefill(sampled.prompt)
        await self._counted(1)
        try:
            for token in sampled.tokens:
                if not await self._may_sample(call):
                    return
                call.tokens.append(token)
                call.versions.append(self.weight_version)
                self.tokens_sampled += 1
                await self._notify()
                yield token
            call.done = True
        finally:
            call.aborted = not call.done
            self._in_flight -= 1
            await asyncio.shield(self._notify())

    async def _may_sample(self, call: EngineCall) -> bool:
        """Wait for the next token of ``call``; return whether there is one."""
        if self._token_seconds and not call.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._token_seconds):
                    await call.ended.wait()
        while self.paused and not call.ended.is_set():
            waits = [asyncio.ensure_future(one.wait()) for one in (self._awake, call.ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        return not call.ended.is_set()

    async def until_sampled(self, count: int) -> None:
        """Return when some call in flight has ``count`` tokens."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: any(
                    len(one.tokens) >= count for one in self.calls if not (one.done or one.aborted)
                )
            )

    async def until_quiet(self) -> None:
        """Return when no call is in flight."""
        async with self.changed:
            await self.changed.wait_for(lambda: self._in_flight == 0)

    async def until_in_flight(self, count: int) -> None:
        """Return when ``count`` calls are in flight."""
        async with self.changed:
            await self.changed.wait_for(lambda: self._in_flight >= count)

    async def _counted(self, by: int) -> None:
        self._in_flight += by
        self.running_max = max(self.running_max, self._in_flight)
        try:
            await self._notify()
        except asyncio.CancelledError:
            self._in_flight -= by
            raise

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _prefill(self, prompt: "array[int]") -> None:
        packed = prompt.tobytes()
        hits = max((len(one) for one in self._contexts if packed.startswith(one)), default=0)
        self.tokens_prefilled += len(prompt)
        self.prefix_queries += len(prompt)
        self.prefix_hits += hits // 4
        self._contexts = [*self._contexts, packed][-_CONTEXTS_MAX:]


def _open_turn(prompt: "array[int]") -> "array[int]":
    """Return what ``prompt`` holds of the model's turn already, where it ends within one."""
    for at in range(len(prompt) - 1, -1, -1):
        if prompt[at] == SPEAKERS[Role.ASSISTANT]:
            return prompt[at + 1 :]
        if prompt[at] == END or prompt[at] in _SPEAKER_OF:
            break
    return array("i")


def plain(ids: "array[int]") -> "array[int]":
    """Return the ids the same text has when it is rendered."""
    return array("i", (token - ODD if token >= ODD else token for token in ids))


def text_of(ids: "array[int]") -> str:
    """Return the text of sampled ids."""
    return ids_text(plain(ids))


def request_from_messages(
    messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], sampling: Sampling, seed: int
) -> GenerateRequest:
    """Return the request a policy is asked; the task is not known here: ``*``."""
    return GenerateRequest(
        request_id="served",
        rollout_id=RolloutId("rol_served"),
        task_id="*",
        step=sum(message.role is Role.ASSISTANT for message in messages),
        messages=messages,
        tools=tools,
        sampling=sampling,
        seed=seed,
    )


def rendered(
    messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, open_turn: bool
) -> "array[int]":
    """Return ``messages`` as ids; ``open_turn`` adds what opens the model's turn."""
    ids = prompt_of(request_from_messages(messages, tools, Sampling(), 0))
    return ids if open_turn else ids[:-1]


def messages_of(ids: "array[int]") -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """Return the messages and tools that a prompt of ids shows."""
    messages: list[Message] = []
    tools: tuple[ToolSpec, ...] = ()
    section, start = -1, 0
    bare = plain(ids)
    for at, token in enumerate([*bare, END]):
        if token != END and token not in _SPEAKER_OF and token != TOOLS:
            continue
        content = bare[start:at]
        if section == TOOLS:
            tools = msgspec.msgpack.decode(bytes(content.tolist()), type=tuple[ToolSpec, ...])
        elif section >= 0 and not (_SPEAKER_OF[section] is Role.ASSISTANT and at == len(bare)):
            messages.append(Message(role=_SPEAKER_OF[section], content=ids_text(content)))
        section, start = (token, at + 1) if token != END else (-1, at + 1)
    return tuple(messages), tools
