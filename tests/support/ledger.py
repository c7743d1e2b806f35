"""Ledgers for tests: every engine behind one harness, and the few moves that tests make of it."""

import asyncio
import copy
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    Attach,
    Cancel,
    CancelReply,
    CompleteDisposition,
    CompleteRequest,
    Durability,
    Enroll,
    EventsRequest,
    HeartbeatRequest,
    Held,
    HoldVerdict,
    Lease,
    LeaseRequest,
    Ledger,
    LedgerEvent,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    StartRequest,
)
from stoker.broker.client import connect, owner_pid
from stoker.broker.memory import MemoryLedger
from stoker.broker.store_memory import MemoryStore
from stoker.broker.store_sqlite import SqliteStore
from stoker.model.action import Action
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId, WorkerId
from stoker.model.value import inline_value
from stoker.seams.clock import Instant

RUN = RunId("run_1")
ROLLOUT = RolloutId("rol_1")
WORKER = WorkerId("wrk_1")
ENGINES = ("memory", "sqlite", "owner")
BOUND_SECONDS = 60.0
"""No test waits longer; how fast it is proves nothing."""


class ManualClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.boot = 1_000.0
        self.wall = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.boot

    def now(self) -> Instant:
        return Instant(self.boot, self.wall)


class Harness:
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
        self.ledger: Ledger

    async def open(self) -> None:
        if self.engine == "owner":
            self.ledger = await connect(
                self.place, role="test", limits=self.limits, idle_exit_seconds=5.0
            )
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
        await self.ledger.close()
        if isinstance(self.store, SqliteStore):
            self.store.close()
        await self.open()

    async def close(self) -> None:
        await self.ledger.close()
        if isinstance(self.store, SqliteStore):
            self.store.close()
        if self.engine == "owner" and (pid := owner_pid(self.place)) is not None:
            os.kill(pid, signal.SIGTERM)

    async def advance(self, seconds: float) -> None:
        """Let time pass on the boot and wall clocks."""
        if not isinstance(self.ledger, MemoryLedger):
            pytest.skip("this engine's clock is the machine's; the same service runs under memory")
        self.clock.boot += seconds
        self.clock.wall += seconds
        self.ledger.tick()

    # --- coordinator's moves

    async def attach(self, incarnation: str = "coordinator-1") -> Fence:
        request = Attach(run_id=self.run, incarnation=incarnation)
        self.fence = (await self.ledger.attach(request)).fence
        return self.fence

    async def beside(self, run: RunId) -> "Harness":
        """Return the same ledger as the coordinator of another run sees it."""
        other = copy.copy(self)
        other.run, other.seqs = run, {}
        await other.attach(f"coordinator-of-{run}")
        return other

    async def append(
        self,
        *submits: Action,
        events: tuple[bytes, ...] = (b"event",),
        acknowledges: tuple[ActionId, ...] = (),
        rollout: RolloutId = ROLLOUT,
        finished: bool = False,
    ) -> AppendBatchReply:
        seq = self.seqs.get(rollout, 0)
        one = Append(
            rollout_id=rollout,
            expected_seq=seq,
            events=events,
            submits=submits,
            acknowledges=acknowledges,
            finished=finished,
        )
        batch = AppendBatch(run_id=self.run, fence=self.fence, appends=(one,))
        reply = await self.ledger.append(batch)
        self.seqs[rollout] = reply.replies[0].seq
        return reply

    async def submit(self, *actions: Action) -> list[str]:
        reply = await self.append(*actions)
        return [str(disposition) for disposition in reply.replies[0].submits]

    async def acknowledge(self, *ids: ActionId) -> None:
        await self.append(events=(b"applied",), acknowledges=ids)

    async def events(self, after: int = 0, wait: float = 0.0) -> list[LedgerEvent]:
        request = EventsRequest(run_id=self.run, fence=self.fence, after=after, wait_seconds=wait)
        return list((await self.ledger.events(request)).events)

    async def completed(self) -> dict[ActionId, Completion]:
        """Return every result that waits to be acknowledged, each once (I2, I8)."""
        found: dict[ActionId, Completion] = {}
        for event in await self.events():
            if event.kind is LedgerEventKind.COMPLETED:
                assert event.completion is not None
                assert event.action_id not in found, f"{event.action_id} completed twice"
                found[event.action_id] = event.completion
        return found

    async def cancel(self, *ids: ActionId) -> CancelReply:
        request = Cancel(run_id=self.run, fence=self.fence, action_ids=ids, reason="test")
        return await self.ledger.cancel(request)

    # --- worker's moves

    async def enroll(self, worker: WorkerId = WORKER, slots: int = 64, **more: Any) -> None:
        await self.ledger.enroll(
            Enroll(worker_id=worker, name=str(worker), slots={"fast": slots}, **more)
        )

    async def lease(self, worker: WorkerId = WORKER, slots: int = 64) -> list[Lease]:
        request = LeaseRequest(worker_id=worker, slots={"fast": slots})
        return list((await self.ledger.lease(request)).leases)

    async def start(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        request = StartRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.start(request)).verdicts)

    async def heartbeat(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        request = HeartbeatRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.heartbeat(request)).verdicts)

    async def release(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        request = ReleaseRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.release(request)).verdicts)

    async def complete(
        self, *leases: Lease, worker: WorkerId = WORKER, said: bytes = b"done"
    ) -> list[CompleteDisposition]:
        results = tuple(
            Completion(
                action_id=lease.action.action_id,
                fence=lease.fence,
                status=CompletionStatus.OK,
                worker_id=worker,
                observation=inline_value(said),
            )
            for lease in leases
        )
        request = CompleteRequest(worker_id=worker, completions=results)
        return list((await self.ledger.complete(request)).dispositions)


def held(*leases: Lease) -> tuple[Held, ...]:
    return tuple(Held(lease.action.action_id, lease.fence) for lease in leases)


def act(number: int) -> ActionId:
    return ActionId(f"act_{number:04}")


def action(number: int, said: bytes = b"input", **more: Any) -> Action:
    fields: dict[str, Any] = {
        "action_id": act(number),
        "run_id": RUN,
        "rollout_id": ROLLOUT,
        "path": CallPath(str(number)),
        "step": 0,
        "worker_class": "fast",
        "tool": "call",
        "input": inline_value(said),
        "timeout_seconds": 30.0,
        "deadline_seconds": 600.0,
    }
    return Action(**{**fields, **more})


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
