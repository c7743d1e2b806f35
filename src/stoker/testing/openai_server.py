"""A small model server for tests: the fields of vLLM 0.32 or SGLang, a policy in place of a model.

``async with OpenAIServer(policy) as server`` listens on loopback at ``server.url``; ``python -m
stoker.testing.openai_server --policy FILE`` is the same as a process of its own and says where on
its first line. What can go wrong is switched on by ``server.fail(…)`` or ``POST /test/fail``; a
pause, weights and counters are those of ``server.engine``. Fields a flavour does not have are
absent; with ``token_ids=False`` it is a server that gives no ids.
"""

import argparse
import asyncio
import sys
from collections import deque
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from stoker.inference.policy import Policy, load_policy
from stoker.testing.openai_server_engine import Engine, Features
from stoker.testing.openai_server_http import (
    Connection,
    Problem,
    Request,
    Response,
    answer,
)
from stoker.testing.openai_server_routes import Routes

Kind = Literal["status", "close", "refuse", "hang", "html", "shifted"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What the next sampling call meets instead of an answer."""

    kind: Kind
    """``status``: an error; ``close``: half an answer; ``refuse``: the connection breaks at once;
    ``hang``: nothing; ``html``: a proxy's page; ``shifted``: one log-probability too few."""
    status: int = 500
    message: str = "injected"
    retry_after: str = ""


_FINE = None
"""In the row of faults: a call that goes well."""


class OpenAIServer:
    """The server; one event loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        name: str = "tiny",
        features: Features | None = None,
        token_seconds: float = 0.0,
        odd_ids: bool = False,
        api_key: str = "",
        port: int = 0,
    ) -> None:
        self.features = features or Features()
        self.engine = Engine(policy, token_seconds=token_seconds, odd_ids=odd_ids)
        self.requests: list[Request] = []
        """Every request, in order."""
        self._routes = Routes(self.engine, self.features, name)
        self._api_key = api_key
        self._port = port
        self._faults: deque[Fault | None] = deque()
        self._server: asyncio.Server | None = None
        self.connections: set[Connection] = set()
        self.hanging = asyncio.Event()
        """Set once a call hangs; ``GET /test/hanging`` waits for it."""

    @property
    def url(self) -> str:
        """Where it listens (or listened)."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen; again on the same port after ``kill``."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handle, self.connections), "127.0.0.1", self._port
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Break every connection and stop listening, as a process that dies."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self.connections):
            connection.abort()
        await self.engine.until_quiet()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def fail(self, kind: Kind, count: int = 1, skip: int = 0, **fields: Any) -> None:  # noqa: ANN401 - fields of Fault
        """Let ``count`` sampling calls fail so, after ``skip`` that do not; 0 takes all back.

        A client that tries a server out before it uses it samples one token on each route.
        """
        if not count:
            self._faults.clear()
        self._faults.extend([_FINE] * skip)
        self._faults.extend([Fault(kind=kind, **fields)] * count)

    async def _handle(self, request: Request) -> Response:
        self.requests.append(request)
        bearer = f"Bearer {self._api_key}"
        if self._api_key and request.headers.get("authorization") != bearer:
            raise Problem(401, "Unauthorized")
        if request.path == "/test/fail":
            self.fail(**request.json())
            return answer({})
        if request.path == "/test/hanging":
            await self.hanging.wait()
            return answer({})
        if request.path == "/test/busy":  # waits until two calls are in flight at once
            await self.engine.until_in_flight(2)
            return answer({})
        fault = self._faults.popleft() if self._faults and _samples(request) else None
        if fault is None:
            return await self._routes.handle(request)
        return await self._failed(fault, request)

    async def _failed(self, fault: Fault, request: Request) -> Response:
        match fault.kind:
            case "status":
                headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
                raise Problem(fault.status, fault.message, headers)
            case "refuse":
                return Response(broken="all")
            case "hang":
                self.hanging.set()
                await asyncio.get_running_loop().create_future()
            case "html":
                return Response(body=b"<html>bad gateway</html>", media="text/html")
            case "shifted":
                return _shifted(await self._routes.handle(request))
        return msgspec.structs.replace(await self._routes.handle(request), broken="half")


def _samples(request: Request) -> bool:
    return request.path.endswith(("/completions", "/generate"))


def _shifted(response: Response) -> Response:
    """Return ``response`` with one log-probability less than it has tokens."""
    body = msgspec.json.decode(response.body)
    for choice in body.get("choices", ()):
        logprobs = choice["logprobs"]
        (logprobs.get("content") or logprobs["token_logprobs"]).pop()
    return msgspec.structs.replace(response, body=msgspec.json.encode(body))


async def _serve(arguments: argparse.Namespace) -> None:
    features = Features(
        flavour=arguments.flavour,
        token_ids=not arguments.no_token_ids,
        context_max=arguments.context_max,
    )
    server = OpenAIServer(
        load_policy(arguments.policy),
        name=arguments.name,
        features=features,
        token_seconds=arguments.token_seconds,
        port=arguments.port,
    )
    async with server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().create_future()


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description="A small model server for tests.")
    parser.add_argument("--policy", type=Path, required=True, help=".py, .jsonl or .toml")
    parser.add_argument("--name", default="tiny", help="served model name")
    parser.add_argument("--flavour", choices=("vllm", "sglang", "openai"), default="vllm")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--context-max", type=int, default=1_000_000)
    parser.add_argument("--no-token-ids", action="store_true")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
