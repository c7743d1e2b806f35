"""One model server and the connections to it: one question, one answer, a named error.

Waiting for room is the lane's business and ending a hung call too (``lane.call_timeout``), so there
is no limit on connections and no read timeout here. A cancelled question closes its connection,
which is how a server learns that nobody wants the answer. Proxies of the environment are not used:
nothing but the settings decides where calls go.
"""

import asyncio
import os
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from stoker.config.secret import Secret
from stoker.errors import ModelRefused, ModelUnavailable

CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""Idle connections are let go before servers do (uvicorn: 5 s): a call sent on a connection that
is just being closed would count as a failure of the server."""
_BUSY = frozenset({408, 409, 425, 429})
_SHOWN_CHARACTERS = 300


class ServerLink:
    """Connections to one server; belongs to one event loop."""

    def __init__(self, url: str, replica: int, api_key: Secret | None = None) -> None:
        self.url = url
        self.replica = replica
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key.reveal()}"
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON at ``path``.

        Raises:
            ModelUnavailable: not reached, broken, busy, or no JSON.
            ModelRefused: the server says no, and would again.
        """
        return self._json(path, await self._sent("GET", path, b"", ""))

    async def post(self, path: str, body: object, request_id: str = "") -> Any:  # noqa: ANN401 - JSON
        """Return what the server answers to ``body``, decoded; raises as ``get``.

        **Cancellation:** the connection is closed; the server aborts.
        """
        content = msgspec.json.encode(body)
        return self._json(path, await self._sent("POST", path, content, request_id))

    async def told(self, path: str, body: object) -> None:
        """Send ``body`` to a route whose answer says nothing; raises as ``get``."""
        await self._sent("POST", path, msgspec.json.encode(body), "")

    async def text(self, path: str) -> str:
        """Return the text at ``path``; raises as ``get``."""
        return (await self._sent("GET", path, b"", "")).decode(errors="replace")

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # transports are closed in the turn after

    def _opened(self) -> aiohttp.ClientSession:
        """Return the connections, made on the loop that uses them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def _sent(self, method: str, path: str, content: bytes, request_id: str) -> bytes:
        headers = {"X-Request-Id": request_id} if request_id else {}
        try:
            async with self._opened().request(
                method, self.url + path, data=content or None, headers=headers
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ModelUnavailable(
                f"replica {self.replica} ({self.url}) gave no answer to {path}: {_why(error)}",
                replica=self.replica,
                request_id=request_id,
            ) from error
        if not response.ok:
            raise self._refusal(response, body, path, request_id)
        return body

    def _refusal(
        self, response: aiohttp.ClientResponse, body: bytes, path: str, request_id: str
    ) -> ModelUnavailable | ModelRefused:
        status = response.status
        said = _said(body)
        context = {
            "replica": self.replica,
            "request_id": request_id,
            "status": status,
            "path": path,
            "said": said,
        }
        where = f"replica {self.replica} ({self.url}) answered {path} with {status}: {said}"
        if status in _BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            after = retry_after(response.headers.get("Retry-After"))
            if after is not None:
                context["retry_after_seconds"] = after
            return ModelUnavailable(where, **context)
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            where += "; set model.api_key (STOKER_MODEL__API_KEY)"
        return ModelRefused(where, **context)

    def _json(self, path: str, body: bytes) -> Any:  # noqa: ANN401 - JSON
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ModelUnavailable(
                f"replica {self.replica} ({self.url}) answered {path} with what is no JSON "
                f"({error}): {_text(body)!r}",
                replica=self.replica,
                path=path,
            ) from error


def retry_after(header: str | None) -> float | None:
    """Return seconds of a ``Retry-After`` header; ``None`` where there is none, or a date."""
    try:
        seconds = float(header) if header else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def _why(error: Exception) -> str:
    """Return why there is no answer, in the system's words where it has some."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return f"{type(error).__name__}: {error}"


def _said(body: bytes) -> str:
    """Return the server's own words: vLLM, SGLang and OpenAI put them in different places."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _text(body) or "(nothing)"
    if isinstance(said, dict):
        error = said.get("error", said)
        if isinstance(error, dict):
            error = error.get("message", error.get("detail", error))
        said = error
    return str(said)[:_SHOWN_CHARACTERS]


def _text(body: bytes) -> str:
    return body[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")[:_SHOWN_CHARACTERS]
