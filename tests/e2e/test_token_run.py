"""A whole run on an engine of ids inside this process, as trainers embed it, to its rows."""

import asyncio
import json
from pathlib import Path

import pytest

from stoker.config.load import load_settings
from stoker.coordinator.execute import execute
from stoker.coordinator.request import RunReport, RunRequest
from stoker.inference.token_callable import TokenAnswer, TokenCallable, TokenRequest
from stoker.inference.tokens.base import History
from stoker.inference.tokens.open import open_renderer
from support.command import skip_reason, stoker, wait_until_quiet
from support.tokens import model_folder, needs_tokens

pytestmark = [
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed"),
    needs_tokens,
]

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="1m")
async def talk(ctx, task):
    chat = ctx.chat(task.data["prompt"])
    for _ in range(3):
        turn = await ctx.generate(chat)
        chat.user("go on")
    return 1.0 if turn.text == "hello" else 0.0
"""


async def letters(asked: TokenRequest) -> TokenAnswer:
    """Sample ``hello`` letter by letter, which tokenised again is one id."""
    ids = [*LETTERS, min(asked.stop_ids)]
    return TokenAnswer(token_ids=ids, logprobs=[-0.5] * len(ids), policy_version=3)


LETTERS: list[int] = []


def embedded(place: Path, history: History) -> RunReport:
    renderer = open_renderer(model_folder(place / "model"), history=history)
    encode = renderer._tokenizer.encode  # type: ignore[attr-defined]
    LETTERS[:] = [encode(letter)[0] for letter in "hello"]
    assert len(encode("hello")) == 1
    request = RunRequest(
        program=place / "program.py",
        program_name=None,
        tasks=place / "tasks.jsonl",
        model="callable:engine",
        settings=load_settings(sets=["workers.count=0"]).settings,
        runs_directory=place / "runs",
    )
    return asyncio.run(execute(request, model=TokenCallable(letters, renderer, window=8)))


@pytest.mark.parametrize(("history", "rows"), [("append", 1), ("rerender", 3)])
def test_c4_an_engine_of_ids_gives_rows_of_exactly_what_it_sampled(
    history: History, rows: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "data": {"prompt": "hi"}}\n')
    try:
        report = embedded(tmp_path, history)
        run = next((tmp_path / "runs").iterdir()).name
        done = stoker(tmp_path, "export", run, "--out", "rows.jsonl")
    finally:
        wait_until_quiet(tmp_path)
    assert report.snapshot.outcomes == {"completed": 1}
    assert done.code == 0, done.err
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(found) == rows
    said = []
    for row in found:
        assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"])
        said += [one for one, mine in zip(row["token_ids"], row["mask"], strict=True) if mine]
        assert {span["policy_version"] for span in row["spans"]} == {3}
    assert said == [*LETTERS, said[5]] * 3
