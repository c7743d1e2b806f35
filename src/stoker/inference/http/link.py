"""One model server and the connections to it: one question, one answer, a named error.

Waiting for room is the lane's business and ending a hung call too (``lane.call_timeout``), so there
is no limit on connections and no read timeout here. A cancelled question closes its connection,
which is how a server learns that nobody wants the answer. Proxies of the environment are not used:
nothing but the settings decides where calls go.
"""

from typing import Any

import httpx
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
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_IDLE_SECONDS,
            ),
            verify=url.startswith("https:"),  # reading the certificates costs 30 ms
            trust_env=False,
        )

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON at ``path``.

        Raises:
            ModelUnavailable: not reached, broken, busy, or no JSON.
            ModelRefused: the server says no, and would again.
        """
        return self._json(await self._sent("GET", path, b"", ""))

    async def post(self, path: str, body: object, request_id: str = "") -> Any:  # noqa: ANN401 - JSON
        """Return what the server answers to ``body``, decoded; raises as ``get``.

        **Cancellation:** the connection is closed; the server aborts.
        """
        return self._json(await self._sent("POST", path, msgspec.json.encode(body), request_id))

    async def text(self, path: str) -> str:
        """Return the text at ``path``; raises as ``get``."""
        return (await self._sent("GET", path, b"", "")).text

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _sent(
        self, method: str, path: str, content: bytes, request_id: str
    ) -> httpx.Response:
        headers = {"X-Request-Id": request_id} if request_id else {}
        try:
            response = await self._client.request(method, path, content=content, headers=headers)
        except httpx.RequestError as error:
            raise ModelUnavailable(
                f"replica {self.replica} ({self.url}) gave no answer to {path}: "
                f"{type(error).__name__}: {error}",
                replica=self.replica,
                request_id=request_id,
            ) from error
        if not response.is_success:
            raise self._refusal(response, path, request_id)
        return response

    def _refusal(
        self, response: httpx.Response, path: str, request_id: str
    ) -> ModelUnavailable | ModelRefused:
        status = response.status_code
        said = _said(response)
        context = {
            "replica": self.replica,
            "request_id": request_id,
            "status": status,
            "path": path,
            "said": said,
        }
        where = f"replica {self.replica} ({self.url}) answered {path} with {status}: {said}"
        if status in _BUSY or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            after = retry_after(response.headers.get("Retry-After"))
            if after is not None:
                context["retry_after_seconds"] = after
            return ModelUnavailable(where, **context)
        if status in {401, 403}:
            where += "; set model.api_key (STOKER_MODEL__API_KEY)"
        return ModelRefused(where, **context)

    def _json(self, response: httpx.Response) -> Any:  # noqa: ANN401 - JSON
        try:
            return msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise ModelUnavailable(
                f"replica {self.replica} ({self.url}) answered {response.request.url.path} with "
                f"what is no JSON ({error}): {response.text[:_SHOWN_CHARACTERS]!r}",
                replica=self.replica,
                status=response.status_code,
            ) from error


def retry_after(header: str | None) -> float | None:
    """Return seconds of a ``Retry-After`` header; ``None`` where there is none, or a date."""
    try:
        seconds = float(header) if header else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def _said(response: httpx.Response) -> str:
    """Return the server's own words: vLLM, SGLang and OpenAI put them in different places."""
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return response.text[:_SHOWN_CHARACTERS] or "(nothing)"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message", error.get("detail", error))
        body = error
    return str(body)[:_SHOWN_CHARACTERS]
