"""Models behind the test server, and behind a function of this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from stoker.config.tree import ModelSettings
from stoker.inference.base import DeviceLoad, Model, ModelInfo
from stoker.inference.callable import CallableModel
from stoker.inference.http.model import HttpModel
from stoker.inference.policy import FunctionPolicy, Policy
from stoker.model.generation import (
    GenerateRequest,
    Generation,
    Message,
    Role,
)
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import request

SECONDS_MAX = 60.0
"""Nothing here takes long; a test that waits for more hangs."""


class ServedModel:
    """An ``HttpModel`` and the server it asks, made and ended together."""

    def __init__(self, policy: Policy, features: Features, **settings: Any) -> None:
        self.server = OpenAIServer(policy, features=features)
        self._settings = ModelSettings.model_validate(settings)
        self._model: HttpModel | None = None

    @property
    def model(self) -> HttpModel:
        assert self._model is not None
        return self._model

    async def start(self) -> None:
        await self.server.start()
        self._model = HttpModel((self.server.url,), self._settings)
        await self._model.start()

    def info(self) -> ModelInfo:
        return self.model.info()

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        return await self.model.generate(replica, request)

    def load(self, replica: int) -> DeviceLoad:
        return self.model.load(replica)

    async def close(self) -> None:
        await self.server.engine.until_quiet()
        await self.model.close()
        await self.server.kill()


def called(model: Model) -> CallableModel:
    """Return ``model`` as an engine of this process."""
    return CallableModel(lambda asked: model.generate(0, asked), window=64, name="test")


@asynccontextmanager
async def serving(
    said: Callable[[GenerateRequest], object] | str = "ok",
    *,
    features: Features | None = None,
    settings: dict[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[tuple[OpenAIServer, HttpModel]]:
    """Yield a server that says ``said`` and a started model that asks it."""
    policy = FunctionPolicy("test", said if callable(said) else lambda _: said)
    async with (
        asyncio.timeout(SECONDS_MAX),
        OpenAIServer(policy, features=features, **server) as one,
    ):
        model = HttpModel((one.url,), ModelSettings.model_validate(settings or {}))
        await model.start()
        try:
            yield one, model
        finally:
            await model.close()


def opening(text: str = "go") -> tuple[Message, ...]:
    """Return the start of a history."""
    return (Message(role=Role.USER, content=text),)


def grown(
    first: Generation, *more: Message, before: tuple[Message, ...] = (), **keys: Any
) -> GenerateRequest:
    """Return the request of the turn after ``first``, as the coordinator makes it."""
    start = before or opening()
    answer = Message(role=Role.ASSISTANT, content=first.text, tool_calls=first.tool_calls)
    return _known(request(step=1, messages=(*start, answer, *more), **keys), first, len(start) + 1)


def _known(asked: GenerateRequest, first: Generation, covered: int) -> GenerateRequest:
    ids = first.prompt_ids + first.token_ids if first.prompt_ids else b""
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
    return GenerateRequest(**{**fields, "prompt_ids": ids, "known_messages": covered if ids else 0})
