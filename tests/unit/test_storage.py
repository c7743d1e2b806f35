"""The disk budget of artifacts, and which runs a prune takes: never one that somebody needs."""

import asyncio
import fcntl
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stoker.cli.main import main
from stoker.coordinator import branch_requests, storage
from stoker.coordinator.branch_requests import BranchRequest
from stoker.coordinator.branching import Point
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import StopSignal
from stoker.coordinator.storage import (
    ExportMark,
    StorageWatch,
    judge,
    mark_exported,
    require_room,
    stored_bytes,
)
from stoker.errors import ConfigInvalid
from stoker.journal.artifacts import ArtifactStore
from stoker.model.ids import RolloutId
from support.records import RECORD
from support.snapshots import SNAPSHOT

NOW = 1e12
TOTAL = SNAPSHOT.rollouts_total


def a_run(
    place: Path, name: str = "run_1", *, state: str = "finished", exported: int = TOTAL
) -> RunDirectory:
    run = RunDirectory(place / "runs" / name)
    run.create()
    run.write_record(RECORD)
    run.status.write_bytes(msgspec.json.encode(replace(SNAPSHOT, state=state)))
    ArtifactStore(run.artifacts).put(b"x" * 100_000)
    if exported:
        mark_exported(run, ExportMark(at=1000.0, file="rows.jsonl", rollouts=exported))
    return run


def test_a_finished_exported_run_goes_whole_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = a_run(tmp_path, "run_gone")
    stay = {
        "run_unfinished": a_run(tmp_path, "run_unfinished", state="stopped"),
        "run_unexported": a_run(tmp_path, "run_unexported", exported=0),
        "run_half": a_run(tmp_path, "run_half", exported=TOTAL - 1),
    }
    runs = str(tmp_path / "runs")
    assert main(["runs", "prune", "--runs", runs, "--dry-run"]) == 0
    assert gone.path.exists()
    assert "would be removed" in capsys.readouterr().out
    assert main(["runs", "prune", "--runs", runs]) == 0
    assert not gone.path.exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(stay)
    for name, why in (
        ("run_unfinished", "not finished"),
        ("run_unexported", "not exported"),
        ("run_half", f"only {TOTAL - 1} of its {TOTAL}"),
    ):
        assert why in judge(stay[name], NOW).kept
        assert stored_bytes(stay[name].artifacts) == 100_000


def test_a_run_in_use_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert judge(run, NOW).kept == ""
    for lock in (run.path / "coordinator.lock", run.ledger / "ledger.lock"):
        held = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, b"1")
        assert judge(run, NOW).kept == "it is in use"
        os.close(held)
    assert judge(run, before=999.0).kept == "it was exported too recently"


def test_a_run_with_branches_that_wait_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with branch_requests.asking(run):
        request = BranchRequest(
            parent=RolloutId("rol_1"), task_id="t", point=Point(step=1, last=1), first=0, count=2
        )
        branch_requests.ask(run, request)
    assert judge(run, NOW).kept == "branches of it wait to be run"
    (asked,) = (run.path / "branches").glob("*.json")
    asked.with_suffix(".taken").touch()  # as a coordinator does that takes it in
    assert judge(run, NOW).kept == ""


def test_a_run_without_a_status_or_on_a_shared_ledger_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.status.unlink()
    assert judge(run, NOW).kept == "it is not finished"
    shared = a_run(tmp_path, "run_2")
    shared.ledger.rename(tmp_path / "pool")
    shared.ledger.symlink_to(tmp_path / "pool")
    assert "shares" in judge(shared, NOW).kept


def test_a_prune_that_was_killed_is_ended_by_the_next(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.path.rename(run.path.with_name(".pruned-run_1"))
    (tmp_path / "runs" / ".pruned-run_1" / "run.json").unlink()
    assert main(["runs", "prune", "--runs", str(tmp_path / "runs")]) == 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_age_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert main(["runs", "prune", "--runs", str(run.path.parent), "--older", "a week"]) == 2
    assert run.path.exists()


def test_the_budget_refuses_a_start_and_drains_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LOOK_SECONDS", 0.0)
    store = ArtifactStore(tmp_path)
    require_room(tmp_path, None)
    require_room(tmp_path, 1)
    stop = StopSignal()
    said: list[str] = []

    async def watched() -> None:
        watching = asyncio.create_task(StorageWatch(tmp_path, 150_000, stop).run(said.append))
        store.put(b"a" * 100_000)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stop.draining
        store.put(b"b" * 100_000)
        async with asyncio.timeout(60):
            await watching

    asyncio.run(watched())
    assert stop.draining
    assert not stop.stopping, "what is active finishes"
    assert "200000 bytes of the 150000" in said[0]
    assert "stoker runs prune" in said[0]
    store.put(b"c" * 100_000)  # nothing that is active is refused its content
    checkpoint = tmp_path / "draft"
    checkpoint.write_bytes(b"d" * 100_000)
    store.adopt(checkpoint, "d" * 64)  # as a worker keeps it
    with pytest.raises(ConfigInvalid, match=r"400000 bytes .* nothing was started"):
        require_room(tmp_path, 150_000)
