import fcntl
import json
import os
from pathlib import Path

import msgspec
import pytest

from stoker.cli.main import main
from stoker.coordinator.partition import Partition
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.sharing import Part
from support.records import RECORD
from support.snapshots import SNAPSHOT


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


def test_a_divided_run_is_told_as_one_and_each_part_that_lacks_a_coordinator_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"run": {"group_size": 4}}
    record = msgspec.structs.replace(RECORD, partitions=3, tasks_count=100, settings=settings)
    run.write_record(record)
    ages = {0: "finished", 1: "running"}
    for index, state in ages.items():
        snapshot = msgspec.structs.replace(SNAPSHOT, state=state, partition=f"{index}/3")
        Part(run, Partition(index, 3)).status.write_bytes(msgspec.json.encode(snapshot))
    code, status = told(capsys, run)
    assert (code, status["coordinator_lives"]) == (0, False)
    whole = status["snapshot"]
    assert isinstance(whole, dict)
    assert (whole["state"], whole["outcomes"]["completed"]) == ("stopped", 2 * 98)
    assert whole["rollouts_total"] == 400, "of the record: one part has not said a word yet"
    assert status["partitions"] == [
        {"partition": "0/3", "process": None, "state": "finished", "age_seconds": ANY_AGE},
        {"partition": "1/3", "process": None, "state": "running", "age_seconds": ANY_AGE},
        {"partition": "2/3", "process": None, "state": None, "age_seconds": None},
    ]
    with Part(run, Partition(2, 3)).owned():
        main(["status", str(run.path)])
        shown = capsys.readouterr().out
        assert told(capsys, run)[1]["coordinator_lives"] is True
    assert "run_1 0/3: finished; as of " in shown
    assert "run_1 1/3: no coordinator lives (it was running, as of " in shown
    assert "go on with: stoker run … --resume run_1 --partition 1/3" in shown
    assert f"run_1 2/3: process {os.getpid()} lives; no status has been written" in shown


class _AnyAge:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and other >= 0.0

    __hash__ = None  # type: ignore[assignment]


ANY_AGE = _AnyAge()
