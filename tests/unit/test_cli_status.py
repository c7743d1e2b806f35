import fcntl
import json
import os
from pathlib import Path

import msgspec
import pytest

from stoker.cli.main import main
from stoker.coordinator.record import RunDirectory, RunRecord
from stoker.model.ids import RunId
from support.snapshots import SNAPSHOT

RECORD = RunRecord(
    run_id=RunId("run_1"), stoker_version="0", created=0.0, program="/p.py", program_name="p",
    program_version="1", program_digest="", model="sim:x", model_digest="", tasks_digest="",
    tasks_count=1, settings={}, settings_digest="",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "run_1")
    directory.create()
    directory.write_record(RECORD)
    return directory


def told(capsys: pytest.CaptureFixture[str], run: RunDirectory) -> tuple[int, dict[str, object]]:
    code = main(["status", str(run.path), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_that_never_started(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    code, status = told(capsys, run)
    assert (code, status["snapshot"], status["coordinator_lives"]) == (0, None, False)
    assert main(["status", "run_1", "--runs", str(run.path.parent)]) == 0
    assert "it never started" in capsys.readouterr().out


def test_a_dead_run_is_told_from_a_living_one(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.status.write_bytes(msgspec.json.encode(SNAPSHOT))
    lock = os.open(run.path / "coordinator.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert told(capsys, run)[1]["coordinator_lives"] is True
    os.close(lock)
    assert told(capsys, run)[1]["coordinator_lives"] is False
    main(["status", str(run.path)])
    assert "no coordinator lives (it was running" in capsys.readouterr().out


def test_the_age_is_that_of_the_file(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    finished = msgspec.structs.replace(SNAPSHOT, state="finished")
    run.status.write_bytes(msgspec.json.encode(finished))
    os.utime(run.status, (0, 0))
    age = told(capsys, run)[1]["age_seconds"]
    assert isinstance(age, float)
    assert age > 1e9
    main(["status", str(run.path)])
    assert "run_1: finished; as of " in capsys.readouterr().out


def test_a_status_file_of_something_else(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.status.write_text('{"x": 1}')
    assert main(["status", str(run.path)]) == 2
    assert "is no status of a run" in capsys.readouterr().err


def test_no_such_run_names_the_latest(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "nope", "--runs", str(run.path.parent)]) == 2
    said = capsys.readouterr().err
    assert "no run 'nope'" in said
    assert "run_1" in said
