"""The test server itself: what it streams, refuses and forgets."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from stoker.inference.policy import FunctionPolicy
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.served import SECONDS_MAX

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def serve(said: str = "0123", **keys: Any) -> OpenAIServer:
    return OpenAIServer(FunctionPolicy("test", lambda _: said), **keys)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_stream_brings_every_token_in_chunks(route: str) -> None:
    async def main() -> list[Any]:
        async with asyncio.timeout(SECONDS_MAX), serve() as server, aiohttp.ClientSession() as http:
            body = {**CHAT, "prompt": [257, 104, 105, 260, 258], "max_tokens": 100}
            async with http.post(f"{server.url}/v1/{route}", json=body) as answer:
                assert answer.headers["Transfer-Encoding"] == "chunked"
                return events(await answer.text())

    found = asyncio.run(main())
    ids = [token for event in found for token in event["choices"][0].get("token_ids", ())]
    assert ids == [*b"0123", 260]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_leaves_a_stream_ends_it() -> None:
    async def main() -> bool:
        async with (
            asyncio.timeout(SECONDS_MAX),
            serve("x" * 10_000, token_seconds=0.001) as server,
            aiohttp.ClientSession() as http,
        ):
            async with http.post(f"{server.url}/v1/chat/completions", json=CHAT) as answer:
                await answer.content.readany()
                answer.close()
            await server.engine.until_quiet()
            return server.engine.calls[0].aborted

    assert asyncio.run(main())


@pytest.mark.parametrize(
    ("features", "path", "body", "status", "says"),
    [
        (Features(), "/v1/chat/completions", {**CHAT, "model": "big"}, 404, "does not exist"),
        (Features(strict=True), "/v1/chat/completions", {**CHAT, "best": 1}, 400, "best"),
        (Features(), "/v1/completions", {"model": "tiny", "prompt": "text"}, 400, "token ids only"),
        (Features(), "/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "at least 1"),
        (Features(context_max=3), "/v1/chat/completions", CHAT, 400, "maximum context length"),
        (Features(flavour="openai"), "/tokenize", CHAT, 404, "there is no POST /tokenize"),
        (Features(development=False), "/pause", {}, 404, "there is no POST /pause"),
        (Features(flavour="sglang"), "/v1/completions", {}, 404, "there is no"),
    ],
)
def test_it_refuses_as_the_servers_do(
    features: Features, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    async def main() -> tuple[int, str]:
        async with (
            asyncio.timeout(SECONDS_MAX),
            serve(features=features) as server,
            aiohttp.ClientSession() as http,
            http.post(server.url + path, json=body) as answer,
        ):
            return answer.status, (await answer.json())["error"]["message"]

    got, said = asyncio.run(main())
    assert got == status
    assert says in said


def test_faults_are_switched_on_over_the_wire_and_off_again() -> None:
    async def main() -> list[int]:
        async with asyncio.timeout(SECONDS_MAX), serve() as server, aiohttp.ClientSession() as http:
            seen = []

            async def fail(**fault: Any) -> None:
                async with http.post(f"{server.url}/test/fail", json=fault):
                    pass

            await fail(kind="status", status=503, count=2)
            for count in (None, 0):
                if count is not None:
                    await fail(kind="status", count=count)
                async with http.post(f"{server.url}/v1/chat/completions", json=CHAT) as answer:
                    seen.append(answer.status)
            return seen

    assert asyncio.run(main()) == [503, 200]
