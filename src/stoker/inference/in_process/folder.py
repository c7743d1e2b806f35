"""Whether a folder holds a whole model, asked before anything is loaded. Needs no torch."""

import json
import struct
from pathlib import Path
from typing import Any

from stoker.errors import ConfigInvalid

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HEADER_BYTES_MAX = 100_000_000


def check_folder(folder: Path, *, tokenizer: bool = True) -> None:
    """Pass when ``folder`` holds config, whole weights and (unless told) a tokenizer.

    Raises:
        ConfigInvalid: the folder is missing or incomplete; the message says what it lacks.
    """
    if not folder.is_dir():
        raise ConfigInvalid(
            f"there is no model folder {folder}; torch: takes a local Hugging Face folder, or "
            "smollm2"
        )
    _object(folder / "config.json")
    for shard in _shards(folder):
        _check_shard(shard)
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigInvalid(
            f"model folder {folder} is incomplete: it holds no tokenizer ({_TOKENIZERS[0]})"
        )


def _shards(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not (folder / _INDEX).is_file():
        raise ConfigInvalid(
            f"model folder {folder} is incomplete: it holds no weights (model.safetensors, or "
            f"{_INDEX} and its shards; pickled weights are not read)"
        )
    names = _object(folder / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigInvalid(f"model folder {folder} is damaged: {_INDEX} has no weight_map")
    shards = [folder / name for name in sorted(set(names.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ConfigInvalid(
            f"model folder {folder} is incomplete: {_INDEX} names {missing[0]}, which is not there"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
        )
    return shards


def _check_shard(path: Path) -> None:
    """Hold a shard's size against its own header: downloads and copies get cut."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _HEADER_BYTES_MAX):
                raise ValueError("a header longer than the file")  # noqa: TRY301 - one message
            header = json.loads(file.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends)
    except (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigInvalid(f"{path} is no safetensors file ({error})") from error
    if size != whole:
        raise ConfigInvalid(f"{path} is cut: it has {size} of {whole} bytes; copy it again")


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigInvalid(
            f"model folder {path.parent} is incomplete: it holds no {path.name}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{path} is no JSON object")
    return value
