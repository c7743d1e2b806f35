"""Input that cannot be used: one clear sentence, exit code 2, nothing left behind."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from support.command import (
    Answer,
    files_below,
    lay_out,
    processes_about,
    run_arguments,
    skip_reason,
    stoker,
    wait_until_quiet,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def refused(place: Path, *arguments: str, **environ: str) -> str:
    """Run a command that must be refused; return its sentence."""
    before = files_below(place)
    answer = stoker(place, *arguments, **environ)
    return sentence(place, answer, before)


def sentence(place: Path, answer: Answer, before: dict[str, bytes | None]) -> str:
    assert answer.code == 2, answer
    assert answer.out == ""
    lines = answer.err.splitlines()
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("stoker: ")
    assert files_below(place) == before, "something was left behind"
    assert processes_about(place) == {}
    return lines[0].removeprefix("stoker: ")


def test_an_unknown_setting_names_file_line_and_nearest(place: Path) -> None:
    (place / "s.toml").write_text("[workers]\n\ncuont = 2\n")
    assert refused(place, *run_arguments("--config", "s.toml")) == (
        "s.toml:3: unknown setting workers.cuont; the nearest known one is workers.count."
    )


def test_a_mistyped_setting_names_file_line_and_allowed_values(place: Path) -> None:
    (place / "s.toml").write_text('[workers.classes.fast]\nisolation = "jail"\n')
    said = refused(place, *run_arguments("--config", "s.toml"))
    assert said.startswith('s.toml:2: workers.classes.fast.isolation is "jail"; allowed: auto, ')


def test_a_mistyped_setting_in_the_environment_names_the_variable(place: Path) -> None:
    said = refused(place, *run_arguments(), STOKER_RUN__SEED="two")
    assert said == 'STOKER_RUN__SEED: run.seed is "two"; it must be a whole number.'


def test_config_check_says_the_same(place: Path) -> None:
    (place / "s.toml").write_text("[run]\nseed = \n")
    assert refused(place, "config", "check", "s.toml").startswith("s.toml:2: not TOML")


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"task_id": "a"}', '{"x": NaN}'])
def test_a_bad_task_line_names_its_number_and_leaves_the_rest(place: Path, line: str) -> None:
    tasks = place / "tasks.jsonl"
    tasks.write_text(f'{{"task_id": "a"}}\n\n{line}\n{{"task_id": "c"}}\n')
    assert "tasks.jsonl:3: not a task: " in refused(place, *run_arguments())


def test_untrusted_work_on_a_shared_kernel_that_was_not_accepted_names_the_class(
    place: Path,
) -> None:
    said = refused(place, *run_arguments("--set", "workers.count=1"))
    assert said.startswith("worker class fast: untrusted work would share the host's kernel")
    assert "--set sandbox.accept_shared_kernel=true" in said


def test_no_tasks_and_no_task_file(place: Path) -> None:
    assert "cannot be read" in refused(place, *run_arguments("--tasks", "absent.jsonl"))
    (place / "tasks.jsonl").write_text("\n")
    assert "holds no task" in refused(place, *run_arguments())


def test_an_unknown_program(place: Path) -> None:
    rest = run_arguments()[2:]
    assert refused(place, "run", "absent.py", *rest) == "There is no program file absent.py."
    assert "nosuch" in refused(place, "run", "program.py:nosuch", *rest)


@pytest.mark.parametrize(
    "source", ["x = 1\n", "import nowhere_to_be_found\n", "def broken(:\n", "raise SystemExit(3)\n"]
)
def test_a_program_that_cannot_be_loaded(place: Path, source: str) -> None:
    (place / "program.py").write_text(source)
    assert "program.py" in refused(place, *run_arguments())


@pytest.mark.parametrize("spec", ["nosuch:thing", "scripted:absent.jsonl", "scripted"])
def test_an_unknown_model(place: Path, spec: str) -> None:
    assert spec.split(":", maxsplit=1)[0] in refused(place, *run_arguments("--model", spec))


def test_an_incomplete_model_folder(place: Path) -> None:
    (place / "half").mkdir()
    (place / "half" / "config.json").write_text("{}")
    said = refused(place, *run_arguments("--model", "torch:half"))
    assert said.startswith(f"model folder {place / 'half'} is incomplete: it holds no weights")


@pytest.mark.parametrize(
    "command",
    [
        ["status", "run_x"],
        ["show", "run_x"],
        ["show", "run_x", "rol_x"],
        ["ledger", "stats", "--run", "run_x"],
        ["ledger", "check", "--run", "run_x"],
        ["ledger", "backup", "b.tar", "--run", "run_x"],
        ["ledger", "dead", "requeue", "act_1", "--run", "run_x"],
        ["worker", "--run", "run_x", "--name", "w"],
        [*run_arguments(), "--resume", "run_x"],
    ],
    ids=" ".join,
)
def test_no_such_run(place: Path, command: list[str]) -> None:
    assert "no run 'run_x'" in refused(place, *command)


def test_a_run_directory_that_cannot_be_written(place: Path) -> None:
    (place / "taken").write_text("a file")
    assert "taken" in refused(place, *run_arguments("--runs", "taken"))
    # /proc refuses new directories to everybody, root included.
    assert "/proc/runs" in refused(place, *run_arguments("--runs", "/proc/runs"))
    if os.geteuid() != 0:
        (place / "locked").mkdir(mode=0o500)
        assert "locked" in refused(place, *run_arguments("--runs", "locked/runs"))


def test_a_run_owned_by_a_living_process(place: Path) -> None:
    made = stoker(place, *run_arguments("--json"))
    assert made.code == 0, made
    run_id = json.loads(made.out)["snapshot"]["run_id"]
    wait_until_quiet(place)
    lock = os.open(place / "runs" / run_id / "coordinator.lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refused(place, *run_arguments("--resume", run_id))
    finally:
        os.close(lock)
    assert "owned by living process" in said


def test_another_model_is_refused_on_resume_with_both_sides(place: Path) -> None:
    made = stoker(place, *run_arguments("--json"))
    run_id = json.loads(made.out)["snapshot"]["run_id"]
    wait_until_quiet(place)
    (place / "other.jsonl").write_text('{"task_id": "*", "turns": ["other"]}\n')
    before = (place / "runs" / run_id / "run.json").read_bytes()
    answer = stoker(place, *run_arguments("--resume", run_id, "--model", "scripted:other.jsonl"))
    assert answer.code == 2, answer
    assert "scripted:model" in answer.err
    assert "scripted:other" in answer.err
    assert len(answer.err.splitlines()) == 1
    assert (place / "runs" / run_id / "run.json").read_bytes() == before


def test_usage_errors(place: Path) -> None:
    assert "--changed is 'maybe'" in refused(place, *run_arguments("--changed", "maybe"))
    assert "No such command" in refused(place, "frobnicate")
    assert "See: stoker run --help" in refused(place, "run", "program.py", "--taks", "x")
