"""Everything the client asks of vLLM, once: what is recorded, and what is played back.

Short and in one order. What came of it is returned as plain values, so that a client that reads a
recorded answer otherwise than when it was recorded is seen.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from stoker.config.tree import ModelSettings
from stoker.errors import StokerError
from stoker.inference.http.model import HttpModel
from stoker.model.generation import Generation, unpack_logprobs, unpack_tokens
from support.inference import RUN_PYTHON
from support.served import grown
from support.vllm_calls import MORE, asked
from support.vllm_server import NAME

CONTEXT_MAX = 2048
Results = dict[str, Any]


async def scenario(url: str, begin: Callable[[str], None] = lambda _: None) -> Results:
    """Ask a server at ``url``; ``begin`` is told of each chapter."""
    begin("1_start")
    model = await _started(url, "auto")
    try:
        results: Results = {"1_start": _offer(model)}
        for chapter, part in _CHAPTERS.items():
            begin(chapter)
            results[chapter] = await part(model)
    finally:
        await model.close()
    begin("6_scale_out")
    model = await _started(url, "generate")
    try:
        results["6_scale_out"] = await _turns(model)
    finally:
        await model.close()
    return results


async def _started(url: str, api: Literal["auto", "generate"]) -> HttpModel:
    model = HttpModel((url,), ModelSettings(start=60.0, api=api))
    await model.start()
    for task in model._watching:  # which would look in between, in no fixed order
        task.cancel()
    return model


def _offer(model: HttpModel) -> Results:
    offer = msgspec.to_builtins(model.replicas[0].offer)
    return {name: value for name, value in offer.items() if name != "kv_tokens"}


async def _turns(model: HttpModel) -> Results:
    one = await model.generate(0, asked(tokens_max=4))
    two = await model.generate(0, grown(one, MORE, before=asked().messages, tokens_max=3))
    return {"one": _said(one), "two": _said(two)}


async def _tools(model: HttpModel) -> Results:
    replica = model.replicas[0]
    request = asked(text="Print 1.", tokens_max=100, tools=(RUN_PYTHON,))
    cut = asked(text="Print 1.", tokens_max=9, tools=(RUN_PYTHON,))
    plain = await model.generate(0, msgspec.structs.replace(cut, seed=2))
    replica._tool_choice = "required"
    calls = await model.generate(0, request)
    inside = await model.generate(0, cut)
    replica._tool_choice = None
    return {"plain": _said(plain), "calls": _said(calls), "cut": _said(inside)}


async def _weights(model: HttpModel) -> Results:
    await model.pause("keep")
    await model.look()
    load = model.load(0).server
    assert load is not None
    await model.resume()
    await model.update_weights("step-9", mode="keep")
    said = await model.generate(0, asked(tokens_max=1))
    version = await model.replicas[0].link.get("/version")
    await model.replicas[0].link.post("/update_weight_version", {"new_version": "default"})
    return {"paused": load.paused, "after": _said(said), "version": version}


async def _errors(model: HttpModel) -> Results:
    replica = model.replicas[0]
    full = await model.generate(0, asked(text="w " * CONTEXT_MAX, tokens_max=1))
    replica._tool_choice = {"type": "function", "function": {"name": "nope"}}  # type: ignore[assignment]
    choice = await _refusal(model.generate(0, asked(tools=(RUN_PYTHON,))))
    replica._tool_choice = None
    body = {"model": NAME, "prompt": [10**8], "max_tokens": 1}
    ids = await _refusal(replica.link.post("/v1/completions", body))
    replica.offer.name = "big"
    name = await _refusal(model.generate(0, asked()))
    replica.offer.name = NAME
    return {"full": _said(full), "choice": choice, "ids": ids, "name": name}


async def _refusal(call: Awaitable[Any]) -> Results:
    try:
        await call
    except StokerError as error:
        return {"code": error.code, "said": error.context.get("said", "")}
    return {}


def _said(said: Generation) -> Results:
    return {
        "text": said.text,
        "reason": said.finish_reason.value,
        "prompt_ids": unpack_tokens(said.prompt_ids),
        "token_ids": unpack_tokens(said.token_ids),
        "logprobs": unpack_logprobs(said.logprobs),
        "versions": [[span.policy_version, span.start, span.end] for span in said.spans],
        "calls": [[call.name, call.arguments, call.error] for call in said.tool_calls],
        "rerendered": said.rerendered,
    }


_CHAPTERS = {"2_turns": _turns, "3_tools": _tools, "4_weights": _weights, "5_errors": _errors}
