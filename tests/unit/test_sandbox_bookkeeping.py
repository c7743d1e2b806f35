"""Ledger of boxes, uid leases, control groups of version 2, runtime copies."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BoxFailed, ConfigInvalid, IsolationUnavailable
from stoker.model.execution import Baseline, Limits
from stoker.model.tools import LimitKind
from stoker.sandbox import cgroups, reporter, runtime, uids
from stoker.sandbox import ledger as ledger_module
from stoker.sandbox.cgroups import Counters, TreeV1, TreeV2
from stoker.sandbox.ledger import BoxLedger, BoxRecord
from stoker.sandbox.supervise import _from_counters, ending
from stoker.sandbox.uids import UidLeases
from stoker.seams import locks


def _record(ledger: BoxLedger, box_id: str) -> BoxRecord:
    return BoxRecord(
        box_id=box_id, incarnation=ledger.incarnation, boot_id=ledger.boot_id, kind="a", uid=7
    )


def test_a_record_outlives_its_incarnation_until_struck(tmp_path: Path) -> None:
    first = BoxLedger(tmp_path)
    record = _record(first, "box_1")
    first.write(record)
    second = BoxLedger(tmp_path)
    assert second.abandoned() == []
    first.close()
    assert second.abandoned() == [record]
    second.strike("box_1")
    second.strike("box_1")
    second.forget_dead()
    assert second.abandoned() == []
    second.close()
    assert list((tmp_path / "incarnations").iterdir()) == []


def test_what_a_power_cut_leaves_without_a_record_is_an_orphan(tmp_path: Path) -> None:
    ledger = BoxLedger(tmp_path)
    work = tmp_path / "work"
    assert ledger.orphans(work) == []
    kept, orphan = work / "kept", work / "orphan"
    kept.mkdir(parents=True)
    orphan.mkdir()
    record = msgspec.structs.replace(_record(ledger, "kept"), directory=str(kept))
    ledger.write(record)
    (tmp_path / "boxes" / "orphan.json").touch()
    assert ledger.orphans(work) == [orphan]
    ledger.forget_dead()
    assert [path.name for path in (tmp_path / "boxes").iterdir()] == ["kept.json"]
    ledger.close()


def test_a_box_made_while_orphans_are_looked_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, other = BoxLedger(tmp_path), BoxLedger(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    seen = Path.iterdir

    def meanwhile(path: Path) -> Iterator[Path]:
        # Another process writes its box down and makes it just before the directory is read.
        made = work / "box_1"
        other.write(msgspec.structs.replace(_record(other, "box_1"), directory=str(made)))
        made.mkdir(exist_ok=True)
        return seen(path)

    monkeypatch.setattr(Path, "iterdir", meanwhile)
    assert ledger.orphans(work) == []
    monkeypatch.undo()
    ledger.close()
    other.close()


def test_an_incarnation_whose_lock_file_was_taken_away_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[Path] = []

    def taken_away(path: Path) -> int:
        lock = locks.wait_for_lock(path)
        locked.append(path)
        if len(locked) == 1:
            path.unlink()  # by a sweep that found the file before it was locked
        return lock

    monkeypatch.setattr(ledger_module, "wait_for_lock", taken_away)
    ledger = BoxLedger(tmp_path)
    assert len(locked) == 2
    ledger.write(_record(ledger, "box_1"))
    assert BoxLedger(tmp_path).abandoned() == []
    ledger.strike("box_1")
    ledger.close()


def test_one_process_sweeps_at_a_time(tmp_path: Path) -> None:
    first, second = BoxLedger(tmp_path), BoxLedger(tmp_path)
    lock = first.sweeping()
    assert lock is not None
    assert second.sweeping() is None
    os.close(lock)
    lock = second.sweeping()
    assert lock is not None
    os.close(lock)


def test_a_torn_record_is_passed_over(tmp_path: Path) -> None:
    ledger = BoxLedger(tmp_path)
    ledger.write(_record(ledger, "box_1"))
    (tmp_path / "boxes" / "box_2.json").write_bytes(b'{"box_id": "box_')
    (tmp_path / "boxes" / "box_3.part").write_bytes(b"")
    assert [record.box_id for record in ledger.records()] == ["box_1"]
    ledger.close()


@pytest.fixture
def free_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "has_processes", lambda _: False)
    monkeypatch.setattr(UidLeases, "_is_known", lambda *_: False)


def test_a_uid_is_leased_once_on_the_whole_machine(tmp_path: Path, free_uids: None) -> None:
    one, other = UidLeases(1000, 4, tmp_path), UidLeases(1000, 4, tmp_path)
    leased = [one.lease(), other.lease(), one.lease(), other.lease()]
    assert sorted(leased) == [1000, 1001, 1002, 1003]
    with pytest.raises(BoxFailed, match="taken"):
        one.lease()
    assert not one.try_hold(leased[1])
    other.release(leased[1])
    other.release(leased[1])
    assert one.lease() == leased[1]
    one.close()
    other.close()


def test_a_uid_that_a_process_has_is_not_leased(
    tmp_path: Path, free_uids: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, "has_processes", {1000, 1002}.__contains__)
    leases = UidLeases(1000, 3, tmp_path)
    assert leases.lease() == 1001
    with pytest.raises(BoxFailed):
        leases.lease()
    leases.close()


@pytest.mark.root
def test_a_uid_has_processes_as_long_as_one_is_there() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a process of another uid is looked for")
    uid = 1_899_000_101
    assert not uids.has_processes(uid)
    assert uids.pids_of_uid(uid) == []
    with subprocess.Popen(["sleep", "600"], user=uid) as sleeper:
        try:
            assert uids.has_processes(uid)
            assert uids.pids_of_uid(uid) == [sleeper.pid]
        finally:
            sleeper.kill()
    assert not uids.has_processes(uid)


def test_a_range_that_belongs_to_users_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, "has_processes", lambda _: False)
    subordinate = tmp_path / "subuid"
    subordinate.write_text("somebody:1000:100\n# comment\nbroken\n")
    monkeypatch.setattr(uids, "_SUBORDINATE_FILES", (subordinate,))
    leases = UidLeases(1000, 50, tmp_path / "locks")
    with pytest.raises(ConfigInvalid, match="uid_base"):
        leases.lease()
    root = UidLeases(0, 1, tmp_path / "locks")
    with pytest.raises(ConfigInvalid):
        root.lease()


def _fake_v2(parent: Path) -> None:
    """Answer like the kernel when the group directory is made."""
    for name, content in {
        "memory.max": "", "memory.swap.max": "", "memory.oom.group": "", "pids.max": "",
        "cgroup.procs": "", "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n",
        "pids.events": "max 4\n", "memory.peak": "4096\n",
    }.items():  # fmt: skip
        (parent / name).write_text(content)


def test_version_2_is_read_and_written_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.mkdir

    def mkdir(path: str) -> None:
        made(path)
        _fake_v2(Path(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    tree = TreeV2(str(tmp_path))
    group = tree.create("stoker.x.box_1", Limits(memory_bytes=1000, processes_max=7))
    directory = tmp_path / "stoker.x.box_1"
    assert (directory / "memory.max").read_text() == "1000"
    assert (directory / "memory.swap.max").read_text() == "0"
    assert (directory / "memory.oom.group").read_text() == "1"
    assert (directory / "pids.max").read_text() == "7"
    assert group.counters() == Counters(1.5, 2, 4, 4096, 1)
    for descriptor in group.join_descriptors():
        os.write(descriptor, b"0")
        os.close(descriptor)
    assert (directory / "cgroup.procs").read_text() == "0"
    assert tree.find("stoker.x.") == {"stoker.x.box_1"}
    assert tree.directories("stoker.x.box_1") == group.directories
    group.reset_peak()
    group.close()
    group.close()


def test_version_1_is_joined_without_waiting_for_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.mkdir

    def mkdir(path: str) -> None:
        made(path)
        for name in (
            "tasks", "cgroup.procs", "memory.limit_in_bytes", "memory.oom_control", "pids.max",
            "pids.events", "cpuacct.usage",
        ):  # fmt: skip
            Path(path, name).write_text("")

    parents = {name: str(tmp_path / name) for name in ("freezer", "pids", "cpuacct", "memory")}
    for parent in parents.values():
        made(parent)
    monkeypatch.setattr(os, "mkdir", mkdir)
    group = TreeV1(parents).create("stoker.x.box_1", Limits())
    for descriptor in group.join_descriptors():
        os.write(descriptor, b"0")
        os.close(descriptor)
    group.close()
    for directory in group.directories:
        assert (Path(directory) / "tasks").read_text() == "0"
        assert (Path(directory) / "cgroup.procs").read_text() == "", "it waits after idle time"


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    tree = TreeV2(str(tmp_path / "absent"))
    with pytest.raises(BoxFailed, match="nothing of it is left"):
        tree.create("stoker.x.box_1", Limits())
    assert asyncio.run(cgroups.kill_all(("/nonexistent",))) is None
    assert asyncio.run(cgroups.remove(("/nonexistent",))) is None


def test_verdicts_are_differences_of_counters() -> None:
    before = Counters(1.0, 3, 5, None, 2)
    assert _from_counters(before, before) is None
    assert _from_counters(before, before._replace(memory_kills=4)) is LimitKind.MEMORY
    assert _from_counters(before, before._replace(refused_forks=6)) is LimitKind.PROCESSES


def test_endings() -> None:
    assert ending(0, wrapped=False) == (0, None)
    assert ending(7 << 8, wrapped=True) == (7, None)
    assert ending(9, wrapped=False) == (None, 9)
    assert ending(137 << 8, wrapped=False) == (137, None)


def test_runtime_copies_are_made_once_and_readable_by_everybody(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        first = runtime.prepare(tmp_path / "deep" / "runtime")
    finally:
        os.umask(old)
    python = first.python / "bin" / "python"
    inode = python.stat().st_ino
    assert runtime.prepare(tmp_path / "deep" / "runtime") == first
    assert python.stat().st_ino == inode
    for path in (tmp_path / "deep", first.python, first.scripts, first.etc, python.resolve()):
        assert path.stat().st_mode & 0o055 == 0o055
    for path in (*first.etc.rglob("*"), *first.scripts.iterdir()):
        if path.is_symlink():
            continue
        runs = path.name.startswith((reporter.NAME, reporter.INIT)) or path.is_dir()
        assert path.stat().st_mode & 0o777 == (0o755 if runs else 0o644)


def test_a_runtime_directory_others_can_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(IsolationUnavailable, match="chmod go-w"):
        runtime.prepare(tmp_path)


def test_the_baseline_digest_covers_name_variables_and_interpreter() -> None:
    plain = runtime.baseline_digest(Baseline())
    assert plain == runtime.baseline_digest(Baseline())
    assert plain != runtime.baseline_digest(Baseline(name="other"))
    assert plain != runtime.baseline_digest(Baseline(environment={"A": "1"}))


def test_records_carry_no_content() -> None:
    assert set(BoxRecord.__struct_fields__) == {
        "box_id", "incarnation", "boot_id", "kind", "uid", "server_uid", "group", "mounts",
        "directory",
    }  # fmt: skip
    assert msgspec.json.encode(
        BoxRecord(box_id="b", incarnation="i", boot_id="x", kind="a")
    ).startswith(b"{")
