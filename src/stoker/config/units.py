"""Durations and sizes as people write them: ``30s``, ``5m``, ``512MiB``; plain numbers too."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*")


def seconds(value: object) -> object:
    """Return ``"1.5s"`` as 1.5; anything but a string is left to the validator."""
    return _scaled(value, _SECONDS)


def size_bytes(value: object) -> object:
    """Return ``"512MiB"`` as 536870912; anything but a string is left to the validator."""
    scaled = _scaled(value, _BYTES)
    return int(scaled) if isinstance(scaled, float) and scaled.is_integer() else scaled


def _scaled(value: object, units: dict[str, float] | dict[str, int]) -> object:
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] not in units:
        raise ValueError(f"{value!r} is no quantity; write a number with one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]


Duration = Annotated[float, BeforeValidator(seconds), Field(gt=0, allow_inf_nan=False)]
"""Seconds, more than zero."""
Size = Annotated[int, BeforeValidator(size_bytes), Field(gt=0)]
"""Bytes, more than zero."""


def duration_text(value: float) -> str:
    """Return seconds as people write them: ``0.2`` → ``200ms``, ``1800`` → ``30m``."""
    for unit, scale in sorted(_SECONDS.items(), key=lambda item: -item[1]):
        amount = round(value / scale, 6)  # 0.2 / 0.001 is not quite 200
        if amount >= 1 and amount.is_integer():
            return f"{int(amount)}{unit}"
    return f"{Decimal(repr(value)):f}s"  # never 1e+06


def size_text(value: int) -> str:
    """Return bytes as people write them: ``536870912`` → ``512MiB``."""
    for unit, scale in sorted(_BYTES.items(), key=lambda item: -item[1]):
        if value and value % scale == 0:
            return f"{value // scale}{unit}"
    return f"{value}B"
