"""The client against what a real vLLM answered, and the test server against the same.

The recording is made by ``tests/rig/test_vllm_record.py``. A body that is built differently, an
answer that is read differently, or a field of the test server that is not as the real one's fails
here.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker.errors import ModelRefused
from stoker.inference.http import answers
from stoker.inference.http.metrics import _BY_REASON, _CACHE, _lines, read_page
from stoker.inference.policy import Answer, AnswerCall, FunctionPolicy
from stoker.model.generation import GenerateRequest
from stoker.model.toolcalls import parse_tool_calls
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import RUN_PYTHON
from support.recording import Exchange, Player, Recorder, read_recording
from support.served import SECONDS_MAX
from support.source import ROOT
from support.vllm_scenario import CONTEXT_MAX, scenario
from support.vllm_server import NAME

FOLDER = ROOT / "tests" / "fixtures" / "vllm-0.32.0"
CALL = AnswerCall(name="run_python", arguments={"code": "1"})


def recorded() -> list[Exchange]:
    return [one for chapter in read_recording(FOLDER).values() for one in chapter]


def test_a_real_servers_answers_are_read_as_when_they_were_recorded() -> None:
    async def main() -> tuple[dict[str, Any], Player]:
        async with asyncio.timeout(SECONDS_MAX), Player(recorded()) as player:
            return await scenario(player.url), player

    results, player = asyncio.run(main())
    assert not player.unknown
    assert not player.unasked
    assert json.loads(json.dumps(results)) == json.loads((FOLDER / "results.json").read_text())


def test_a_question_that_was_not_recorded_is_noticed() -> None:
    async def main() -> Player:
        first, *others = recorded()
        asked = {"stream": True, **(others[-1].asked or {})}
        others[-1] = Exchange("POST", others[-1].target, asked, 200, others[-1].answer)
        async with asyncio.timeout(SECONDS_MAX), Player([first, *others]) as player:
            with pytest.raises(ModelRefused, match="not recorded"):
                await scenario(player.url)
            return player

    player = asyncio.run(main())
    assert len(player.unknown) == len(player.unasked) == 1


def played() -> list[Exchange]:
    """Return the same scenario's exchanges with the test server."""

    def say(request: GenerateRequest) -> object:
        return Answer(text="", tool_calls=(CALL,)) if request.tools else "Steam engines are"

    async def main() -> list[Exchange]:
        features = Features(context_max=CONTEXT_MAX, scale_out=True)
        policy = FunctionPolicy("test", say)
        async with (
            asyncio.timeout(SECONDS_MAX),
            OpenAIServer(policy, name=NAME, features=features) as server,
            Recorder(server.url) as recorder,
        ):
            await scenario(recorder.url, recorder.begin)
            return [one for chapter in recorder.chapters.values() for one in chapter]

    return asyncio.run(main())


def test_the_test_server_has_every_field_the_client_reads_of_a_real_one() -> None:
    real, ours = fields_read(recorded()), fields_read(played())
    assert real.keys() <= ours.keys()
    missing = {
        route: sorted(f"{path}: {kind}" for path, kind in fields - ours[route])
        for route, fields in real.items()
    }
    assert not {route: fields for route, fields in missing.items() if fields}
    assert ("choices[].token_ids[]", "int") in real["POST /v1/chat/completions"]
    assert ("error.message", "str") in real["refused"]


def test_the_test_servers_metrics_page_has_every_line_the_client_reads() -> None:
    real, ours = (
        {name for one in exchanges for name in metric_names(one)}
        for exchanges in (recorded(), played())
    )
    assert real == ours
    assert {_BY_REASON, _CACHE, "vllm:num_requests_running"} <= real


def metric_names(one: Exchange) -> Iterator[str]:
    if one.target == "/metrics":
        page = read_page(one.answer)
        assert page is not None
        assert page.kv_tokens
        yield from (line.partition("{")[0] for line in _lines(one.answer))


# --- which fields are read ------------------------------------------------------------------------


class Noting(dict[str, Any]):
    """An object of an answer that notes what is read of it."""

    def __init__(self, content: dict[str, Any], path: str, read: set[tuple[str, str]]) -> None:
        self._path = path
        self._read = read
        super().__init__(content)

    def __getitem__(self, name: str) -> Any:
        return self._noted(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._noted(name, super().get(name, default))

    def _noted(self, name: str, value: Any) -> Any:
        return noting(value, f"{self._path}.{name}".removeprefix("."), self._read)


def noting(value: Any, path: str, read: set[tuple[str, str]]) -> Any:
    """Return ``value``, which notes in ``read`` what is read of it from now on."""
    if value is None:  # as good as not there
        return None
    read.add((path, type(value).__name__))
    if isinstance(value, dict):
        return Noting(value, path, read)
    if isinstance(value, list):
        return [noting(one, f"{path}[]", read) for one in value]
    return value


def _read_chat(answer: Any) -> None:
    parse_tool_calls(answers.read_chat(answer).calls, (RUN_PYTHON,))


def _read_models(answer: Any) -> None:
    for entry in answer["data"]:
        for name in ("id", "parent", "owned_by", "max_model_len"):
            entry[name]


def _reading(*names: str) -> Callable[[Any], None]:
    def read(answer: Any) -> None:
        for name in names:
            answer[name]

    return read


READERS: dict[str, Callable[[Any], object]] = {
    "POST /v1/chat/completions": _read_chat,
    "POST /v1/completions": answers.read_completion,
    "POST /inference/v1/generate": answers.read_scale_out,
    "GET /v1/models": _read_models,
    "GET /version": _reading("version"),
    "GET /is_paused": _reading("is_paused"),
    "GET /weight_info": _reading("weight_version"),
    "POST /tokenize": _reading("tokens"),
    "POST /reset_prefix_cache": _reading("success"),
}
"""What the client reads of an answer; of those that are not here it reads the status only."""


def fields_read(exchanges: list[Exchange]) -> dict[str, set[tuple[str, str]]]:
    """Return route → fields the client reads of its answers, with their types."""
    found: dict[str, set[tuple[str, str]]] = {}
    for one in exchanges:
        if one.status != 200:
            fields = found.setdefault("refused", set())
            noting(one.answer, "", fields)["error"]["message"]
            continue
        route = f"{one.method} {one.target.partition('?')[0]}"
        fields = found.setdefault(route, set())
        reader = READERS.get(route)
        if reader is not None:
            reader(noting(one.answer, "", fields))
    return found
