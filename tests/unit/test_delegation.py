"""Where boxes' groups go in the single hierarchy, tried on a folder that answers like a kernel."""

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from stoker.sandbox import cgroups, delegation
from stoker.sandbox.cgroups import TreeV1, TreeV2, directories_of
from stoker.sandbox.delegation import PROCESSES, NotDelegated, place

SCOPE = "user.slice/run-1.scope"


class Hierarchy:
    """Groups with their files; a group with processes of its own enables no controllers."""

    def __init__(self, mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount = mount
        self.delegated: set[Path] = set()
        self.gone: set[str] = set()
        self.refused: set[Path] = set()
        self._write = Path.write_text
        monkeypatch.setattr(Path, "write_text", lambda path, text: self._written(path, text))  # noqa: PLW0108 - bound to the path
        monkeypatch.setattr(Path, "mkdir", lambda path, **_: self._made(path))
        monkeypatch.setattr(os, "getxattr", self._mark)
        monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) not in self.refused)
        self.fill(mount)

    def fill(self, group: Path, *pids: int, limit: str = "max") -> Path:
        """Make the files of a group and of those above it."""
        os.makedirs(group, exist_ok=True)  # noqa: PTH103 - the other is replaced
        for folder in (group, *group.parents):
            self._write(folder / "cgroup.controllers", "cpu io memory pids")
            for name in ("cgroup.procs", "cgroup.subtree_control"):
                if not (folder / name).exists():
                    self._write(folder / name, "")
            if folder == self.mount:
                break
        self._write(group / "memory.max", limit)
        self._write(group / "cgroup.procs", "".join(f"{pid}\n" for pid in pids))
        return group

    def pids(self, group: Path) -> list[str]:
        return (group / "cgroup.procs").read_text().split()

    def _made(self, path: Path) -> None:
        self.fill(path, *map(int, self.pids(path) if path.exists() else ()))

    def _mark(self, path: Path, name: str) -> bytes:
        if path in self.delegated and name == "user.delegate":
            return b"1"
        raise OSError(errno.ENODATA, "no data")

    def _written(self, path: Path, text: str) -> int:
        if path.name == "cgroup.procs":
            if text in self.gone:
                raise ProcessLookupError
            for other in self.mount.rglob("cgroup.procs"):
                left = [pid for pid in other.read_text().split() if pid != text]
                self._write(other, "".join(f"{pid}\n" for pid in left))
            text = (path.read_text() if path.exists() else "") + f"{text}\n"
        elif path.name == "cgroup.subtree_control":
            if self.pids(path.parent):
                raise OSError(errno.EBUSY, "busy")
            text = text.replace("+", "")
        return self._write(path, text)


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hierarchy]:
    """A hierarchy on a machine whose systemd, if it has one, says nothing."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    delegation._is_said_to_be.cache_clear()
    yield Hierarchy(tmp_path, monkeypatch)
    delegation._is_said_to_be.cache_clear()


def enabled(group: Path) -> set[str]:
    return set((group / "cgroup.subtree_control").read_text().split())


@pytest.mark.parametrize("root", [False, True])
def test_processes_of_a_delegated_group_are_moved_out_of_the_way(
    hierarchy: Hierarchy, *, root: bool
) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11, 12)
    hierarchy.delegated.add(scope)
    assert place(hierarchy.mount, f"/{SCOPE}", root=root) == scope
    assert enabled(scope) == {"memory", "pids"}
    assert hierarchy.pids(scope) == []
    assert hierarchy.pids(scope / PROCESSES) == ["11", "12"]


def test_a_second_process_finds_the_same_place_from_where_it_was_moved(
    hierarchy: Hierarchy,
) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11)
    hierarchy.delegated.add(scope)
    place(hierarchy.mount, f"/{SCOPE}", root=False)
    assert place(hierarchy.mount, f"/{SCOPE}/{PROCESSES}", root=False) == scope
    assert hierarchy.pids(scope / PROCESSES) == ["11"], "and moves nothing"


def test_a_process_that_ends_while_it_is_moved_holds_nobody_up(hierarchy: Hierarchy) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11, 12)
    hierarchy.delegated.add(scope)
    hierarchy.gone.add("12")
    with pytest.raises(NotDelegated, match=r"run-1\.scope cannot be enabled \(.*busy"):
        place(hierarchy.mount, f"/{SCOPE}", root=False)  # this fake never reaps it
    hierarchy.fill(scope)
    assert place(hierarchy.mount, f"/{SCOPE}", root=False) == scope


def test_what_systemd_did_not_delegate_is_left_alone(hierarchy: Hierarchy) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11)
    with pytest.raises(NotDelegated, match=r"did not delegate run-1\.scope") as refused:
        place(hierarchy.mount, f"/{SCOPE}", root=False)
    assert "systemd-run --user --scope -p Delegate=yes" in refused.value.remedy
    assert (hierarchy.pids(scope), enabled(scope)) == (["11"], set())


@pytest.mark.parametrize(("said", "given"), [("yes", True), ("no", False)])
def test_a_user_s_systemd_that_marks_nothing_is_asked(
    hierarchy: Hierarchy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, *, given: bool
) -> None:
    program = tmp_path / "systemctl"
    program.write_bytes(
        b'#!/bin/sh\n[ "$*" = "--user show --property=Delegate --value -- run-1.scope" ] &&'
        b' [ "$XDG_RUNTIME_DIR" = /run/user/4242 ] && echo ' + said.encode()
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(program))
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11)
    with nullcontext() if given else pytest.raises(NotDelegated, match="did not delegate"):
        assert place(hierarchy.mount, f"/{SCOPE}", root=False) == scope


def test_root_without_delegation_makes_groups_beside_the_units(hierarchy: Hierarchy) -> None:
    hierarchy.fill(hierarchy.mount / SCOPE, 11)
    assert place(hierarchy.mount, f"/{SCOPE}", root=True) == hierarchy.mount
    assert enabled(hierarchy.mount) == {"memory", "pids"}


@pytest.mark.parametrize("bound", ["user.slice/run-1.scope", "user.slice"])
def test_boxes_of_root_do_not_escape_the_memory_limit_of_their_worker(
    hierarchy: Hierarchy, bound: str
) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE, 11)
    hierarchy.fill(hierarchy.mount / bound, limit="1073741824")
    with pytest.raises(NotDelegated, match="has a memory limit") as refused:
        place(hierarchy.mount, f"/{SCOPE}", root=True)
    assert "systemd-run --scope -p Delegate=yes" in refused.value.remedy
    hierarchy.delegated.add(scope)
    assert place(hierarchy.mount, f"/{SCOPE}", root=True) == scope, "beneath it they cannot"


def test_a_group_that_is_no_unit_is_taken_where_it_can_be_written(hierarchy: Hierarchy) -> None:
    given = hierarchy.fill(hierarchy.mount / "agents", 11)
    assert place(hierarchy.mount, "/agents", root=False) == given
    hierarchy.refused.add(given / "cgroup.subtree_control")
    with pytest.raises(NotDelegated, match="not writable"):
        place(hierarchy.mount, "/agents", root=False)


def test_a_container_of_its_own_has_processes_at_the_top(hierarchy: Hierarchy) -> None:
    hierarchy.fill(hierarchy.mount, 1, 11)
    assert place(hierarchy.mount, "/", root=True) == hierarchy.mount
    assert hierarchy.pids(hierarchy.mount / PROCESSES) == ["1", "11"]


def test_controllers_that_are_not_there_are_named(hierarchy: Hierarchy) -> None:
    scope = hierarchy.fill(hierarchy.mount / SCOPE)
    hierarchy.delegated.add(scope)
    (scope / "cgroup.controllers").write_text("cpu pids")
    with pytest.raises(NotDelegated, match="has no controller memory"):
        place(hierarchy.mount, f"/{SCOPE}", root=False)


def test_a_group_is_found_by_a_later_life_in_another_unit(tmp_path: Path) -> None:
    kept = TreeV2(str(tmp_path / "run-1.scope")).kept("stoker.x.box_1")
    there = (str(tmp_path / "run-1.scope/stoker.x.box_1"),)
    assert directories_of(TreeV2(str(tmp_path / "run-2.scope")), kept) == there
    assert directories_of(None, kept) == there
    assert TreeV2(str(tmp_path / "run-1.scope")).directories(kept) == there
    v1 = TreeV1({name: f"/{name}" for name in ("freezer", "pids", "cpuacct", "memory")})
    assert directories_of(v1, v1.kept("box"))[0] == "/freezer/box"
    assert directories_of(v1, "") == directories_of(None, "box") == ()


def test_a_group_is_killed_at_once_where_nothing_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, signalled = os.getpid(), list[int]()
    procs, kill = tmp_path / "cgroup.procs", tmp_path / "cgroup.kill"
    procs.write_text(f"{own}\n")
    kill.write_text("")

    def written(path: str, _value: int) -> None:
        Path(path).write_text("1")
        procs.write_text("")

    def signal_sent(pid: int, _number: int) -> None:
        signalled.append(pid)
        procs.write_text("")

    monkeypatch.setattr(cgroups, "_write", written)
    monkeypatch.setattr(os, "kill", signal_sent)
    asyncio.run(cgroups.kill_all((str(tmp_path),)))
    assert (kill.read_text(), signalled) == ("1", [])

    procs.write_text(f"{own}\n")
    kill.unlink()
    asyncio.run(cgroups.kill_all((str(tmp_path),), lambda: frozenset({1})))
    assert signalled == [own], "the server of a warm box is in its group, and lives on"
    assert not kill.exists()
