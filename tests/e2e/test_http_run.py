"""``stoker run`` on a model server that is a process of its own."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from support.command import (
    SECONDS_MAX,
    STOKER,
    Answer,
    lay_out,
    skip_reason,
    stoker,
    wait_until_quiet,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

TWO_TURNS = """\
import stoker


@stoker.rollout(version="1", timeout="2m")
async def talk(ctx, task):
    chat = ctx.chat(task.data["prompt"])
    one = (await ctx.generate(chat)).generation
    chat.user("more")
    two = (await ctx.generate(chat)).generation
    assert one.spans[0].policy_version == two.spans[0].policy_version == 0
    exact = two.prompt_ids.startswith(one.prompt_ids + one.token_ids) and not two.rerendered
    return float(exact and one.text == "hello" and len(one.logprobs) == len(one.token_ids) > 0)
"""
TRIALS = 2
"""Calls with which the client tries a server out: a chat, and a prompt of ids."""
Serve = Callable[..., str]
ROLLOUTS = 24


@pytest.fixture
def place(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    (tmp_path / "program.py").write_text(TWO_TURNS)
    return tmp_path


@pytest.fixture
def serve(place: Path) -> Iterator[Serve]:
    """Return a function that starts a server and returns its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*more: str) -> str:
        command = [sys.executable, "-m", "stoker.testing.openai_server", "--policy", "model.jsonl"]
        running = subprocess.Popen([*command, *more], cwd=place, stdout=subprocess.PIPE, text=True)
        started.append(running)
        assert running.stdout is not None
        ready, _, _ = select.select([running.stdout], [], [], SECONDS_MAX)
        assert ready, "the test server did not start"
        return running.stdout.readline().strip()

    start.started = started  # type: ignore[attr-defined]
    yield start
    for running in started:
        running.kill()
        running.communicate(timeout=SECONDS_MAX)


def arguments(url: str, *more: str) -> list[str]:
    base = ["run", "program.py", "--tasks", "tasks.jsonl", "--model", url]
    return [*base, "--set", "workers.count=0", *more]


def run(place: Path, url: str, *more: str, **environ: str) -> Any:
    answer = stoker(place, *arguments(url, *more, "--json"), **environ)
    assert answer.code == 0, answer
    return json.loads(answer.out)


def refused(place: Path, url: str, *more: str) -> Answer:
    answer = stoker(place, *arguments(url, *more))
    assert answer.code == 2, answer
    assert not (place / "runs").exists()  # a run that never began leaves nothing behind
    return answer


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_c4_a_run_on_a_server_keeps_exact_ids(place: Path, serve: Serve, flavour: str) -> None:
    report = run(place, serve("--flavour", flavour))
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    assert report["snapshot"]["reward_mean"] == 1.0
    assert report["snapshot"]["lane"]["model"] == "http:tiny"
    assert report["snapshot"]["lane"]["simulated"] is False


def test_two_servers_are_two_replicas(place: Path, serve: Serve) -> None:
    report = run(place, f"{serve()},{serve()}", STOKER_MODEL__WINDOW="1")
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    assert report["snapshot"]["lane"]["replicas"] == 2
    assert report["snapshot"]["lane"]["window"] == 2


def test_a_server_that_is_not_there_starts_no_run(place: Path) -> None:
    answer = refused(place, "http://127.0.0.1:1", "--set", "model.start=300ms")
    assert "http://127.0.0.1:1 was not reached within 0.3 s" in answer.err
    assert "Connection refused" in answer.err


def test_a_model_that_is_not_served_starts_no_run(place: Path, serve: Serve) -> None:
    answer = refused(place, serve("--name", "smol"), "--set", "model.name=big")
    assert "does not serve 'big' (model.name); it serves smol" in answer.err


def test_a_server_without_token_ids_is_refused_or_said(place: Path, serve: Serve) -> None:
    url = serve("--flavour", "openai", "--no-token-ids")
    assert "model.require_token_ids=degrade" in refused(place, url).err
    (place / "program.py").write_text(TWO_TURNS.replace("exact and", "").split("    assert")[0] + (
        "    return float(one.text == 'hello' and not two.token_ids)\n"
    ))  # fmt: skip
    report = run(place, url, "--set", "model.require_token_ids=degrade")
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    assert report["snapshot"]["reward_mean"] == 1.0
    (log,) = place.glob("runs/*/logs/coordinator.log")
    assert "model_notice" in log.read_text()
    assert "gives no token ids" in log.read_text()


