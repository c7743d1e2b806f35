"""The routes of the test server, with the fields each flavour has (facts: vLLM 0.32, SGLang)."""

import json
import re
from array import array
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from stoker.inference.byte_tokens import derived_logprobs
from stoker.inference.sampling import Sampled
from stoker.model.generation import GenerateRequest, Message, Role, Sampling, ToolCall, ToolSpec
from stoker.model.toolcalls import parse_tool_calls
from stoker.testing.openai_server_engine import (
    Engine,
    EngineCall,
    Features,
    messages_of,
    rendered,
    request_from_messages,
    text_of,
)
from stoker.testing.openai_server_http import Problem, Request, Response, answer
from stoker.testing.openai_server_pages import sglang_page, vllm_page
from stoker.testing.openai_server_tables import DEVELOPMENT, GET, IDS, NAMES, POST

Body = dict[str, Any]
_BLOCK = re.compile(r"\n?<tool_call>.*?(</tool_call>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_KNOWN = {
    "model", "messages", "prompt", "temperature", "max_tokens", "stop", "seed", "stream", "tools",
    "tool_choice", "logprobs",
}  # fmt: skip


class Routes:
    """Answers requests from one engine."""

    def __init__(self, engine: Engine, features: Features, name: str) -> None:
        self._engine = engine
        self._features = features
        self._name = name
        self._live: dict[str, list[Any]] = {}

    async def handle(self, request: Request) -> Response:
        """Return the answer.

        Raises:
            Problem: it is an error.
        """
        route = GET.get(request.path) if request.method == "GET" else POST.get(request.path)
        flavours, method = route or ("", "")
        features = self._features
        offered = features.flavour in flavours.split() if flavours else bool(route)
        if not offered or (request.path in DEVELOPMENT and not features.development):
            raise Problem(404, f"there is no {request.method} {request.path}")
        if request.path in IDS and not features.tokenizes:
            raise Problem(404, f"there is no {request.path}")
        found: Response = await getattr(self, method)(request)
        return found

    # --- what the server is ------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Answer that it lives."""
        del request
        return answer({})

    async def models(self, request: Request) -> Response:
        """List what is served."""
        del request
        entry: Body = {"id": self._name, "object": "model", "root": self._name, "parent": None}
        if self._features.flavour != "openai":
            entry |= {"owned_by": self._features.flavour, "max_model_len": self._context_max}
        return answer({"object": "list", "data": [entry]})

    async def version(self, request: Request) -> Response:
        """Say which server it plays."""
        del request
        return answer({"version": "0.32.0"})

    async def model_info(self, request: Request) -> Response:
        """Say which weights are served (SGLang)."""
        del request
        return answer({"model_path": self._name, "weight_version": self._engine.weight_version})

    async def weight_info(self, request: Request) -> Response:
        """Say which weights are served (vLLM)."""
        del request
        return answer({"weight_version": self._engine.weight_version})

    async def is_paused(self, request: Request) -> Response:
        """Say whether it is paused."""
        del request
        return answer({"is_paused": self._engine.paused})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics page."""
        del request
        page = vllm_page if self._features.flavour == "vllm" else sglang_page
        return Response(body=page(self._engine, self._name).encode(), media="text/plain")

    # --- control -----------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        """Hold every call, or end those in flight."""
        self._engine.pause()
        if "mode=abort" in request.query or request.json().get("mode") == "abort":
            self._engine.end()
        return answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        del request
        self._engine.resume()
        return answer({"status": "resumed"})

    async def set_version(self, request: Request) -> Response:
        """Name the weights that are served from now on."""
        body = request.json()
        version = body.get("new_version", body.get("weight_version"))
        if version is not None:
            self._engine.weight_version = str(version)
        return answer({"success": True})

    async def nothing(self, request: Request) -> Response:
        """Accept what has no effect on a policy."""
        del request
        return answer({"results": [None]})

    async def forget(self, request: Request) -> Response:
        """Empty the prefix cache: not while calls hold it, unless told to take it from them."""
        free = not self._engine.in_flight or "reset_running_requests=true" in request.query
        if free:
            self._engine.forget()
        return answer({"success": free})

    async def abort(self, request: Request) -> Response:
        """Answer one call, or all of them, with what it has (SGLang)."""
        body = request.json()
        self._end([] if body.get("abort_all") else [str(body.get("rid"))])
        return Response()

    async def abort_requests(self, request: Request) -> Response:
        """Answer calls with what they have, by vLLM's names for them; unknown ones are none."""
        names = request.json().get("request_ids")
        if names is None and request.path != "/abort_requests":
            raise Problem(400, "Missing 'request_ids' in request body")
        self._end(names or [])
        return Response()

    def _end(self, names: list[str]) -> None:
        self._live.setdefault("aborted", []).extend(names)
        self._engine.end(*names)

    # --- tokens ------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Render messages."""
        body = request.json()
        if "messages" not in body:
            raise Problem(400, "this server renders messages only")
        messages, tools = self._history(body)
        # SGLang's renderings always open the model's turn.
        closed = self._features.flavour == "vllm" and not body.get("add_generation_prompt", True)
        ids = rendered(messages, tools, open_turn=not closed)
        tokens = ids.tolist()
        return answer({"tokens": tokens, "count": len(tokens), "max_model_len": self._context_max})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        field = "prompt" if self._features.flavour == "vllm" else "text"
        return answer({field: text_of(array("i", request.json()["tokens"]))})

    # --- sampling ----------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Sample after messages."""
        body = request.json()
        self._check(body)
        messages, tools = self._history(body)
        choice = body.get("tool_choice", "auto")
        if tools and choice == "auto" and not self._features.tool_parser:
            raise Problem(
                400,
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
            )
        prompt = rendered(messages, tools, open_turn=True)
        asked = request_from_messages(
            messages, tools, self._sampling(body, len(prompt), rest=True), int(body.get("seed", 0))
        )
        call, sampled = self._begin(request, body, asked, prompt)
        if body.get("stream"):
            return self._streamed(call, sampled, "chat.completion.chunk")
        await self._finish(call, sampled)
        return answer(self._chat_answer(body, asked, call, sampled, parse=choice != "none"))

    async def completion(self, request: Request) -> Response:
        """Sample after a prompt of ids."""
        body = request.json()
        self._check(body)
        call, sampled, _ = self._from_ids(request, body, body.get("prompt"))
        if body.get("stream"):
            return self._streamed(call, sampled, "text_completion")
        await self._finish(call, sampled)
        tokens = array("i", call.tokens)
        choice = self._choice(body, call, sampled) | {"text": self._text(tokens)}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [text_of(array("i", [token])) for token in tokens],
                "token_logprobs": _logprobs(tokens, body),
            }
        return answer({"object": "text_completion", "choices": [choice], **self._usage(call)})

    async def generate(self, request: Request) -> Response:
        """Sample after a prompt of ids (SGLang)."""
        body = request.json()
        parameters = body.get("sampling_params") or {}
        given = {**parameters, "max_tokens": parameters.get("max_new_tokens", 128)}
        call, sampled, _ = self._from_ids(request, given, body.get("input_ids"))
        await self._finish(call, sampled)
        tokens = array("i", call.tokens)
        values = _logprobs(tokens, {})
        reason = _reason(call, sampled)
        meta: Body = {
            "id": body.get("rid"),
            "finish_reason": {"type": reason},
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(tokens),
            "weight_version": self._engine.weight_version,
        }
        if body.get("return_logprob"):
            pairs = zip(values, tokens, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        return answer(
            {"text": self._text(tokens), "output_ids": tokens.tolist(), "meta_info": meta}
        )

    async def scaled(self, request: Request) -> Response:
        """Sample after a prompt of ids, and say which weights sampled what (vLLM)."""
        if not self._features.scale_out:
            raise Problem(403, "Scale-out endpoints are disabled. Restart with --enable-scale-out")
        body = request.json()
        self._check(body)
        parameters = body.get("sampling_params") or {}
        call, sampled, _ = self._from_ids(request, {**body, **parameters}, body.get("token_ids"))
        await self._finish(call, sampled)
        tokens = array("i", call.tokens)
        choice = self._choice({}, call, sampled) | {
            "text": self._text(tokens),
            "token_ids": call.tokens,
            "weight_versions": _spans(call.versions),
        }
        if "logprobs" in parameters:
            choice["logprobs"] = {"content": self._content(tokens, parameters)}
        return answer({"request_id": call.request_id, "choices": [choice]})

    def _from_ids(
        self, request: Request, body: Body, prompt: object
    ) -> tuple[EngineCall, Sampled, GenerateRequest]:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise Problem(400, "this server takes prompts of token ids only")
        ids = array("i", prompt)
        messages, tools = messages_of(ids)
        sampling = self._sampling(body, len(ids), rest=False)
        asked = request_from_messages(messages, tools, sampling, int(body.get("seed", 0)))
        return *self._begin(request, body, asked, ids), asked

    def _begin(
        self, request: Request, body: Body, asked: GenerateRequest, prompt: "array[int]"
    ) -> tuple[EngineCall, Sampled]:
        rid = request.headers.get("x-request-id", "")
        call = EngineCall(
            request_id=rid,
            name=NAMES.get(request.path, "{}").format(rid)
            if self._features.flavour == "vllm"
            else rid,
            prompt=prompt.tolist(),
            priority=int(body.get("priority", 0)),
        )
        return call, self._engine.lay_out(asked, prompt)

    async def _finish(self, call: EngineCall, sampled: Sampled) -> None:
        async for _ in self._engine.tokens(call, sampled):
            pass

    def _streamed(self, call: EngineCall, sampled: Sampled, kind: str) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async for token in self._engine.tokens(call, sampled):
                text = text_of(array("i", [token]))
                choice: Body = {"index": 0, "finish_reason": None, "token_ids": [token]}
                if kind == "text_completion":
                    choice["text"] = text
                else:
                    choice["delta"] = {"content": text}
                yield _event({"object": kind, "choices": [choice]})
            last: Body = {
                "index": 0,
                "finish_reason": _reason(call, sampled),
                "delta": {},
            }
            yield _event({"object": kind, "choices": [last]})
            yield b"data: [DONE]\n\n"

        return Response(stream=events(), media="text/event-stream")

    # --- parts of answers --------------------------------------------------------------------

    def _chat_answer(
        self, body: Body, asked: GenerateRequest, call: EngineCall, sampled: Sampled, *, parse: bool
    ) -> Body:
        tokens = array("i", call.tokens)
        text = text_of(tokens)
        message: Body = {"role": "assistant", "content": self._text(tokens)}
        choice = self._choice(body, call, sampled) | {"message": message}
        calls = parse_tool_calls(text, asked.tools) if asked.tools and parse else ()
        if calls and self._features.tool_parser and call.done and not sampled.cut:
            message["content"] = _BLOCK.sub("", text) or None
            message["tool_calls"] = [_tool_call(one) for one in calls]
            choice["finish_reason"] = "tool_calls"
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self._content(tokens, body)}
        whole: Body = {"object": "chat.completion", "choices": [choice], **self._usage(call)}
        if body.get("return_token_ids") and self._features.token_ids:
            whole["prompt_token_ids"] = call.prompt
        if self._features.early_sglang:
            self._as_early_sglang(body, whole, call)
        if self._features.flavour == "sglang":
            whole["metadata"] = {"weight_version": self._engine.weight_version}
        return whole

    def _content(self, tokens: "array[int]", body: Body) -> list[Body]:
        values = _logprobs(tokens, body)
        return [
            {"token": self._text(array("i", [token])), "logprob": value}
            for token, value in zip(tokens, values, strict=True)
        ]

    def _as_early_sglang(self, body: Body, whole: Body, call: EngineCall) -> None:
        choice = whole["choices"][0]
        whole.pop("prompt_token_ids", None)
        choice.pop("token_ids", None)
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = call.prompt
        if body.get("return_meta_info"):
            values = _logprobs(array("i", call.tokens), body)
            pairs = zip(values, call.tokens, strict=True)
            choice["meta_info"] = {
                "output_token_logprobs": [[value, token, None] for value, token in pairs]
            }

    def _choice(self, body: Body, call: EngineCall, sampled: Sampled) -> Body:
        choice: Body = {
            "index": 0,
            "finish_reason": _reason(call, sampled),
            "stop_reason": None,
        }
        if body.get("return_token_ids") and self._features.token_ids:
            choice["token_ids"] = call.tokens
            if "prompt" in body:
                choice["prompt_token_ids"] = call.prompt
        if self._features.weight_spans:
            choice["weight_versions"] = _spans(call.versions)
        return choice

    def _text(self, tokens: "array[int]") -> str:
        text = text_of(tokens)
        if not self._features.foreign_calls:
            return text
        return text.replace("<", "[")  # token by token, as servers show them

    def _usage(self, call: EngineCall) -> Body:
        count = len(call.tokens)
        return {
            "id": call.request_id,
            "model": self._name,
            "usage": {"prompt_tokens": len(call.prompt), "completion_tokens": count},
        }

    def _history(self, body: Body) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
        messages = [_message(one) for one in body.get("messages") or ()]
        if self._features.drops_thinking:
            last = max((at for at, one in enumerate(messages) if one.role is Role.USER), default=-1)
            messages = [
                msgspec.structs.replace(one, content=_THOUGHT.sub("", one.content))
                if at < last and one.role is Role.ASSISTANT
                else one
                for at, one in enumerate(messages)
            ]
        tools = tuple(
            msgspec.convert({**one["function"]}, ToolSpec) for one in body.get("tools") or ()
        )
        return tuple(messages), tools

    def _sampling(self, body: Body, prompt: int, *, rest: bool) -> Sampling:
        room = self._context_max - prompt
        limit = body.get("max_tokens", room if rest else 16)
        if room <= 0 or limit > room:
            raise Problem(
                400,
                f"This model's maximum context length is {self._context_max} tokens. However, you "
                f"requested {limit} output tokens and your prompt contains {prompt} input tokens.",
            )
        if limit < 1:
            raise Problem(400, "max_tokens must be at least 1")
        return Sampling(
            temperature=float(body.get("temperature", 1.0)),
            tokens_max=limit,
            stop=tuple(body.get("stop") or ()),
        )

    def _check(self, body: Body) -> None:
        if body.get("model") != self._name:
            raise Problem(404, f"The model `{body.get('model')}` does not exist.")
        unknown = sorted(set(body) - _KNOWN)
        if self._features.strict and unknown:
            raise Problem(400, f"Unrecognized request argument supplied: {unknown[0]}")

    @property
    def _context_max(self) -> int:
        return self._features.context_max


def _reason(call: EngineCall, sampled: Sampled) -> str:
    if not call.done:
        return "abort"
    return "length" if sampled.cut else "stop"


def _message(said: Body) -> Message:
    calls = []
    for one in said.get("tool_calls") or ():
        try:
            arguments = json.loads(one["function"]["arguments"])
        except ValueError as error:
            raise Problem(400, f"the arguments of a tool call are no JSON: {error}") from error
        calls.append(ToolCall(call_id=one["id"], name=one["function"]["name"], arguments=arguments))
    return Message(
        role=Role(said["role"]), content=said.get("content") or "", tool_calls=tuple(calls)
    )


def _tool_call(call: ToolCall) -> Body:
    arguments = call.raw if call.error else json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _logprobs(tokens: "array[int]", body: Body) -> list[float]:
    return derived_logprobs(tokens, int(body.get("seed", 0))).tolist()


def _spans(versions: list[str]) -> list[Body]:
    spans: list[Body] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans


def _event(value: Body) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
