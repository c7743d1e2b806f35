"""An incomplete model folder is one sentence, exit code 2, and nothing is started."""

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid
from stoker.inference.in_process.folder import check_folder
from stoker.inference.open import open_model


def shard(path: Path, values: int = 4) -> None:
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * values))


def whole(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    names = ("one.safetensors", "two.safetensors")
    for name in names:
        shard(folder / name)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda at: (at / "config.json").unlink(), "holds no config.json"),
    "bad config": (lambda at: (at / "config.json").write_text("{"), "config.json cannot be read"),
    "list config": (lambda at: (at / "config.json").write_text("[]"), "no JSON object"),
    "no weights": (
        lambda at: (at / "model.safetensors.index.json").unlink(), "holds no weights"
    ),
    "no map": (
        lambda at: (at / "model.safetensors.index.json").write_text("{}"), "has no weight_map"
    ),
    "no shard": (lambda at: (at / "two.safetensors").unlink(), "names two.safetensors, which"),
    "cut shard": (lambda at: cut(at / "one.safetensors"), "is cut"),
    "long shard": (
        lambda at: (at / "one.safetensors").write_bytes(
            (at / "one.safetensors").read_bytes() + b"x"
        ), "is cut"
    ),
    "text shard": (
        lambda at: (at / "one.safetensors").write_text("version https://git-lfs.example/spec/v1"),
        "is no safetensors file",
    ),
    "empty shard": (lambda at: (at / "one.safetensors").write_bytes(b""), "no safetensors file"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "holds no tokenizer"),
}  # fmt: skip


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    check_folder(whole(tmp_path / "model"))


@pytest.mark.parametrize(("harm", "said"), HARMS.values(), ids=HARMS)
def test_what_is_missing_is_said(tmp_path: Path, harm: Callable[[Path], object], said: str) -> None:
    folder = whole(tmp_path / "model")
    harm(folder)
    with pytest.raises(ConfigInvalid, match=said) as caught:
        open_model("torch:model", base=tmp_path)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    folder = whole(tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    shard(folder / "model.safetensors")
    check_folder(folder)


def test_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="there is no model folder"):
        open_model("torch:nowhere", base=tmp_path)


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'stoker\[torch,tokens\]'"):
        open_model("torch:model", base=tmp_path)
