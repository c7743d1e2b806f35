"""What a server offers, found out before a run begins; what cannot be used is said in sentences.

Reached within ``model.start``; one token is sampled on every route that will be used, which also
warms the server up. Nothing is assumed from a version number: a field is offered when it came back.
"""

import asyncio
from typing import Any

import msgspec

from stoker.config.tree import ModelSettings
from stoker.errors import ConfigInvalid, ModelRefused, ModelUnavailable
from stoker.inference.http import answers, bodies
from stoker.inference.http.link import ServerLink
from stoker.inference.http.metrics import read_page
from stoker.inference.http.rendering import Renderer
from stoker.inference.http.weights import Weights
from stoker.model.generation import GenerateRequest, Message, Role, Sampling
from stoker.model.ids import RolloutId

TRIAL_SECONDS = 120.0
"""A server's very first call may compile and warm up."""
SCALE_OUT = "/inference/v1/generate"
_PAUSE_SECONDS = 0.2
_TRIAL = GenerateRequest(
    request_id="stoker-start",
    rollout_id=RolloutId("rol_start"),
    task_id="start",
    step=0,
    messages=(Message(role=Role.USER, content="a"),),
    tools=(),
    sampling=Sampling(tokens_max=1, temperature=0.0),
    seed=0,
)


class Offer(msgspec.Struct, kw_only=True):
    """What one server offers."""

    flavour: str
    name: str
    """Served model name to ask for."""
    context_max: int | None = None
    """Longest prompt and completion together, tokens."""
    token_ids: bool = False
    """A chat answer holds the ids of its prompt and of what was sampled."""
    logprobs: bool = False
    takes_ids: bool = False
    """Prompts may be ids, and histories can be rendered."""
    scale_out: bool = False
    """vLLM's ``/inference/v1/generate`` takes them, whose answers say each token's weights."""
    metrics: bool = False
    pauses: bool = False
    """It says whether it is paused."""
    says_spans: bool = False
    """Its answers say which weights sampled which of their tokens."""
    kv_tokens: int | None = None


