"""The command line as typed, on runs that work: answers, interruptions, readers that leave."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.command import (
    SECONDS_MAX,
    STOKER,
    lay_out,
    run_arguments,
    skip_reason,
    stoker,
    wait_until_quiet,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

WAITING = """\
import os

import stoker


def arrived(place):
    with open(place + "/arrived", "w") as pipe:
        pipe.write("x")


@stoker.rollout(version="1", timeout="10m")
async def waiting(ctx, task):
    place = task.data["place"]
    await ctx.local(arrived, place)
    while not await ctx.local(os.path.exists, place + "/go"):
        await ctx.sleep("50ms")
    return 1.0
"""

CALLING = """\
import stoker


def arrived(place):
    with open(place + "/arrived", "w") as pipe:
        pipe.write("x")


@stoker.tool(effect="pure")
def add(a, b):
    return a + b


@stoker.rollout(version="1", timeout="10m")
async def calling(ctx, task):
    await ctx.local(arrived, task.data["place"])
    seen = await ctx.call(add, a=1, b=2)
    return float(seen.value)
"""
STARTED: "list[subprocess.Popen[str]]" = []
TRUSTED = ["--set", "workers.classes.fast={isolation='process', trust='trusted', slots=1}"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


@pytest.fixture
def waiting(place: Path) -> Path:
    (place / "program.py").write_text(WAITING)
    (place / "tasks.jsonl").write_text(json.dumps({"place": str(place)}) + "\n")
    os.mkfifo(place / "arrived")
    return place


def document(place: Path, *arguments: str) -> Any:
    answer = stoker(place, *arguments, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    """A test that fails half-way must not leave its processes to the next one."""
    yield
    for running in STARTED:
        if running.returncode is None:
            running.kill()
            running.communicate(timeout=SECONDS_MAX)
    STARTED.clear()


def started(place: Path, command: Sequence[str | Path]) -> "subprocess.Popen[str]":
    STARTED.append(
        subprocess.Popen(
            command, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
    )  # fmt: skip
    return STARTED[-1]


def begun(place: Path, *more: str, under: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Start the waiting run and return once its rollout is inside the program."""
    pipe = os.open(place / "arrived", os.O_RDWR | os.O_NONBLOCK)
    running = started(place, [*under, STOKER, *run_arguments(*more)])
    ready, _, _ = select.select([pipe], [], [], SECONDS_MAX)
    os.close(pipe)
    assert ready, "the program was never reached"
    return running


def press_ctrl_c(running: "subprocess.Popen[str]") -> None:
    """Interrupt as a terminal does: the whole foreground group, children included."""
    os.killpg(running.pid, signal.SIGINT)


