"""Where a ledger may live, and who owns it."""

import os
from pathlib import Path

import pytest

from stoker.broker import place
from stoker.broker.place import (
    check_directory,
    network_file_system,
    owner_pid,
    socket_path,
    take_lock,
)
from stoker.errors import RunDirectoryUnusable


def test_a_local_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    check_directory(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("magic", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x01021997, "9p")]
)
def test_network_file_systems_are_refused_with_a_better_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, name: str
) -> None:
    monkeypatch.setattr(place, "_magic", lambda _: magic)
    with pytest.raises(RunDirectoryUnusable, match=f"{name}.*own disk"):
        check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mounted", "refused"), [("fuse.sshfs", True), ("fuseblk", False)])
def test_fuse_is_refused_unless_it_is_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str, *, refused: bool
) -> None:
    monkeypatch.setattr(place, "_magic", lambda _: 0x65735546)
    monkeypatch.setattr(place, "_mount_type", lambda _: mounted)
    assert (network_file_system(tmp_path) is not None) == refused


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryUnusable, match="cannot hold a ledger"):
        check_directory(tmp_path / "file" / "run")


def test_a_read_only_file_system_is_refused() -> None:
    with pytest.raises(RunDirectoryUnusable, match="choose a directory"):
        check_directory(Path("/proc/stoker"))


def test_the_socket_lies_in_a_private_short_place(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    deep.mkdir(parents=True)
    path = socket_path(deep, {})
    assert len(os.fsencode(path)) <= 107
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert socket_path(deep, {}) == path
    assert socket_path(tmp_path, {}) != path


def test_a_runtime_directory_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "stoker").mkdir(mode=0o755)
    assert tmp_path not in socket_path(tmp_path, {"XDG_RUNTIME_DIR": str(tmp_path)}).parents
    (tmp_path / "stoker").chmod(0o700)
    runtime = socket_path(tmp_path, {"XDG_RUNTIME_DIR": str(tmp_path)}).parent
    fits = len(os.fsencode(tmp_path)) < 80
    assert (runtime == tmp_path / "stoker") == fits


def test_one_owner_holds_the_lock_and_is_named(tmp_path: Path) -> None:
    assert owner_pid(tmp_path) is None
    lock = take_lock(tmp_path)
    assert lock is not None
    assert owner_pid(tmp_path) == os.getpid()
    assert take_lock(tmp_path) is None
    os.close(lock)
    assert owner_pid(tmp_path) is None
