"""Engines as the contract suite drives them: ours, and the pattern for anybody's.

A class with ``open`` and ``close``, made with the limits to keep and an empty directory of its own.
``crash`` (die without a word, come back over what was stored) and ``advance`` (let time pass
without waiting) are what most promises are about; cases that need what an engine lacks are told as
*not shown*.
"""

from pathlib import Path
from typing import Protocol

from stoker.broker.base import Durability, Ledger, LedgerLimits
from stoker.broker.memory import MemoryLedger
from stoker.broker.store import Store
from stoker.broker.store_memory import MemoryStore
from stoker.broker.store_sqlite import SqliteStore
from stoker.seams.clock import Instant


class Engine(Protocol):
    """A ledger's engine under examination: one fresh ledger, made, used, crashed, ended."""

    async def open(self) -> Ledger:
        """Start the engine; return a client of it."""
        ...

    async def close(self) -> None:
        """End it and leave nothing behind."""
        ...


class CrashingEngine(Engine, Protocol):
    """One that can be killed."""

    async def crash(self) -> Ledger:
        """Kill it without a word and start it again over what it had stored."""
        ...


class TimedEngine(Engine, Protocol):
    """One whose clock can be moved."""

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        ...


class ManualClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.boot = 1_000.0
        self.wall = 1_700_000_000.0

    def monotonic(self) -> float:
        """Return the boot clock."""
        return self.boot

    def now(self) -> Instant:
        """Return this moment."""
        return Instant(self.boot, self.wall)


class MemoryEngine:
    """The in-memory engine; a crash keeps the store, as if that were another process."""

    def __init__(self, limits: LedgerLimits, place: Path) -> None:
        self._limits = limits
        self._place = place
        self._clock = ManualClock()
        self._store: Store | None = None
        self._ledger: MemoryLedger

    async def open(self) -> Ledger:
        """Open the ledger in this process."""
        self._store = self._opened()
        self._ledger = MemoryLedger(self._limits, self._clock, self._store, self._durability())
        return self._ledger

    async def crash(self) -> Ledger:
        """Forget everything but the store."""
        await self.close()
        return await self.open()

    async def advance(self, seconds: float) -> None:
        """Move both clocks."""
        self._clock.boot += seconds
        self._clock.wall += seconds
        self._ledger.tick()

    async def close(self) -> None:
        """Let go of the store."""
        await self._ledger.close()

    def _opened(self) -> Store:
        return self._store or MemoryStore()

    def _durability(self) -> Durability:
        return Durability.MEMORY


class SqliteEngine(MemoryEngine):
    """The embedded engine's rows and decisions over its database, without its process."""

    async def close(self) -> None:
        """Let go of the database."""
        await super().close()
        assert self._store is not None, "closed before it was opened"
        self._store.close()

    def _opened(self) -> Store:
        return SqliteStore(self._place / "ledger.db")

    def _durability(self) -> Durability:
        return Durability.POWER_SAFE