def ended(running: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = running.communicate(timeout=SECONDS_MAX)
    return running.returncode, out, err


def resumed(place: Path) -> Any:
    (run,) = (place / "runs").iterdir()
    wait_until_quiet(place)
    pipe = os.open(place / "arrived", os.O_RDWR | os.O_NONBLOCK)  # nobody is blocked on it now
    (place / "go").write_text("")
    report = document(place, *run_arguments("--resume", run.name))
    os.close(pipe)
    return report


def test_a_run_answers_every_question_about_itself(place: Path) -> None:
    report = document(place, *run_arguments())
    run = report["snapshot"]["run_id"]
    assert report["snapshot"]["outcomes"] == {"completed": 2}
    assert report["resumable"] is False
    status = document(place, "status", run)
    assert (status["coordinator_lives"], status["snapshot"]["state"]) == (False, "finished")
    rollouts = document(place, "show", run)["rollouts"]
    assert [(row["task"], row["outcome"]["reward"]) for row in rollouts] == [("a", 1.0), ("b", 1.0)]
    events = document(place, "show", run, rollouts[0]["rollout_id"])["events"]
    assert (events[0]["type"], events[-1]["type"]) == ("admitted", "finished")
    assert document(place, "show", run, "b")["events"][0]["task"]["task_id"] == "b"
    checked = document(place, "ledger", "check", "--run", run)
    assert (checked["rollouts"], checked["finished"], checked["problems"]) == (2, 2, [])
    assert document(place, "ledger", "stats", "--run", run)["unacknowledged"] == 0
    assert document(place, "ledger", "dead", "list", "--run", run) == []


def test_people_get_tables_on_stdout_and_progress_on_stderr(place: Path) -> None:
    answer = stoker(place, *run_arguments())
    assert answer.code == 0
    assert "2 completed  mean reward 1.000" in answer.out
    assert "2/2 finished (2 completed)" in answer.err
    (run,) = (place / "runs").iterdir()
    for command in (["status"], ["show"], ["show", "a"]):
        shown = stoker(place, command[0], str(run), *command[1:])
        assert (shown.code, shown.err) == (0, "")
        assert "completed" in shown.out


def test_a10_what_agents_wrote_never_reaches_the_terminal(place: Path) -> None:
    hostile = "\x1b[2J\x9b31m\u202e[red]\r\x00"
    line = json.dumps({"task_id": hostile, "data": {"prompt": hostile}})
    (place / "tasks.jsonl").write_text(f"{line}\n")
    (place / "model.jsonl").write_text(json.dumps({"task_id": "*", "turns": [hostile]}) + "\n")
    answer = stoker(place, *run_arguments())
    (run,) = (place / "runs").iterdir()
    shown = [stoker(place, "show", str(run)), stoker(place, "show", str(run), "rol_")]
    text = "".join(a.out + a.err for a in [answer, *shown, stoker(place, "status", str(run))])
    assert not set(text) & set("\x1b\x9b\u202e\r\x00")
    assert "\\x1b[2J" in text
    assert "[red]" in text


def test_the_first_interrupt_drains_the_second_stops_and_the_run_resumes(waiting: Path) -> None:
    running = begun(waiting)
    assert running.stderr is not None
    press_ctrl_c(running)
    assert "draining" in running.stderr.readline()
    press_ctrl_c(running)
    code, out, err = ended(running)
    assert code == 3, (out, err)
    assert "can be resumed" in err
    assert "--resume" in out
    assert resumed(waiting)["snapshot"]["outcomes"] == {"completed": 1}


def test_what_is_active_is_finished_after_one_interrupt(waiting: Path) -> None:
    running = begun(waiting)
    assert running.stderr is not None
    press_ctrl_c(running)
    assert "draining" in running.stderr.readline()
    (waiting / "go").write_text("")
    code, out, _ = ended(running)
    assert code == 0
    assert "1 completed" in out


def test_sigterm_stops_and_the_run_resumes(waiting: Path) -> None:
    running = begun(waiting)
    running.send_signal(signal.SIGTERM)
    assert ended(running)[0] == 3
    assert resumed(waiting)["snapshot"]["outcomes"] == {"completed": 1}


def test_a_run_under_nohup_outlives_its_terminal(waiting: Path) -> None:
    running = begun(waiting, under=["nohup"])
    os.killpg(running.pid, signal.SIGHUP)
    assert document(waiting, "status", next((waiting / "runs").iterdir()).name)["coordinator_lives"]
    (waiting / "go").write_text("")
    assert ended(running)[0] == 0


def test_status_of_a_living_run_and_no_second_coordinator(waiting: Path) -> None:
    running = begun(waiting)
    (run,) = (waiting / "runs").iterdir()
    assert document(waiting, "status", run.name)["coordinator_lives"] is True
    second = stoker(waiting, *run_arguments("--resume", run.name))
    assert (second.code, "owned by living process" in second.err) == (2, True)
    (waiting / "go").write_text("")
    assert ended(running)[0] == 0


def test_a_worker_started_by_hand_serves_the_run_until_told_to_end(waiting: Path) -> None:
    (waiting / "program.py").write_text(CALLING)
    running = begun(waiting, *TRUSTED, "--json")
    (run,) = (waiting / "runs").iterdir()
    worker = started(waiting, [STOKER, "worker", "--run", run.name, "--name", "hand"])
    code, out, err = ended(running)
    assert code == 0, (out, err)
    assert json.loads(out)["snapshot"]["reward_mean"] == 3.0
    second = stoker(waiting, "worker", "--run", run.name, "--name", "hand")
    assert (second.code, "living worker named 'hand'" in second.err) == (2, True)
    worker.send_signal(signal.SIGTERM)
    assert ended(worker) == (0, "", "")


def test_a_reader_that_leaves_is_no_traceback(place: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{STOKER} config show | head -n 1; {STOKER} config show --json | true"],
        cwd=place, capture_output=True, text=True, timeout=SECONDS_MAX, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("setting")
    assert done.stderr == ""
