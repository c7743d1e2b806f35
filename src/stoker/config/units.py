"""Durations and sizes as people write them: ``30s``, ``5m``, ``512MiB``; plain numbers too."""

from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

from stoker.model.given import SECONDS, scaled

_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def seconds(value: object) -> object:
    """Return ``"1.5s"`` as 1.5; anything but a string is left to the validator."""
    return scaled(value, SECONDS)


def size_bytes(value: object) -> object:
    """Return ``"512MiB"`` as 536870912; anything but a string is left to the validator."""
    size = scaled(value, _BYTES)
    return int(size) if isinstance(size, float) and size.is_integer() else size


Duration = Annotated[float, BeforeValidator(seconds), Field(gt=0, allow_inf_nan=False)]
"""Seconds, more than zero."""
Size = Annotated[int, BeforeValidator(size_bytes), Field(gt=0)]
"""Bytes, more than zero."""


def duration_text(value: float) -> str:
    """Return seconds as people write them: ``0.2`` → ``200ms``, ``1800`` → ``30m``."""
    for unit, scale in sorted(SECONDS.items(), key=lambda item: -item[1]):
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
