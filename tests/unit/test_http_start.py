"""What is found out before a run begins, and the sentences for what cannot be used."""

import asyncio
import re
import socket
from typing import Any

import pytest

from stoker.config.tree import ModelSettings
from stoker.errors import ConfigInvalid
from stoker.inference.base import ModelInfo
from stoker.inference.http.addresses import servers
from stoker.inference.http.model import HttpModel
from stoker.inference.policy import FunctionPolicy
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import request
from support.served import SECONDS_MAX, serving


def refused(features: Features | None = None, *, server: Any = None, **settings: Any) -> str:
    """Return the sentence with which a model on such a server is refused."""

    async def main() -> str:
        with pytest.raises(ConfigInvalid) as caught:
            async with serving(features=features, settings=settings, **(server or {})):
                pass
        return caught.value.message

    return asyncio.run(main())


def started(features: Features | None = None, **settings: Any) -> ModelInfo:
    async def main() -> ModelInfo:
        async with serving(features=features, settings=settings) as (_, model):
            return model.info()

    return asyncio.run(main())


def test_a_server_that_is_not_there_is_named_with_what_was_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused, and stays so
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            model = HttpModel((url,), ModelSettings(start=0.3))
            with pytest.raises(ConfigInvalid) as caught:
                await model.start()
            said = caught.value.message
            assert re.search(r"not reached within 0\.3 s \(model\.start\).*refused", said.lower())
            assert url in said
            assert "nothing was started" in said

        asyncio.run(main())


def test_a_server_that_comes_up_in_time_is_waited_for() -> None:
    async def main() -> None:
        server = OpenAIServer(FunctionPolicy("test", lambda _: "ok"))
        async with asyncio.timeout(SECONDS_MAX):
            await server.start()
            await server.kill()
            model = HttpModel((server.url,), ModelSettings(start=SECONDS_MAX))
            starting = asyncio.create_task(model.start())
            await asyncio.sleep(0.05)
            assert not starting.done()
            await server.start()
            await starting
            await model.close()
            await server.kill()

    asyncio.run(main())


def test_a_model_that_is_not_served_is_answered_with_those_that_are() -> None:
    assert re.search(r"does not serve 'big' \(model.name\); it serves tiny", refused(name="big"))
    assert started(name="tiny").name == "http:tiny"


def test_a_server_without_token_ids_is_refused_or_used_as_set() -> None:
    for features in (
        Features(token_ids=False),
        Features(flavour="openai", token_ids=False),
        Features(flavour="openai", strict=True),
    ):
        said = refused(features)
        assert "gives no token ids: what was sampled could not be shown" in said
        assert "model.require_token_ids=degrade" in said
        info = started(features, require_token_ids="degrade")
        assert len(info.notices) == 1
        assert "no ids, log-probabilities or policy versions" in info.notices[0]


def test_a_server_that_cannot_continue_by_ids_says_what_is_lost() -> None:
    info = started(Features(tokenizes=False))
    assert len(info.notices) == 1
    assert "every turn is rendered anew" in info.notices[0]
    assert started().notices == ()
    assert started(Features(), api="chat").notices == ()


@pytest.mark.parametrize(
    ("features", "settings", "says"),
    [
        (Features(), {"api": "generate"}, "--enable-scale-out"),
        (Features(flavour="openai"), {"api": "generate"}, "generate is SGLang's and vLLM's"),
        (Features(flavour="sglang"), {"api": "completions"}, "completions is vLLM's"),
        (Features(tokenizes=False), {"api": "completions"}, "takes or renders no token ids"),
    ],
)
def test_a_route_the_server_lacks_is_refused(
    features: Features, settings: dict[str, Any], says: str
) -> None:
    assert says in refused(features, **settings)


def test_a_key_is_sent_and_a_wrong_one_is_refused_and_never_shown() -> None:
    said = refused(server={"api_key": "right"}, api_key="wrong-key")
    assert "401" in said
    assert "model.api_key" in said
    assert "wrong-key" not in said

    async def main() -> str:
        settings = {"api_key": "right"}
        async with serving("in", settings=settings, api_key="right") as (_, model):
            return (await model.generate(0, request())).text

    assert asyncio.run(main()) == "in"


def test_a_paused_server_is_refused_at_once() -> None:
    async def main() -> str:
        async with OpenAIServer(FunctionPolicy("test", lambda _: "ok")) as server:
            server.engine.pause()
            model = HttpModel((server.url,), ModelSettings())
            with pytest.raises(ConfigInvalid) as caught:
                await model.start()
            return caught.value.message

    assert "is paused; nothing was started. Resume it" in asyncio.run(main())


def test_something_that_is_no_model_server_is_refused() -> None:
    async def main() -> str:
        async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(hello, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            model = HttpModel((f"http://127.0.0.1:{port}",), ModelSettings())
            with pytest.raises(ConfigInvalid) as caught:
                await model.start()
        return caught.value.message

    assert "is no list of models ({})" in asyncio.run(main())


def test_replicas_of_different_models_are_refused() -> None:
    async def main() -> str:
        policy = FunctionPolicy("test", lambda _: "ok")
        async with OpenAIServer(policy, name="a") as one, OpenAIServer(policy, name="b") as two:
            model = HttpModel((one.url, two.url), ModelSettings())
            with pytest.raises(ConfigInvalid) as caught:
                await model.start()
            return caught.value.message

    assert "serve different models: a, b" in asyncio.run(main())


def test_what_is_known_of_a_server_is_in_its_info() -> None:
    info = started(window=7)
    assert info.replicas[0].window == 7
    assert info.replicas[0].kv_tokens == 16_000
    assert not info.simulated


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://h:1", ("http://h:1",)),
        ("http://h:1/v1/", ("http://h:1",)),
        ("http://h:1, https://g/base", ("http://h:1", "https://g/base")),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, urls: tuple[str, ...]) -> None:
    assert servers(text) == urls


@pytest.mark.parametrize("text", ["http:", "http://", "http://h:1,h:2", "http://h:1,http://h:1/v1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"is no address|names one server twice"):
        servers(text)
