"""Holds a foreign engine to the contract: which invariants it keeps, which break, and where.

Every case runs against a fresh ledger in a directory of its own, bounded in time; one that breaks
or hangs costs the others nothing.
"""

import asyncio
import linecache
import tempfile
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from stoker.broker.base import Capabilities, LedgerLimits
from stoker.testing.engines import CrashingEngine, Engine, TimedEngine
from stoker.testing.ledger_contract import CASES, Case
from stoker.testing.ledger_moves import LedgerMoves, NotShown

CASE_SECONDS = 60.0
MakeEngine = Callable[[LedgerLimits, Path], Engine]


class Verdict(StrEnum):
    """What became of one promise."""

    KEPT = "kept"
    BROKEN = "broken"
    """It did otherwise, raised, or gave no answer in time."""
    NOT_SHOWN = "not shown"
    """The engine cannot be crashed, or its time moved, from outside."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    invariant: str
    promise: str
    verdict: Verdict
    why: str = ""
    """The line that failed and what was seen."""


class Conformance(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine keeps."""

    engine: str
    capabilities: Capabilities | None
    """What it says of itself; ``None`` when it could not even be asked."""
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> int:
        """Promises that broke."""
        return sum(finding.verdict is Verdict.BROKEN for finding in self.findings)


class _Driven(LedgerMoves):
    """The contract's moves on a foreign engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    async def begin(self) -> None:
        """Open, attach, enroll one worker."""
        self.ledger = await self._engine.open()
        await self.attach()
        await self.enroll()

    async def crash(self) -> None:
        """Crash the engine, where it can be."""
        crash = getattr(self._engine, "crash", None)
        if crash is None:
            raise NotShown("the engine has no crash()")
        engine: CrashingEngine = self._engine  # type: ignore[assignment]
        self.ledger = await engine.crash()

    async def advance(self, seconds: float) -> None:
        """Move the engine's time, where it can be."""
        if getattr(self._engine, "advance", None) is None:
            raise NotShown("the engine has no advance()")
        engine: TimedEngine = self._engine  # type: ignore[assignment]
        await engine.advance(seconds)


async def examine(
    make: MakeEngine, name: str, cases: Sequence[Case] = CASES, seconds: float = CASE_SECONDS
) -> Conformance:
    """Try every case on engines that ``make`` makes; ``seconds`` bound each."""
    capabilities = await _capabilities(make, seconds)
    return Conformance(
        engine=name,
        capabilities=capabilities,
        findings=tuple([await _tried(make, case, seconds) for case in cases]),
    )


async def _capabilities(make: MakeEngine, seconds: float) -> Capabilities | None:
    with tempfile.TemporaryDirectory(prefix="stoker-conformance-") as place:
        engine = make(LedgerLimits(), Path(place))
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await (await engine.open()).capabilities()
                finally:
                    await engine.close()
        except Exception:  # noqa: BLE001 - a boundary: what is wrong is told case by case
            return None


async def _tried(make: MakeEngine, case: Case, seconds: float) -> Finding:
    verdict, why = Verdict.KEPT, ""
    with tempfile.TemporaryDirectory(prefix="stoker-conformance-") as place:
        engine = make(case.limits, Path(place))
        driven = _Driven(engine)
        try:
            async with asyncio.timeout(seconds):
                try:
                    await driven.begin()
                    await case.scenario(driven)
                finally:
                    await engine.close()
        except NotShown as lacking:
            verdict, why = Verdict.NOT_SHOWN, str(lacking)
        except TimeoutError:
            verdict, why = Verdict.BROKEN, f"no answer within {seconds:g} s"
        except Exception as error:  # noqa: BLE001 - a boundary: a foreign engine may raise anything
            verdict, why = Verdict.BROKEN, _where(error)
    return Finding(invariant=case.invariant, promise=case.promise, verdict=verdict, why=why)


def _where(error: Exception) -> str:
    """Name the contract's line that failed, its text, and what was raised there."""
    contract = CASES[0].scenario.__code__.co_filename
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == contract]
    said = f": {error}" if str(error) else ""
    raised = "" if isinstance(error, AssertionError) else f" raised {type(error).__name__}"
    if not frames:
        return f"before the case began{raised}{said}"
    line = linecache.getline(contract, frames[-1].lineno or 0).strip()
    return f"{Path(contract).name}:{frames[-1].lineno} `{line}`{raised}{said}"