async def probe(
    link: ServerLink,
    renderer: Renderer,
    weights: Weights,
    settings: ModelSettings,
    served: "Served",
) -> Offer:
    """Return what the server behind ``link`` offers.

    Raises:
        ConfigInvalid: it cannot be used as configured.
    """
    offer = Offer(flavour=served.flavour, name=served.name, context_max=served.context_max)
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            offer.pauses = await _paused(link)
            await weights.learn(offer.flavour)
            page = await _page(link)
            if page is not None:
                offer.metrics, offer.kv_tokens = True, page or None
            await _try_chat(link, offer, settings)
            if offer.flavour != "openai":
                await renderer.learn()
                await _try_ids(link, offer, renderer, settings)
    except TimeoutError as error:
        raise ConfigInvalid(
            f"model server {link.url} did not sample one token within {TRIAL_SECONDS:g} s; "
            "nothing was started. Look at its log"
        ) from error
    except (ModelRefused, ModelUnavailable) as error:
        raise ConfigInvalid(
            f"model server {link.url} is reached but does not sample: {error.message}; "
            "nothing was started"
        ) from error
    return offer


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says it serves."""

    name: str
    flavour: str
    context_max: int | None


async def reach(link: ServerLink, settings: ModelSettings) -> Served:
    """Wait for the server and choose the model to ask for.

    Raises:
        ConfigInvalid: not reached, no such server, key refused, or another model served.
    """
    listed = await _listed(link, settings.start)
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ConfigInvalid(
            f"what {link.url}/v1/models answers is no list of models ({listed!r:.200}); nothing "
            "was started. Give the address of a vLLM, SGLang or other OpenAI-compatible server"
        )
    entry = _chosen(link.url, entries, settings.name)
    return Served(
        name=str(entry["id"]),
        flavour=settings.flavour if settings.flavour != "auto" else await _flavour(link, entry),
        context_max=next(
            (
                int(entry[key])
                for key in ("max_model_len", "context_length")
                if isinstance(entry.get(key), int)
            ),
            None,
        ),
    )


async def _listed(link: ServerLink, seconds: float) -> Any:  # noqa: ANN401 - JSON
    problem = "it did not answer"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await link.get("/v1/models")
                except ModelUnavailable as error:
                    problem = error.message
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError as error:
        raise ConfigInvalid(
            f"model server {link.url} was not reached within {seconds:g} s (model.start): "
            f"{problem}; nothing was started. Start it, or correct --model"
        ) from error
    except ModelRefused as error:
        raise ConfigInvalid(
            f"model server {link.url} refuses /v1/models: {error.message}; nothing was started"
        ) from error


def _chosen(url: str, entries: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    names = sorted(str(entry.get("id")) for entry in entries)
    if wanted is None:
        bases = [entry for entry in entries if not entry.get("parent")]
        if len(bases) == 1:
            return bases[0]
        raise ConfigInvalid(
            f"model server {url} serves {', '.join(names) or 'no model'}; nothing was started. "
            "Choose one with --set model.name=…"
        )
    for entry in entries:
        if entry.get("id") == wanted:
            return entry
    raise ConfigInvalid(
        f"model server {url} does not serve {wanted!r} (model.name); it serves "
        f"{', '.join(names) or 'nothing'}; nothing was started"
    )


async def _flavour(link: ServerLink, entry: dict[str, Any]) -> str:
    owner = str(entry.get("owned_by", ""))
    if owner in {"vllm", "sglang"}:
        return owner
    for flavour, route, field in (
        ("sglang", "/model_info", "model_path"),
        ("sglang", "/get_model_info", "model_path"),
        ("vllm", "/version", "version"),
    ):
        answer = await _optional(link, route)
        if isinstance(answer, dict) and field in answer:
            return flavour
    return "openai"


async def _paused(link: ServerLink) -> bool:
    """Return whether the server says if it is paused.

    Raises:
        ConfigInvalid: it is, so that nothing could be tried.
    """
    answer = await _optional(link, "/is_paused")
    if not isinstance(answer, dict) or not isinstance(answer.get("is_paused"), bool):
        return False
    if answer["is_paused"]:
        raise ConfigInvalid(
            f"model server {link.url} is paused; nothing was started. Resume it (POST /resume)"
        )
    return True


async def _page(link: ServerLink) -> int | None:
    """Return the KV capacity the metrics page gives (0: not said); ``None`` without a page."""
    try:
        page = read_page(await link.text("/metrics"))
    except (ModelRefused, ModelUnavailable, ValueError):
        return None
    return (page.kv_tokens or 0) if page is not None else None


async def _try_chat(link: ServerLink, offer: Offer, settings: ModelSettings) -> None:
    """Sample one token by chat; ask for less where the server takes offence at the fields."""
    wanted = settings.logprobs != "none"
    trials = [(True, wanted), (False, wanted), (True, False), (False, False)]
    refused: ModelRefused | None = None
    for ids, logprobs in dict.fromkeys(trials):
        terms = bodies.Terms(
            name=offer.name, token_ids=ids, logprobs=logprobs, sglang=offer.flavour == "sglang"
        )
        body = bodies.chat(_TRIAL, terms, tokens_max=1, tool_choice=None)
        try:
            answer = answers.read_chat(await link.post("/v1/chat/completions", body))
        except ModelRefused as error:
            refused = error
            continue
        offer.token_ids = answer.token_ids is not None and answer.prompt_ids is not None
        offer.logprobs = answer.logprobs is not None
        offer.says_spans = bool(answer.weights) and answer.weights[-1].end >= 0
        return
    assert refused is not None
    if settings.api in {"completions", "generate"}:
        return  # a model without a chat template
    raise refused


async def _try_ids(
    link: ServerLink, offer: Offer, renderer: Renderer, settings: ModelSettings
) -> None:
    """Sample one token from ids, where the server can render and takes them."""
    if renderer.template is None:
        return
    ids = await renderer.ids(_TRIAL.messages, (), open_turn=True)
    terms = bodies.Terms(name=offer.name, logprobs=offer.logprobs)
    try:
        if offer.flavour == "sglang":
            body = bodies.generate(_TRIAL, ids, 1, _TRIAL.request_id)
            answer = answers.read_generate(await link.post("/generate", body))
        elif settings.api == "generate":
            body = bodies.scale_out(_TRIAL, terms, ids, 1)
            answer = answers.read_scale_out(await link.post(SCALE_OUT, body))
            offer.scale_out = True
        else:
            body = bodies.completion(_TRIAL, terms, ids, 1)
            answer = answers.read_completion(await link.post("/v1/completions", body))
    except ModelRefused:
        return
    offer.takes_ids = answer.token_ids is not None


async def _optional(link: ServerLink, path: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return await link.get(path)
    except (ModelRefused, ModelUnavailable):
        return None
