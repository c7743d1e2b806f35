"""A model folder's tokenizer and what stands beside it: templates, specials, ids that end a turn.

Reads files only: ``tokenizer.json``, ``tokenizer_config.json`` and, where they are there,
``chat_template.jinja``, ``special_tokens_map.json``, ``generation_config.json`` and ``config.json``
(the layout of Hugging Face). Nothing is looked up by name anywhere.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from stoker.errors import ConfigInvalid

_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_HUB_FOLDER = "models--"


class FolderFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the small files of a folder say."""

    templates: dict[str, str]
    """Chat templates by name; ``default`` is there."""
    specials: dict[str, str]
    """``bos_token`` and so on, as templates name them."""
    stop_ids: tuple[int, ...]
    """Ids that end generation."""
    names: tuple[str, ...]
    """What the model may be published as, likeliest first."""


class FolderTokenizer:
    """The tokenizer, with the names that the package ``renderers`` calls it by."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, specials: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = ""
        self.unk_token_id = self._special_id(specials, "unk_token")
        self.eos_token_id = self._special_id(specials, "eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of ``text``; a lone surrogate becomes ``?``."""
        clean = text.encode(errors="replace").decode()
        ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:  # noqa: ANN401 - one id or several
        """Return the text of ids; ids that mean nothing are left out."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        known = [one for one in ids if one >= 0]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:  # noqa: ANN401 - the package's protocol
        """Return the id of a token, or of each; the unknown token's where there is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(one) for one in tokens]
        found = self._tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def _special_id(self, specials: dict[str, str], name: str) -> int | None:
        return self._tokenizer.token_to_id(specials[name]) if name in specials else None


def load_folder(folder: Path) -> tuple[FolderTokenizer, FolderFiles]:
    """Read a model folder.

    Raises:
        ConfigInvalid: no such folder, or no tokenizer or chat template in it that can be read.
    """
    if not folder.is_dir():
        raise ConfigInvalid(f"there is no model folder {folder}; nothing was started")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigInvalid(
            f"the model folder {folder} holds no tokenizer.json; nothing was started. Save it "
            "there with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    loaded = _read(path)
    config = _json(folder, "tokenizer_config.json")
    specials = _specials(_json(folder, "special_tokens_map.json") | config)
    tokenizer = FolderTokenizer(loaded, specials)
    model = _json(folder, "config.json")
    files = FolderFiles(
        templates=_templates(folder, config),
        specials=specials,
        stop_ids=_stop_ids(_json(folder, "generation_config.json"), model, tokenizer),
        names=_names(folder, config, model),
    )
    return tokenizer, files


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ConfigInvalid(
            f"{path} is no tokenizer that can be read ({error}); nothing was started"
        ) from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    said = config.get("chat_template")
    if isinstance(said, list):
        found = {one["name"]: one["template"] for one in said if isinstance(one, dict)}
    else:
        found = {"default": said} if isinstance(said, str) else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    if "default" not in found:
        raise ConfigInvalid(
            f"the model folder {folder} holds no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json); nothing was started. A base model has none: "
            "put the template you train with into chat_template.jinja"
        )
    return found


def _specials(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIALS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _stop_ids(
    generation: dict[str, Any], model: dict[str, Any], tokenizer: FolderTokenizer
) -> tuple[int, ...]:
    said = generation.get("eos_token_id", model.get("eos_token_id"))
    ids = said if isinstance(said, list) else [said]
    return tuple({one for one in [*ids, tokenizer.eos_token_id] if type(one) is int})


def _names(folder: Path, config: dict[str, Any], model: dict[str, Any]) -> tuple[str, ...]:
    parts = folder.absolute().parts
    hub = [part.removeprefix(_HUB_FOLDER) for part in parts if part.startswith(_HUB_FOLDER)]
    said = [model.get("_name_or_path"), config.get("name_or_path"), "/".join(parts[-2:])]
    found = [one.replace("--", "/") for one in hub] + [one for one in said if isinstance(one, str)]
    return tuple(dict.fromkeys(found))


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigInvalid(f"{path} is not JSON ({error}); nothing was started") from error
    if not isinstance(found, dict):
        raise ConfigInvalid(f"{path} is no JSON object; nothing was started")
    return found
