"""What is sent: a request in the words of each route. Pure functions.

``/v1/chat/completions`` (messages in), ``/v1/completions`` and ``/inference/v1/generate`` (vLLM's,
ids in), ``/generate`` (SGLang's, ids in), ``/tokenize`` (messages in, ids out). Fields as vLLM 0.32
and SGLang take them.
"""

from typing import Any

import msgspec

from stoker.inference.byte_tokens import render_call
from stoker.model.generation import GenerateRequest, Message, Role, Sampling, ToolCall, ToolSpec

Body = dict[str, Any]
_CALL_OPEN = "<tool_call>"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask of a server in every call."""

    name: str
    """Served model name."""
    token_ids: bool = True
    """Ask for exact ids."""
    logprobs: bool = True
    priority: bool = False
    sglang: bool = False
    """SGLang's names for the same, too."""


def chat(
    request: GenerateRequest, terms: Terms, *, tokens_max: int | None, tool_choice: str | None
) -> Body:
    """Return the body of ``/v1/chat/completions``; without ``tokens_max`` the server's rest."""
    body = _common(request, terms)
    body["messages"] = messages(request.messages)
    if tokens_max is not None:
        body["max_tokens"] = tokens_max
    if request.tools:
        body["tools"] = tools(request.tools)
        if tool_choice is not None:
            body["tool_choice"] = tool_choice
    if terms.logprobs:
        body["logprobs"] = True
    return body


def completion(request: GenerateRequest, terms: Terms, ids: list[int], tokens_max: int) -> Body:
    """Return the body of ``/v1/completions`` for a prompt of ``ids``."""
    body = _common(request, terms)
    body |= {"prompt": ids, "max_tokens": tokens_max}
    if terms.logprobs:
        body["logprobs"] = 0  # the sampled token's own
    return body


def generate(request: GenerateRequest, ids: list[int], tokens_max: int, rid: str) -> Body:
    """Return the body of SGLang's ``/generate`` for a prompt of ``ids``."""
    sampling: Body = {"temperature": request.sampling.temperature, "max_new_tokens": tokens_max}
    if request.sampling.stop:
        sampling["stop"] = list(request.sampling.stop)
    # Ids come with the log-probabilities, so these are always asked for.
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}


def scale_out(request: GenerateRequest, terms: Terms, ids: list[int], tokens_max: int) -> Body:
    """Return the body of vLLM's ``/inference/v1/generate`` for a prompt of ``ids``."""
    sampling = {**_sampling(request.sampling), "seed": request.seed, "max_tokens": tokens_max}
    if terms.logprobs:
        sampling["logprobs"] = 0  # the sampled token's own
    # Tokens alone have no text, and only the server can tell it.
    body: Body = {"model": terms.name, "token_ids": ids, "output_mode": "text"}
    body["sampling_params"] = sampling
    if terms.priority:
        body["priority"] = request.priority
    return body


def tokenize(
    name: str, history: tuple[Message, ...], offered: tuple[ToolSpec, ...], *, open_turn: bool
) -> Body:
    """Return the body of ``/tokenize``; ``open_turn`` adds what opens the model's turn."""
    body: Body = {
        "model": name,
        "messages": messages(history),
        "add_generation_prompt": open_turn,
    }
    if offered:
        body["tools"] = tools(offered)
    return body


def messages(history: tuple[Message, ...]) -> list[Body]:
    """Return ``history`` as OpenAI messages."""
    return [_message(message) for message in history]


def tools(offered: tuple[ToolSpec, ...]) -> list[Body]:
    """Return ``offered`` as OpenAI tools."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in offered
    ]


def _common(request: GenerateRequest, terms: Terms) -> Body:
    body: Body = {"model": terms.name, **_sampling(request.sampling)}
    body["seed"] = request.seed
    if terms.token_ids:
        body["return_token_ids"] = True
        if terms.sglang:  # its versions before July 2026
            body |= {"return_prompt_token_ids": True, "return_meta_info": True}
    if terms.priority:
        body["priority"] = request.priority
    return body


def _sampling(sampling: Sampling) -> Body:
    body: Body = {"temperature": sampling.temperature}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def _message(message: Message) -> Body:
    body: Body = {"role": message.role.value, "content": message.content}
    if message.role is Role.TOOL and message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if not message.tool_calls:
        return body
    if any(call.error is not None for call in message.tool_calls):
        # Templates read the arguments as JSON, and servers refuse a history in which they are
        # none: what the model wrote wrongly is shown as the text it is.
        body["content"] = _with_calls(message)
        return body
    # The text holds the calls already where it came from ids; a template would show them twice.
    body["content"] = message.content.partition(_CALL_OPEN)[0].rstrip("\n")
    body["tool_calls"] = [_call(call) for call in message.tool_calls]
    return body


def _with_calls(message: Message) -> str:
    if _CALL_OPEN in message.content:
        return message.content
    calls = [_shown(call) for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))


def _shown(call: ToolCall) -> str:
    return render_call(call.name, call.raw or call.arguments)


def _call(call: ToolCall) -> Body:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
