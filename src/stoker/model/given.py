"""What callers give, checked once and brought to the form that records hold.

Programs, the public box API and the settings take the same durations, arguments and files; each
refusal is a ``ValueError`` that the caller of these turns into its own kind.
"""

import math
import re
from collections.abc import Mapping, Sequence

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*")


def scaled(value: object, units: Mapping[str, float]) -> object:
    """Return text like ``"1.5s"`` as a number by ``units``; anything but text as it is.

    Raises:
        ValueError: text without a number, or with another unit.
    """
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] not in units:
        raise ValueError(f"{value!r} is no quantity; write a number with one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def duration(value: float | str, what: str) -> float:
    """Return ``value`` in seconds; text has a unit (``"10s"``).

    Raises:
        ValueError: no duration, or less than 0.
    """
    number = scaled(value, SECONDS)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{what}={value!r} is no duration; write seconds or text like '10s'")  # noqa: TRY004 - one kind of refusal
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{what}={value!r} is no duration; it must be finite and at least 0")
    return float(number)


def argv_of(argv: Sequence[str]) -> tuple[str, ...]:
    """Return ``argv`` as a tuple of text.

    Raises:
        ValueError: a bare string, empty, or a part that is no text.
    """
    if isinstance(argv, str | bytes):
        raise ValueError(f'{argv!r:.60} is one string; give a list, or ["sh", "-c", …]')  # noqa: TRY004 - one kind of refusal
    parts = tuple(argv)
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{parts!r:.100} is no list of strings with at least one")
    return parts


def contents_of(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """Return ``files`` with text as UTF-8.

    Raises:
        ValueError: a path is no text, or a content neither text nor bytes.
    """
    made: dict[str, bytes] = {}
    for path, content in files.items():
        if not isinstance(path, str) or not isinstance(content, str | bytes | bytearray):
            raise ValueError(  # noqa: TRY004 - one kind of refusal
                f"files maps paths to text or bytes; {path!r:.100} maps to a "
                f"{type(content).__name__}"
            )
        made[path] = content.encode() if isinstance(content, str) else bytes(content)
    return made
