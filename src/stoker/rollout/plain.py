"""Plain values at the border of a program: JSON values, what a timeout becomes."""

import math
from typing import Any

from stoker.rollout.arguments import OnTimeout

_DEPTH_MAX = 100


def retry(times: int) -> OnTimeout:
    """Return the ``on_timeout`` that runs a timed-out call up to ``times`` more times."""
    if times < 1:
        raise ValueError(f"retry({times}): at least 1")
    return OnTimeout(kind="retry", times=times)


def on_timeout_of(value: OnTimeout | str) -> OnTimeout:
    """Return what ``value`` means: ``"observe"``, ``"truncate"`` or ``retry(n)``.

    Raises:
        ValueError: none of these.
    """
    if isinstance(value, OnTimeout):
        return value
    if value in {"observe", "truncate"}:
        return OnTimeout(kind=value)
    raise ValueError(
        f"on_timeout={value!r} is none of 'observe', 'truncate' and stoker.retry(times)"
    )


def json_value(value: Any, where: str, depth: int = 0) -> Any:  # noqa: ANN401 - any, by purpose
    """Return ``value`` as JSON would bring it back: tuples as lists, string keys only.

    Raises:
        ValueError: it holds something JSON has no form for; says where.
    """
    if depth > _DEPTH_MAX:
        raise ValueError(f"{where} is nested deeper than {_DEPTH_MAX} or holds itself")
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ValueError(f"{where} is {value}, which JSON has no form for")
    if isinstance(value, list | tuple):
        return [json_value(part, f"{where}[{i}]", depth + 1) for i, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: json_value(part, f"{where}.{key}", depth + 1) for key, part in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}; give JSON values: None, bool, numbers, text, "
        "lists, and dicts with text keys"
    )
