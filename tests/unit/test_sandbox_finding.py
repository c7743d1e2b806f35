"""Programs are found ahead only where nothing else could be found inside."""

from pathlib import Path

import pytest

from stoker.sandbox import finding
from stoker.sandbox.finding import find
from stoker.sandbox.runtime import RuntimeFiles

ELF = b"\x7fELF and the rest"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeFiles:
    for folder in ("python/bin", "local", "system", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(finding, "_BEFORE", (str(tmp_path / "local"),))
    monkeypatch.setattr(finding, "_SYSTEM", (str(tmp_path / "system"),))
    monkeypatch.setattr(finding, "_TOP", str(tmp_path / "system"))
    return RuntimeFiles(
        launcher=None, launcher_missing="", python=tmp_path / "python", scripts=tmp_path,
        etc=tmp_path, egress=tmp_path, roots=Path("/nowhere"), baselines=tmp_path, key="",
    )  # fmt: skip


def program(path: Path, content: bytes = ELF, mode: int = 0o755) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_binary_of_the_system_is_found(files: RuntimeFiles, tmp_path: Path) -> None:
    there = program(tmp_path / "system" / "tool")
    assert find("tool", files) == str(there)
    (tmp_path / "system" / "linked").symlink_to(there)
    assert find("linked", files) == str(tmp_path / "system" / "linked")


def test_the_baseline_s_own_come_first(files: RuntimeFiles, tmp_path: Path) -> None:
    program(tmp_path / "system" / "python")
    program(tmp_path / "python" / "bin" / "python")
    assert find("python", files) == "/opt/python/bin/python"


def test_what_is_in_doubt_is_left_to_the_box(files: RuntimeFiles, tmp_path: Path) -> None:
    system = tmp_path / "system"
    program(system / "script", b"#!/bin/sh\n")
    program(system / "text", b"echo\n")
    program(system / "private", mode=0o750)
    program(system / "twice")
    program(tmp_path / "local" / "twice")
    (system / "away").symlink_to(program(tmp_path / "elsewhere" / "away"))
    (system / "dangling").symlink_to(tmp_path / "nothing")
    (system / "folder").mkdir()
    names = ["script", "text", "private", "twice", "away", "dangling", "folder", "missing", ""]
    assert [find(name, files) for name in names] == [None] * len(names)


def test_another_path_or_a_place_is_left_to_the_box(files: RuntimeFiles, tmp_path: Path) -> None:
    program(tmp_path / "system" / "tool")
    assert find("tool", files, {"A": "b"}) is not None
    assert find("tool", files, {}, {"PATH": "/workspace"}) is None
    assert find("./tool", files) is None
    assert find(str(tmp_path / "system" / "tool"), files) is None
