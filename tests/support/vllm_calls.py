"""Models over real servers, and the requests the rig's tests ask of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from stoker.config.tree import LaneSettings, ModelSettings
from stoker.coordinator.lane import Lane
from stoker.inference.http.model import HttpModel
from stoker.model.generation import GenerateRequest, Message, Role, Sampling
from stoker.seams.clock import SystemClock
from support.inference import request
from support.vllm_server import Server

SECONDS_MAX = 900.0
"""A hang; the machine may be busy with something else."""
LOOK_SECONDS = 0.02
MORE = Message(role=Role.USER, content="Go on.")


@asynccontextmanager
async def asking(*servers: Server, **settings: Any) -> AsyncIterator[HttpModel]:
    """Yield a started model of ``servers`` that looks at them only when it is told to."""
    urls = tuple(server.url for server in servers)
    async with asyncio.timeout(SECONDS_MAX):
        model = HttpModel(urls, ModelSettings.model_validate({"scrape": "1h", **settings}))
        await model.start()
        try:
            yield model
        finally:
            await model.close()


def lane_over(model: HttpModel, **settings: Any) -> Lane:
    """Return a lane that follows the model's pauses, as the coordinator makes it."""
    lane = Lane(model, LaneSettings.model_validate(settings), SystemClock())
    model.watch_pauses(lane.pause, lane.resume)
    return lane


def asked(
    rollout: str = "rol_a",
    text: str = "Tell me about steam engines.",
    *,
    tokens_max: int = 16,
    temperature: float = 0.0,
    **keys: Any,
) -> GenerateRequest:
    """Return a short request."""
    keys.setdefault("messages", (Message(role=Role.USER, content=text),))
    sampling = Sampling(temperature=temperature, tokens_max=tokens_max)
    return msgspec.structs.replace(request(rollout, **keys), sampling=sampling)


def at(temperature: float, plain: GenerateRequest) -> GenerateRequest:
    """Return ``plain`` at another temperature."""
    sampling = msgspec.structs.replace(plain.sampling, temperature=temperature)
    return msgspec.structs.replace(plain, sampling=sampling)


async def until_running(server: Server, count: int) -> None:
    """Return when the server says that ``count`` calls run."""
    async with asyncio.timeout(SECONDS_MAX):
        while await asyncio.to_thread(server.figure, "vllm:num_requests_running") != count:
            await asyncio.sleep(LOOK_SECONDS)


async def until_sampled(server: Server, more: int) -> None:
    """Return when the server has sampled ``more`` tokens than now."""
    name = "vllm:generation_tokens_total"
    goal = await asyncio.to_thread(server.figure, name) + more
    async with asyncio.timeout(SECONDS_MAX):
        while await asyncio.to_thread(server.figure, name) < goal:
            await asyncio.sleep(LOOK_SECONDS)


def no_open_ends(model: HttpModel) -> None:
    """Hold that no call of ``model`` is in flight and no connection in use."""
    for replica in model.replicas:
        assert model.load(replica.index).running == 0
        session = replica.link._session
        assert session is not None
        assert session.connector is not None
        assert not session.connector._acquired


def say(figure: str) -> None:
    """Show what was measured; pytest shows it with ``-rA``."""
    print(figure)  # noqa: T201 - figures are what the rig is for