def test_c1_servers_that_fail_for_good_give_no_reward(place: Path, serve: Serve) -> None:
    url = serve()
    fail(url, kind="status", status=500, count=10_000, skip=TRIALS)
    report = run(place, url, "--set", "lane.retries=1", "--set", "lane.retry_delay=1ms")
    assert report["snapshot"]["outcomes"] == {"failed": 2}
    assert report["snapshot"]["reward_mean"] is None
    rollouts = json.loads(stoker(place, "show", report["snapshot"]["run_id"], "--json").out)
    for row in rollouts["rollouts"]:
        assert row["outcome"]["fault"]["code"] == "model_unavailable"
        assert row["outcome"]["reward"] is None


def test_two_servers_and_one_killed_under_load_loses_nothing(place: Path, serve: Serve) -> None:
    lines = [json.dumps({"task_id": str(n), "data": {"prompt": "hi"}}) for n in range(ROLLOUTS)]
    (place / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    doomed, other = (serve("--token-seconds", "0.02") for _ in range(2))
    more = ["--set", "model.window=4", "--set", "lane.retry_delay=50ms", "--json"]
    running = subprocess.Popen(
        [STOKER, *arguments(f"{doomed},{other}", *more)], cwd=place, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait(f"{doomed}/test/busy")
        serve.started[0].kill()  # type: ignore[attr-defined]
        out, errors = running.communicate(timeout=SECONDS_MAX)
    finally:
        running.kill()
        running.communicate(timeout=SECONDS_MAX)
    assert running.returncode == 0, errors
    snapshot = json.loads(out)["snapshot"]
    assert snapshot["outcomes"] == {"completed": ROLLOUTS}
    assert snapshot["reward_mean"] == 1.0


def test_b4_a_run_goes_on_with_a_server_at_another_address(place: Path, serve: Serve) -> None:
    url = serve()
    fail(url, kind="hang", count=10_000, skip=TRIALS)
    running = subprocess.Popen(
        [STOKER, *arguments(url)], cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait(f"{url}/test/hanging")
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=SECONDS_MAX)
    finally:
        running.kill()
        running.communicate(timeout=SECONDS_MAX)
    assert running.returncode == 3, errors
    (directory,) = (place / "runs").iterdir()
    wait_until_quiet(directory)
    report = run(place, serve(), "--resume", directory.name)
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    assert report["snapshot"]["reward_mean"] == 1.0
    other = stoker(place, *arguments(serve("--name", "other"), "--resume", directory.name))
    assert other.code == 2
    assert "another model (recorded http:tiny, given http:other)" in other.err


def test_a_stop_while_the_server_is_tried_out_starts_no_run(place: Path, serve: Serve) -> None:
    url = serve()
    fail(url, kind="hang")
    running = subprocess.Popen(
        [STOKER, *arguments(url)], cwd=place, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        wait(f"{url}/test/hanging")
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=SECONDS_MAX)
    finally:
        running.kill()
        running.communicate(timeout=SECONDS_MAX)
    assert running.returncode == 2
    assert "stopped before the model server had answered" in errors
    assert not (place / "runs").exists()


def fail(url: str, **fault: object) -> None:
    body = json.dumps(fault).encode()
    with urlopen(Request(f"{url}/test/fail", data=body, method="POST"), timeout=SECONDS_MAX):
        pass


def wait(url: str) -> None:
    with urlopen(url, timeout=SECONDS_MAX) as answer:
        assert answer.status == 200


def test_the_key_of_the_servers_is_nowhere_on_disk(place: Path, serve: Serve) -> None:
    report = run(place, serve(), STOKER_MODEL__API_KEY="sk-very-secret")
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    wait_until_quiet(place / "runs")
    for path in (place / "runs").rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert b"sk-very-secret" not in path.read_bytes(), path
