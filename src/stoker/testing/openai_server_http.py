"""The little HTTP/1.1 the test server speaks: one request at a time on a connection kept alive.

A handler is cancelled the moment its client is gone, which is what real servers do and what the
tests of cancellation rely on. Nothing here is meant for strangers: loopback only.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Literal

import msgspec

HEAD_BYTES_MAX = 65_536
BODY_BYTES_MAX = 256 * 1024 * 1024


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    method: str
    path: str
    """Without its query."""
    query: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as an object.

        Raises:
            Problem: it is none.
        """
        try:
            return msgspec.json.decode(self.body or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise Problem(HTTPStatus.BAD_REQUEST, f"the body is no JSON object: {error}") from error


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: a body, or a stream sent in chunks as it comes."""

    status: int = HTTPStatus.OK
    body: bytes = b""
    stream: AsyncIterator[bytes] | None = None
    media: str = "application/json"
    headers: dict[str, str] = {}
    broken: Literal["", "half", "all"] = ""
    """Break the connection after half of the body, or before anything."""


class Problem(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


Handler = Callable[[Request], Awaitable[Response]]


def answer(value: object) -> Response:
    """Return ``value`` as a JSON answer."""
    return Response(body=msgspec.json.encode(value))


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, handler: Handler, connections: "set[Connection]") -> None:
        self._handler = handler
        self._connections = connections
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what the client waited for."""
        del exc
        self._connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Take in bytes; begin the next request when it is whole."""
        self._buffer += data
        self._next()

    def abort(self) -> None:
        """Break the connection, as a process that is killed does."""
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        if self._task is not None:
            return
        request = _taken(self._buffer)
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        assert self._transport is not None
        try:
            response = await self._handler(request)
        except Problem as problem:
            error = {"message": str(problem), "type": "BadRequestError", "code": problem.status}
            response = Response(
                status=problem.status,
                body=msgspec.json.encode({"error": error}),
                headers=problem.headers,
            )
        except Exception as error:
            # The client is answered first, else it would wait for ever; then the bug is shown.
            await self._send(Response(status=500, body=repr(error).encode(), media="text/plain"))
            raise
        await self._send(response)
        self._task = None
        if self._transport.is_closing():
            return
        self._next()

    async def _send(self, response: Response) -> None:
        assert self._transport is not None
        if response.broken == "all":
            self._transport.abort()
            return
        status = HTTPStatus(response.status)
        chunked = response.stream is not None
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(response.body)}"
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {response.media}",
            size,
        ]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if response.stream is not None:
            async for part in response.stream:
                self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            self._transport.write(b"0\r\n\r\n")
            return
        if response.broken:
            self._transport.write(response.body[: len(response.body) // 2])
            self._transport.close()
            return
        self._transport.write(response.body)


def _taken(buffer: bytearray) -> Request | None:
    """Return the whole request at the start of ``buffer``, taken out of it."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        assert len(buffer) <= HEAD_BYTES_MAX, "a request head without end"
        return None
    first, *rest = buffer[:end].decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (ln.partition(":") for ln in rest)
    }
    length = int(headers.get("content-length", "0"))
    assert length <= BODY_BYTES_MAX, "a body too large for a test"
    if len(buffer) < end + 4 + length:
        return None
    body = bytes(buffer[end + 4 : end + 4 + length])
    del buffer[: end + 4 + length]
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    return Request(method=method, path=path, query=query, headers=headers, body=body)
