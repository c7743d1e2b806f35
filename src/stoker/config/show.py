"""The settings as people read them: each value with its unit and its origin.

Secrets print as dots. The texts are valid TOML values, so that a line can be copied into a file.
"""

from typing import Any

import msgspec

from stoker.config import keys
from stoker.config.load import Resolved, flat
from stoker.config.secret import DOTS, Secret
from stoker.config.units import Duration, Size, duration_text, size_text


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as shown."""

    key: str
    value: str
    """As TOML; ``unset`` where there is none."""
    origin: str
    meaning: str


def rows(resolved: Resolved) -> list[Row]:
    """Return every setting in the order of the tree."""
    return [
        Row(
            key=keys.dotted(path),
            value=value_text(path, value),
            origin=resolved.origins[keys.dotted(path)],
            meaning=meaning(path),
        )
        for path, value in flat(resolved.settings.model_dump(mode="python")).items()
    ]


def meaning(path: keys.Path) -> str:
    """Return what the setting at ``path`` means, in one line."""
    key = keys.find(path)
    field = key.field if isinstance(key, keys.Key) else None
    return " ".join((field.description or "").split()) if field else ""


def value_text(path: keys.Path, value: object) -> str:
    """Return ``value`` of the setting at ``path`` as TOML, durations and sizes with their unit."""
    key = keys.find(path)
    if isinstance(key, keys.Key) and key.field is not None and isinstance(value, int | float):
        if _is(key.field.metadata, Duration):
            return f'"{duration_text(float(value))}"'
        if _is(key.field.metadata, Size):
            return f'"{size_text(int(value))}"'
    return toml_text(value)


def toml_text(value: object) -> str:
    """Return ``value`` as TOML."""
    match value:
        case None:
            return "unset"
        case Secret():
            return f'"{DOTS}"'
        case bool() | int() | float():
            return str(value).lower()
        case dict():
            inside = ", ".join(f"{name} = {toml_text(v)}" for name, v in value.items())
            return f"{{ {inside} }}" if inside else "{}"
        case list() | tuple():
            return f"[{', '.join(toml_text(item) for item in value)}]"
        case _:
            return msgspec.json.encode(str(value)).decode()


def _is(metadata: list[Any], annotated: Any) -> bool:  # noqa: ANN401 - an Annotated alias
    return annotated.__metadata__[0] in metadata
