"""A full disk at every place of our own processes that writes for readers (CASES B12).

What other processes do there is the crash floor's: see ``test_run_faultpoints``.
"""

import asyncio
import io
import json
from collections import Counter
from pathlib import Path

import pytest

from stoker.broker.copying import copy_database, mark
from stoker.broker.place import DATABASE
from stoker.coordinator.backups import BACKUP_WRITE, RESTORE_WRITE, back_up, restore
from stoker.coordinator.record import RunDirectory
from stoker.errors import RunDirectoryUnusable
from stoker.export.files import EXPORT_SYNC, replacing
from stoker.observe.log import LOG_WRITE, open_log
from stoker.rollout.log import HOST_LOG, LogStream
from stoker.seams import faultpoints
from stoker.worker.log import WORKER_LOG, Lines
from support.ledger_golden import make
from support.records import RECORD


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let ``full_at`` arm a point in this process."""
    monkeypatch.setattr(faultpoints, "_reached", Counter())
    monkeypatch.setattr(faultpoints, "_armed", {})
    return monkeypatch


def full_at(full: pytest.MonkeyPatch, point: str) -> None:
    full.setitem(faultpoints._armed, point, ("disk_full", 1))


def test_b12_a_full_disk_costs_a_line_of_a_log(full: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for point in (HOST_LOG, WORKER_LOG, LOG_WRITE):
        full_at(full, point)
    file = tmp_path / "host.out"
    with io.FileIO(file, "w") as raw:
        printed = LogStream(raw)
        assert [printed.write(text) for text in ("lost\n", "kept\n")] == [5, 5]
    assert file.read_text() == "kept\n"

    with (tmp_path / "worker.log").open("a") as opened:
        lines = Lines(opened)
        for text in ("lost\n", "kept\n"):
            lines.write(text)
            lines.flush()
    assert (tmp_path / "worker.log").read_text() == "kept\n"
    run = open_log(tmp_path / "run.log")
    for which in ("lost", "kept"):
        run.event("run_ended", run=which)
    run.close()
    kept = [json.loads(line) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert ([line["run"] for line in kept], run.dropped) == (["kept"], 1)


def test_b12_a_full_disk_leaves_an_export_as_it_was(
    full: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("old")
    full_at(full, EXPORT_SYNC)
    with pytest.raises(OSError, match="nothing was written"), replacing(target) as file:
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert target.read_text() == "old"


def test_b12_a_full_disk_leaves_no_backup_and_no_restored_run(
    full: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.write_record(RECORD)
    make(run.ledger)
    file, other = tmp_path / "b.tar", tmp_path / "other"
    full_at(full, BACKUP_WRITE)
    with pytest.raises(RunDirectoryUnusable, match="nothing was kept"):
        asyncio.run(back_up(run, file))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    asyncio.run(back_up(run, file))
    full_at(full, RESTORE_WRITE)
    with pytest.raises(RunDirectoryUnusable, match="nothing was kept"):
        restore(file, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "run"]
    assert restore(file, other).copied_from


def test_b12_a_full_disk_leaves_a_copy_of_a_closed_ledger_to_be_made_again(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(copy_database(tmp_path, Path("/dev/full")))
    asyncio.run(copy_database(tmp_path, tmp_path / "copy.db"))
    assert mark(tmp_path / "copy.db").size_bytes == (tmp_path / "copy.db").stat().st_size
    assert (tmp_path / DATABASE).exists()
