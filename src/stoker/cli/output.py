"""Where answers go: one JSON document or a table on stdout, everything said on the way on stderr.

A JSON document is ASCII, so that it is safe on a terminal; integers past 2**53 (fences) are
strings, not-a-number is null, bytes are text where they are UTF-8 and ``{"base64": …}`` else.
"""

import base64
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

JSON_INTEGER_MAX = 2**53
_HISSING = ("ch", "sh", "s", "x")
"""Ends of nouns that take es."""
FENCE = "fence"
"""Always a string, small or not: it passes 2**53 within one ledger's life."""


def answers() -> Console:
    """Return the console for what was asked: stdout; nothing in its texts is taken as markup."""
    return Console(markup=False, highlight=False, emoji=False)


def remarks() -> Console:
    """Return the console for everything else: stderr."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def write_json(value: object) -> None:
    """Write ``value`` as the one document on stdout."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=True, indent=2) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:  # noqa: ANN401 - any record to any JSON value
    """Return ``value`` as JSON values that every reader takes."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value, builtin_types=(bytes,))
    if isinstance(value, Mapping):
        return {
            str(plain(key)): str(inner) if key == FENCE and isinstance(inner, int) else plain(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return _scalar(value)


def _scalar(value: object) -> object:
    match value:
        case None | bool():
            return value
        case int():
            return value if abs(value) <= JSON_INTEGER_MAX else str(value)
        case float():
            return value if math.isfinite(value) else None
        case bytes() | bytearray() | memoryview():
            return _bytes(bytes(value))
        case _:
            return str(value)


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table in the one style of this command line; ``>name`` is right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            header_style="dim",
            no_wrap=right,
            overflow="fold",
        )
    return made


def percent(share: float | None) -> str:
    """Return a share as people read it; an unknown one is a dash."""
    return "-" if share is None else f"{share * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """Return a duration in the unit that fits; an unknown one is a dash."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:  # noqa: PLR2004 - two digits of seconds still read well
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(count: int) -> str:
    """Return a number of bytes in the unit that fits."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:  # noqa: PLR2004 - the next unit
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun, which is given for one."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(_HISSING) else 's'}"


def _bytes(content: bytes) -> object:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
