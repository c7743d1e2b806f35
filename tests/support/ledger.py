"""Ledgers for tests: every engine behind one harness, and the few moves that tests make of it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.broker.base import (
    Durability,
    Ledger,
    LedgerLimits,
)
from stoker.broker.client import connect, owner_pid
from stoker.broker.memory import MemoryLedger
from stoker.broker.postgres.connection import connect as connect_server
from stoker.broker.postgres.connection import migrate
from stoker.broker.postgres.service import GatewayService
from stoker.broker.postgres.store import PostgresStore
from stoker.broker.store_memory import MemoryStore
from stoker.broker.store_sqlite import SqliteStore
from stoker.model.ids import Fence, RolloutId
from stoker.testing.engines import ManualClock
from stoker.testing.ledger_moves import ROLLOUT, RUN, WORKER, LedgerMoves, act, action, held
from support.postgres import drop_schema, fresh_schema, server

__all__ = [
    "BOUND_SECONDS",
    "ENGINES",
    "ROLLOUT",
    "RUN",
    "WORKER",
    "Harness",
    "ManualClock",
    "act",
    "action",
    "gateway_service",
    "held",
    "with_ledger",
]

ENGINES = ("memory", "sqlite", "owner", "postgres")
BOUND_SECONDS = 60.0
"""No test waits longer; how fast it is proves nothing."""


class Harness(LedgerMoves):
    """One ledger under test, and its coordinator's fence."""

    def __init__(self, engine: str, place: Path, limits: LedgerLimits) -> None:
        self.engine = engine
        self.place = place
        self.limits = limits
        self.clock = ManualClock()
        self.run = RUN
        self.fence = Fence(0)
        self.seqs: dict[RolloutId, int] = {}
        self.store: MemoryStore | SqliteStore | None = None
        self.schema = fresh_schema() if engine == "postgres" else ""
        self.service: GatewayService | None = None
        self.ledger: Ledger

    async def open(self) -> None:
        if self.engine == "owner":
            self.ledger = await connect(
                self.place, role="test", limits=self.limits, idle_exit_seconds=5.0
            )
            return
        if self.engine == "postgres":
            self.service = gateway_service(self.schema, self.limits)
            self.ledger = MemoryLedger(self.limits, self.clock, service=self.service)
            return
        if self.engine == "sqlite":
            self.store = SqliteStore(self.place / "ledger.db")
        elif self.store is None:
            self.store = MemoryStore()
        self.ledger = MemoryLedger(self.limits, self.clock, self.store, Durability.POWER_SAFE)

    async def crash(self) -> None:
        """Let the engine's process die and another take its place."""
        if self.engine == "owner":
            pid = owner_pid(self.place)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)  # the client connects again by itself
            return
        await self._close()
        await self.open()

    async def close(self) -> None:
        await self._close()
        if self.schema:
            drop_schema(server(), self.schema)
        if self.engine == "owner" and (pid := owner_pid(self.place)) is not None:
            os.kill(pid, signal.SIGTERM)

    async def _close(self) -> None:
        await self.ledger.close()
        if isinstance(self.store, SqliteStore):
            self.store.close()
        if self.service is not None:
            self.service.close()

    async def advance(self, seconds: float) -> None:
        """Let time pass on the boot and wall clocks."""
        if not isinstance(self.ledger, MemoryLedger):
            pytest.skip("this engine's clock is the machine's; the same service runs under memory")
        self.clock.boot += seconds
        self.clock.wall += seconds
        self.ledger.tick()


def gateway_service(schema: str, limits: LedgerLimits) -> GatewayService:
    """Return a gateway's verbs in this process, on a test's clock."""
    url = server().url()
    db = connect_server(url, schema)
    migrate(db, schema)
    return GatewayService(PostgresStore(db, schema), limits, Durability.POWER_SAFE)


def with_ledger(
    engine: str,
    place: Path,
    scenario: Callable[[Harness], Awaitable[None]],
    limits: LedgerLimits | None = None,
) -> None:
    """Run ``scenario`` against an attached ledger with one enrolled worker."""

    async def whole() -> None:
        harness = Harness(engine, place, limits or LedgerLimits())
        await harness.open()
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                await harness.attach()
                await harness.enroll()
                await scenario(harness)
        finally:
            await harness.close()

    asyncio.run(whole())
