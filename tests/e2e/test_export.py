"""``stoker export`` as typed, on runs of processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.command import lay_out, run_arguments, skip_reason, stoker, wait_until_quiet

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="1m")
async def talking(ctx, task):
    chat = ctx.chat(task.data["prompt"])
    if task.data["prompt"] == "mute":
        raise ValueError("nothing was said")
    await ctx.generate(chat)
    if task.data["prompt"] == "broken":
        raise ValueError("it broke half-way")
    fork = chat.fork()
    chat.user("go on")
    await ctx.generate(chat)
    fork.user("or not")
    await ctx.generate(fork)
    return 0.0 if task.data["prompt"] == "wrong" else 1.0
"""
PROMPTS = ("right", "wrong", "broken", "mute")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lay_out(tmp_path_factory.mktemp("export"))
    (folder / "program.py").write_text(PROGRAM)
    lines = [json.dumps({"task_id": one, "data": {"prompt": one}}) + "\n" for one in PROMPTS]
    (folder / "tasks.jsonl").write_text("".join(lines))
    done = stoker(folder, *run_arguments("--set", "run.group_size=2", "--json"))
    assert done.code == 0, done
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    (found,) = (place / "runs").iterdir()
    return found.name


def read(place: Path, run: str, *more: str) -> list[Any]:
    answer = stoker(place, "export", run, "--out", "rows.jsonl", *more)
    assert answer.code == 0, answer
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


def test_every_segment_is_one_row(place: Path, run: str) -> None:
    rows = read(place, run)
    assert {row["run_id"] for row in rows} == {run}
    counts: dict[tuple[str, int], int] = {}
    for row in rows:
        assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"]) > 0
        assert row["logprob_kind"] == "sampled"
        assert row["policy_digests"].keys() == {"fast"}
        assert sum(row["mask"]) == sum(span["end"] - span["start"] for span in row["spans"])
        place_ = (row["task_id"], row["index"])
        assert row["segment"] == counts.get(place_, 0), "segments follow each other"
        counts[place_] = row["segment"] + 1
    trunks = {(name, index): 2 for name in ("right", "wrong") for index in (0, 1)}
    assert counts == trunks | {("broken", 0): 1, ("broken", 1): 1}


def test_only_completed_rollouts_carry_a_reward(place: Path, run: str) -> None:
    rewards = {(row["task_id"], row["outcome"]): row["reward"] for row in read(place, run)}
    assert rewards == {
        ("right", "completed"): 1.0,
        ("wrong", "completed"): 0.0,
        ("broken", "failed"): None,
    }
    (fault,) = {row["fault_code"] for row in read(place, run) if row["outcome"] == "failed"}
    assert fault == "program_raised"


def test_parquet_and_json_lines_hold_the_same(place: Path, run: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'stoker[export]'")
    rows = read(place, run)
    answer = stoker(place, "export", run, "--out", "rows.parquet", "--json")
    assert answer.code == 0, answer
    told = json.loads(answer.out)
    table = parquet.read_table(place / "rows.parquet").to_pylist()
    assert [row["token_ids"] for row in table] == [row["token_ids"] for row in rows]
    assert [row["messages"] for row in table] == [row["messages"] for row in rows]
    assert (told["format"], told["rows"], told["rollouts"]) == ("parquet", len(rows), 6)
    assert (told["without_rows"], told["unfinished"]) == (2, 0)
    assert told["outcomes"] == {"completed": 4, "failed": 4}
    assert told["sampled_tokens"] == sum(sum(row["mask"]) for row in rows)


def test_what_has_no_row_is_said(place: Path, run: str) -> None:
    answer = stoker(place, "export", run, "--out", "rows.jsonl")
    assert answer.out.splitlines()[1] == "no rows: 2 rollouts ended before a model call returned"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "--out", "/proc/rows.jsonl"], "/proc/rows.jsonl cannot be written"),
        (["RUN", "--out", "."], "it is a directory"),
        (["RUN", "--out", "rows.csv"], "'.csv' names no format"),
        (["RUN", "--out", "rows", "--format", "csv"], "'csv' is not one of"),
        (["nothing", "--out", "rows"], "there is no run 'nothing'"),
        (["RUN"], "Missing option '--out'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, place: Path, run: str
) -> None:
    before = sorted(one.name for one in place.iterdir())
    typed = [run if one == "RUN" else one for one in arguments]
    answer = stoker(place, "export", *typed)
    assert answer.code == 2, answer
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(one.name for one in place.iterdir()) == before


def test_nothing_is_left_running(place: Path, run: str) -> None:
    read(place, run)
    wait_until_quiet(place)
