"""Read the settings: defaults < TOML files < ``STOKER_…`` < ``--set``, with the origin of each.

A setting that is unknown or cannot be used is refused whole, with where it was written, what was
given and what is allowed; nothing is guessed or ignored. In the environment two underscores stand
for a dot: ``STOKER_WORKERS__CLASSES__FAST__SLOTS=4``.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from stoker.config import keys
from stoker.config.refusal import not_a_table, refused, unknown
from stoker.config.toml_lines import key_lines, line_of
from stoker.config.tree import Settings
from stoker.errors import ConfigInvalid
from stoker.model.value import canonical_digest

DEFAULT_ORIGIN = "default"
_PREFIX = "STOKER_"
_SET_ORIGIN = "--set"


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one run, and where each came from."""

    settings: Settings
    origins: dict[str, str]
    """Dotted key → ``default``, ``stoker.toml:12``, ``STOKER_RUN__SEED`` or ``--set``."""
    digest: str
    """Of every value; secrets are left out."""


class Given(msgspec.Struct, frozen=True):
    """One value somebody wrote."""

    path: keys.Path
    value: Any
    origin: str


def load_settings(
    files: Sequence[Path] = (), environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> Resolved:
    """Return the resolved settings; later files win over earlier ones.

    Raises:
        ConfigInvalid: the caller's: a file cannot be read, or a setting is unknown or unusable.
    """
    given: list[Given] = []
    for file in files:
        given += from_file(file)
    given += from_environment(environ or {})
    given += from_sets(sets)
    return resolve(given)


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process; nothing else in Stoker reads settings from it."""
    return os.environ


def resolve(given: Iterable[Given]) -> Resolved:
    """Return the defaults overlaid with ``given`` in order.

    Raises:
        ConfigInvalid: a value cannot be used.
    """
    tree: dict[str, Any] = Settings().model_dump(mode="python")
    origins: dict[keys.Path, str] = {}
    for one in given:
        found = keys.find(one.path)
        if isinstance(found, keys.Unknown):
            raise unknown(found, one.origin)
        if (found.entries or found.model is not None) and not isinstance(one.value, dict):
            raise not_a_table(one.path, one.value, one.origin)
        _place(tree, one)
        origins[one.path] = one.origin
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise refused(error, origins) from error
    values = flat(settings.model_dump(mode="python"))
    return Resolved(
        settings=settings,
        origins={keys.dotted(path): origin_of(origins, path) for path in values},
        digest=canonical_digest(settings.model_dump(mode="json")),
    )


def origin_of(origins: Mapping[keys.Path, str], path: keys.Path) -> str:
    """Return where the value at ``path`` came from."""
    return origins.get(path, DEFAULT_ORIGIN)


def flat(tree: Mapping[str, Any], above: keys.Path = ()) -> dict[keys.Path, Any]:
    """Return path → value of every leaf; an empty table is a leaf."""
    leaves: dict[keys.Path, Any] = {}
    for name, value in tree.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, path)
        else:
            leaves[path] = value
    return leaves


def from_file(file: Path) -> list[Given]:
    """Return what a TOML file sets, each with its line.

    Raises:
        ConfigInvalid: it cannot be read, or is not TOML.
    """
    try:
        source = file.read_text(encoding="utf-8")
        parsed = tomllib.loads(source)
    except OSError as error:
        raise ConfigInvalid(
            f"The settings file {file} cannot be read: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"The settings file {file} is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{file}:{place[1]}" if place else f"{file}"
        raise ConfigInvalid(f"{where}: not TOML: {error}.") from error
    lines = key_lines(source)
    return [
        Given(path, value, f"{file}:{line_of(lines, path) or '?'}")
        for path, value in flat(parsed).items()
    ]


def from_environment(environ: Mapping[str, str]) -> list[Given]:
    """Return what ``STOKER_…`` variables set; names without two underscores are no settings.

    Raises:
        ConfigInvalid: a variable is a setting spelt with single underscores.
    """
    given = []
    single = {"_".join(key.path).upper(): key.path for key in keys.all_keys()}
    for name in sorted(environ):
        if not name.startswith(_PREFIX):
            continue
        spelt = name.removeprefix(_PREFIX)
        if "__" in spelt:
            path = tuple(part.lower() for part in spelt.split("__"))
            given += _given(path, environ[name], name)
        elif spelt in single:
            right = _PREFIX + "__".join(single[spelt]).upper()
            raise ConfigInvalid(f"{name} is no setting; two underscores stand for a dot: {right}.")
    return given


def from_sets(sets: Sequence[str]) -> list[Given]:
    """Return what ``--set a.b=1`` options set.

    Raises:
        ConfigInvalid: an option is not of that form.
    """
    given = []
    for text in sets:
        name, equals, value = text.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path):
            raise ConfigInvalid(f"--set {text!r} is not of the form a.b=value.")
        given += _given(path, value.strip(), _SET_ORIGIN)
    return given


def _given(path: keys.Path, text: str, origin: str) -> list[Given]:
    value = _parsed(path, text)
    leaves = flat(value, path) if isinstance(value, dict) and value else {path: value}
    return [Given(leaf, content, origin) for leaf, content in leaves.items()]


def _parsed(path: keys.Path, text: str) -> object:
    """Read ``text`` as a TOML value where the setting is not plain text; else take it literally."""
    key = keys.find(path)
    if isinstance(key, keys.Key) and key.text and not text.startswith(('"', "'")):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    return value if isinstance(value, int | float | bool | str | list | dict) else text


def _place(tree: dict[str, Any], given: Given) -> None:
    node = tree
    for part in given.path[:-1]:
        below = node.setdefault(part, {})
        assert isinstance(below, dict), "only tables have keys below them"
        node = below
    if isinstance(given.value, dict):
        node.setdefault(given.path[-1], {})  # an empty table takes nothing away
    else:
        node[given.path[-1]] = given.value
