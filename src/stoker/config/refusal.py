"""Say why a setting is refused: where it was written, what was given, what is allowed.

One sentence for the first problem, and how many more there are. It turns pydantic's findings and
unknown keys into ``ConfigInvalid``; it judges nothing itself.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from stoker.config import keys
from stoker.errors import ConfigInvalid

_SHOWN_MAX = 80
_BARE = {"extra_forbidden": "is no known key of this table", "missing": "is missing"}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_PATTERNS = {r"^/": "an absolute path", r"^(/.*)?$": "an absolute path"}
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
}


def unknown(found: keys.Unknown, origin: str) -> ConfigInvalid:
    """Return the refusal of a key that does not exist."""
    name = keys.dotted(found.path)
    if found.nearest is not None:
        advice = f"the nearest known one is {keys.dotted(found.nearest)}"
    elif found.known:
        advice = f"known here: {', '.join(sorted(found.known))}"
    else:
        advice = f"{keys.dotted(found.path[:-1])} takes a value, not a table"
    return ConfigInvalid(f"{origin}: unknown setting {name}; {advice}.", setting=name)


def not_a_table(path: keys.Path, value: object, origin: str) -> ConfigInvalid:
    """Return the refusal of a plain value where a table belongs."""
    name = keys.dotted(path)
    return ConfigInvalid(f"{origin}: {name} is {_shown(value)}; it must be a table.", setting=name)


def refused(error: ValidationError, origins: Mapping[keys.Path, str]) -> ConfigInvalid:
    """Return the refusal of values that cannot be used."""
    problems = error.errors(include_url=False)
    first = problems[0]
    location = tuple(str(part) for part in first["loc"])
    path, inside = _setting(location)
    name = keys.dotted(path) + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in inside)
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    sentence = f"{_origin(origins, path)}: {name} {_complaint(first)}.{more}"
    return ConfigInvalid(sentence, setting=keys.dotted(path))


def _setting(location: keys.Path) -> tuple[keys.Path, keys.Path]:
    """Divide pydantic's location into the setting and the place inside its value."""
    for length in range(len(location), 0, -1):
        if isinstance(keys.find(location[:length]), keys.Key):
            return location[:length], location[length:]
    return location, ()


def _origin(origins: Mapping[keys.Path, str], path: keys.Path) -> str:
    """Name who wrote the value: itself, something below it (a section's rule), or above it."""
    if path in origins:
        return origins[path]
    below = [origins[given] for given in origins if given[: len(path)] == path]
    above = [origins[given] for given in origins if path[: len(given)] == given]
    return (below or above or ["settings"])[-1]


def _complaint(problem: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        reason = re.sub(r"^Value error, ", "", problem["msg"])
        return f"cannot be used: {reason}"
    given = f"is {_shown(problem['input'])}"
    if kind in {"enum", "literal_error"}:
        return f"{given}; allowed: {_listed(context['expected'])}"
    if kind in _BARE:
        return _BARE[kind]
    expected = _EXPECTED.get(kind) or _PATTERNS.get(context.get("pattern", ""))
    if expected:
        return f"{given}; it must be {expected}"
    for name, words in _BOUNDS.items():
        if name in context:
            return f"{given}; it must be {words} {context[name]}"
    message = problem["msg"]
    return f"{given}; {message[0].lower()}{message[1:]}"


def _listed(expected: str) -> str:
    return ", ".join(re.findall(r"'([^']*)'", expected)) or expected


def _shown(value: object) -> str:
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, dict):
        text = "a table"
    else:
        text = str(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…"
