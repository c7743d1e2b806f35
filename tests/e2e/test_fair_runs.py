"""Two real runs on one model server and one ledger: how much of the server each gets."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunRequest
from stoker.inference.policy import FunctionPolicy
from stoker.model.ids import RunId
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_http import Request
from support.command import SECONDS_MAX, wait_until_quiet

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="5m")
async def talks(ctx, task):
    chat = ctx.chat(task.data["said"])
    for _ in range(task.data["turns"]):
        await ctx.generate(chat)
        chat.user("on")
    return 1.0
"""
TOKEN_SECONDS = 0.03
BYTES = 256
SETTLED = 60
"""Calls of the smaller run after which both have heard of each other."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    wait_until_quiet(tmp_path)


def request(
    place: Path, url: str, name: str, *, rollouts: int, turns: int, window: int
) -> RunRequest:
    tasks = place / f"{name}.jsonl"
    data = {"said": f"this is {name}", "turns": turns}
    tasks.write_text(
        "".join(json.dumps({"task_id": f"{name}{i}", "data": data}) + "\n" for i in range(rollouts))
    )
    settings = stoker.load_settings(
        sets=[f"ledger.directory={json.dumps(str(place / 'pool'))}", "workers.count=0",
              "program.hosts=1", "program.check_replays=0", f"model.window={window}",
              "ledger.durability=process-safe"]
    ).settings  # fmt: skip
    return stoker.RunRequest(
        program=place / "program.py", program_name=None, tasks=tasks, model=url,
        settings=settings, runs_directory=place / "runs", run_id=RunId(name),
    )  # fmt: skip


def whose(call: Request) -> str:
    """Return which run made a call: by text at first, by the same bytes as token ids then."""
    ids = call.json().get("prompt", [])
    said = call.body + bytes(one for one in ids if isinstance(one, int) and one < BYTES)
    return next((name for name in ("large", "small") if f"this is {name}".encode() in said), "")


@pytest.mark.slow
def test_two_real_runs_on_one_server_are_fair_within_5_percent(place: Path) -> None:
    """One asks for three times as many calls at once as the other, with more rollouts."""

    async def both() -> list[str]:
        policy = FunctionPolicy("says", lambda _request: "ok")
        async with OpenAIServer(policy, token_seconds=TOKEN_SECONDS) as server:
            large = request(place, server.url, "large", rollouts=12, turns=40, window=12)
            small = request(place, server.url, "small", rollouts=8, turns=30, window=4)
            async with asyncio.timeout(SECONDS_MAX):
                reports = await asyncio.gather(execute(large), execute(small))
            assert [one.snapshot.outcomes for one in reports] == [
                {"completed": 12},
                {"completed": 8},
            ]
            asked = (whose(one) for one in server.requests if "completions" in one.path)
            return [name for name in asked if name]  # what tells the server's features has none

    calls = asyncio.run(both())
    of_small = [n for n, name in enumerate(calls) if name == "small"]
    assert len(of_small) == 8 * 30
    together = calls[of_small[SETTLED] : of_small[-SETTLED // 4]]
    share = together.count("large") / len(together)
    assert share == pytest.approx(0.5, abs=0.025), f"{share} of {len(together)} calls"
