"""What a client asks a server and what it answers: recorded on the way, and played back.

A recorder stands between the two and writes down every question with its answer. Played back, a
question is answered as it was then; one that was not asked then is refused and remembered, so that
a body that is built differently cannot go unnoticed.
"""

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from stoker.testing.openai_server_http import Connection, Request, Response

_TIMES = re.compile(
    r"^(?:#.*|python_.*|process_.*|\w+:?\w*_(?:created|bucket)\{.*)\n", re.MULTILINE
)
_FLEETING = {"id": "call", "created": 0, "root": "model", "system_fingerprint": ""}
"""Fields that differ from run to run and mean nothing, and what is written instead."""


class Exchange(msgspec.Struct, frozen=True):
    """One question and its answer."""

    method: str
    target: str
    """Path and query."""
    asked: Any
    """The body as JSON; ``None`` without one."""
    status: int
    answer: Any
    """As JSON, else as text."""

    def question(self) -> str:
        """Return what makes two questions the same."""
        return json.dumps([self.method, self.target, self.asked], sort_keys=True)


class Between:
    """Something that listens on loopback; ``url`` says where."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def handle(self, request: Request) -> Response:
        """Answer one question."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self.handle, self._connections), "127.0.0.1", 0
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._connections):
            connection.abort()


class Recorder(Between):
    """Hands everything on to ``server`` and writes it down, by chapter."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._to = server
        self._chapter: list[Exchange] = []
        self.chapters: dict[str, list[Exchange]] = {}

    def begin(self, chapter: str) -> None:
        """Let what follows be a chapter of its own."""
        self._chapter = self.chapters.setdefault(chapter, [])

    async def handle(self, request: Request) -> Response:
        """Hand one question on."""
        target = _target(request)
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                request.method, self._to + target, data=request.body or None
            ) as answered,
        ):
            body = await answered.read()
            said = _plain(body)
            asked = json.loads(request.body) if request.body else None
            self._chapter.append(Exchange(request.method, target, asked, answered.status, said))
            return _response(answered.status, said)

    def write(self, folder: Path) -> None:
        """Write every chapter as a file; those of an earlier recording go."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("[0-9]*.json"):
            old.unlink()
        for name, exchanges in self.chapters.items():
            lines = ",\n".join(json.dumps(msgspec.to_builtins(one)) for one in exchanges)
            (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")


class Player(Between):
    """Answers as was recorded; the last answer to a question holds for every later one."""

    def __init__(self, exchanges: Iterable[Exchange]) -> None:
        super().__init__()
        self._answers: dict[str, list[Exchange]] = {}
        self.unknown: list[str] = []
        """Questions that were not asked when it was recorded."""
        for one in exchanges:
            self._answers.setdefault(one.question(), []).append(one)
        self.unasked = set(self._answers)
        """Questions that were asked then and not now."""

    async def handle(self, request: Request) -> Response:
        """Answer from the record."""
        asked = json.loads(request.body) if request.body else None
        question = Exchange(request.method, _target(request), asked, 0, None).question()
        known = self._answers.get(question)
        if known is None:
            self.unknown.append(question)
            return _response(400, {"error": {"message": f"not recorded: {question}"}})
        self.unasked.discard(question)
        one = known.pop(0) if len(known) > 1 else known[0]
        return _response(one.status, one.answer)


def read_recording(folder: Path) -> dict[str, list[Exchange]]:
    """Return the chapters in ``folder``."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=list[Exchange])
        for path in sorted(folder.glob("[0-9]*.json"))
    }


def _target(request: Request) -> str:
    return request.path + (f"?{request.query}" if request.query else "")


def _response(status: int, said: object) -> Response:
    if isinstance(said, str):
        return Response(status=status, body=said.encode(), media="text/plain")
    return Response(status=status, body=json.dumps(said).encode())


def _plain(body: bytes) -> Any:
    """Return an answer without what is only of its moment."""
    try:
        said = json.loads(body)
    except ValueError:
        return _TIMES.sub("", body.decode())
    if isinstance(said, dict):
        for entry in (said, *said.get("data", ())):
            entry.update({name: value for name, value in _FLEETING.items() if name in entry})
        if "data" in said:
            for entry in said["data"]:
                entry["id"] = "smol"
                entry.pop("permission", None)
    return said
