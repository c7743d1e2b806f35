"""How a program ends: a score, a truncation, or a fault, turned into a ``ProgramOutcome``.

Invariant: a reward leaves this module only when the program returned a finite number.
"""

import math
import numbers
import traceback
from typing import NoReturn

import msgspec

from stoker.errors import ForeignAwaitable, ProgramRaised, RewardInvalid, StokerError
from stoker.model.tools import Verdict
from stoker.rollout.messages import ProgramOutcome
from stoker.rollout.position import raised_at

_TRACE_CHARACTERS = 2000
_SHOWN_CHARACTERS = 200


class Score(msgspec.Struct, frozen=True):
    """What a rollout program returns."""

    reward: float
    """Finite; larger is better."""
    metrics: dict[str, float] = {}
    """Further figures, kept with the outcome."""


class Truncated(BaseException):
    """Ends the rollout as truncated; ``except Exception`` lets it pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def truncate(reason: str) -> NoReturn:
    """End the rollout as ``truncated(reason)``: cut by a limit, no reward."""
    raise Truncated(reason)


def outcome_of_return(returned: object) -> ProgramOutcome:
    """Return the outcome of a program that returned ``returned``."""
    metrics: dict[str, float] = {}
    reward: object = returned
    if isinstance(returned, Score):
        reward, metrics = returned.reward, returned.metrics
    elif isinstance(returned, Verdict):
        reward, metrics = float(returned.passed), {"passed": float(returned.passed)}
    number = _finite(reward)
    if number is None:
        return _invalid(f"the program returned {_shown(reward)}, which is no finite score")
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        figure = _finite(value)
        if figure is None or not isinstance(name, str):
            return _invalid(f"the metric {_shown(name)} is {_shown(value)}, no finite number")
        figures[name] = figure
    return ProgramOutcome(reward=number, metrics=figures)


def outcome_of_error(raised: BaseException, file: str) -> ProgramOutcome:
    """Return the outcome of a program that ended with ``raised``; ``file`` is its source."""
    if isinstance(raised, Truncated):
        reason = _sendable(str(raised.reason)[:_TRACE_CHARACTERS])
        return ProgramOutcome(truncated=reason or "ended by the program")
    known = stoker_error_in(raised)
    if known is not None:
        return ProgramOutcome(fault=known.record())
    return ProgramOutcome(fault=_raised(raised, file).record())


def stoker_error_in(raised: BaseException) -> StokerError | None:
    """Return the error of ours in ``raised``; TaskGroup and anyio wrap it in groups."""
    if isinstance(raised, StokerError):
        return raised
    if isinstance(raised, BaseExceptionGroup):
        found = [error for part in raised.exceptions if (error := stoker_error_in(part))]
        foreign = [error for error in found if isinstance(error, ForeignAwaitable)]
        return next(iter(foreign or found), None)
    return None


def _raised(raised: BaseException, file: str) -> StokerError:
    where = raised_at(raised.__traceback__, file)
    trace = "".join(traceback.format_exception(raised))[-_TRACE_CHARACTERS:]
    what = f"{type(raised).__name__}: {raised}"[:_TRACE_CHARACTERS]
    if isinstance(raised, RuntimeError) and "asyncio.run()" in str(raised):
        return ForeignAwaitable(
            f"the program called asyncio.run() at {where}; it is already running: "
            "await its coroutine directly, or use ctx.local(fn) for code with a loop of its own"
        )
    return ProgramRaised(
        _sendable(f"the program raised {what} at {where}; the rollout failed"),
        trace=_sendable(trace),
    )


def _sendable(text: str) -> str:
    """Return ``text`` with lone surrogates spelled out: they have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _finite(value: object) -> float | None:
    if not isinstance(value, numbers.Real):  # numpy's scalars are, tensors are not
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    try:
        return _sendable(repr(value)[:_SHOWN_CHARACTERS])
    except Exception:  # noqa: BLE001 - boundary: a repr of the program's own class
        return f"a {type(value).__name__}"


def _invalid(what: str) -> ProgramOutcome:
    error = RewardInvalid(
        f"{what}; the rollout failed; return stoker.Score, a finite number, a bool or a Verdict"
    )
    return ProgramOutcome(fault=error.record())
