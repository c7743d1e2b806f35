"""What can be set: every dotted key of the settings tree, its type, and the nearest known one.

Walks the models of ``tree`` rather than an instance, so that a key is judged before its value.
"""

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stoker.config.secret import Secret
from stoker.config.tree import Settings

Path = tuple[str, ...]

ENTRY = "NAME"
"""Stands for the chosen name of an entry (a worker class, a baseline) in ``all_keys``."""


class Key(msgspec.Struct, frozen=True):
    """One place in the tree."""

    path: Path
    model: type[BaseModel] | None
    """Set for a section: it has keys of its own."""
    entries: bool
    """A table of named entries; their names are free."""
    text: bool
    """A plain text value: what the environment says is taken literally."""
    field: FieldInfo | None


class Unknown(msgspec.Struct, frozen=True):
    """Where a path left the tree."""

    path: Path
    """As given, up to the key that is not known."""
    nearest: Path | None
    known: tuple[str, ...]
    """Keys that exist at that place."""


def find(path: Path) -> Key | Unknown:
    """Return the key at ``path``, or where it left the tree."""
    key = Key((), Settings, entries=False, text=False, field=None)
    for depth, part in enumerate(path):
        child = _child(key, part)
        if child is None:
            return _unknown(path[: depth + 1], key)
        key = child
    return key


def all_keys() -> Iterator[Key]:
    """Yield every key that holds a value, in the order of the tree."""
    yield from _below(Key((), Settings, entries=False, text=False, field=None))


def dotted(path: Path) -> str:
    """Return ``path`` as people write it."""
    return ".".join(path)


def _below(key: Key) -> Iterator[Key]:
    names = [ENTRY] if key.entries else list(key.model.model_fields) if key.model else []
    if not names:
        yield key
    for name in names:
        child = _child(key, name)
        assert child is not None, "a field of the model is a key"
        yield from _below(child)


def _child(key: Key, name: str) -> Key | None:
    if key.entries:
        return Key((*key.path, name), key.model, entries=False, text=key.text, field=key.field)
    if key.model is None or name not in key.model.model_fields:
        return None
    field = key.model.model_fields[name]
    return _described((*key.path, name), field)


def _described(path: Path, field: FieldInfo) -> Key:
    kind = field.annotation
    if typing.get_origin(kind) is dict:
        entry = typing.get_args(kind)[1]
        return Key(path, _section(entry), entries=True, text=entry is str, field=field)
    return Key(path, _section(kind), entries=False, text=_is_text(kind), field=field)


def _section(kind: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_text(kind: Any) -> bool:  # noqa: ANN401 - any annotation
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        return not {str, Secret}.isdisjoint(typing.get_args(kind))
    return kind in {str, Secret}


def _unknown(path: Path, parent: Key) -> Unknown:
    known = tuple(parent.model.model_fields) if parent.model else ()
    close = difflib.get_close_matches(path[-1], known, n=1)
    if close:
        return Unknown(path, (*path[:-1], close[0]), known)
    # The right name in the wrong place: ``slots`` for ``workers.classes.NAME.slots``.
    same = [key.path for key in all_keys() if key.path[-1] == path[-1]]
    whole = difflib.get_close_matches(dotted(path), [dotted(k.path) for k in all_keys()], n=1)
    nearest = same[0] if same else tuple(whole[0].split(".")) if whole else None
    return Unknown(path, nearest, known)
