"""What a test does with a ledger: the moves of a coordinator and of workers, one call each.

Shipped, since whoever writes an engine is held to the same suite (``stoker conformance``).
"""

import copy
from typing import Any, Self

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    Attach,
    Cancel,
    CancelReply,
    CompleteDisposition,
    CompleteRequest,
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
    ReleaseRequest,
    StartRequest,
)
from stoker.model.action import Action
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId, WorkerId
from stoker.model.value import Value, inline_value

RUN = RunId("run_1")
ROLLOUT = RolloutId("rol_1")
WORKER = WorkerId("wrk_1")


class NotShown(Exception):
    """The engine cannot be brought into the state that a promise speaks of."""


class LedgerMoves:
    """One ledger, its coordinator's fence, and its rollouts' positions."""

    ledger: Ledger

    def __init__(self) -> None:
        self.run = RUN
        self.fence = Fence(0)
        self.seqs: dict[RolloutId, int] = {}

    async def crash(self) -> None:
        """Let the engine's process die and another take its place."""
        raise NotShown("this engine cannot be killed from outside")

    async def advance(self, seconds: float) -> None:
        """Let time pass on the boot and wall clocks."""
        raise NotShown(f"this engine's clock cannot be moved, by {seconds} s or at all")

    # --- coordinator's moves

    async def attach(self, incarnation: str = "coordinator-1") -> Fence:
        """Own the run, as this incarnation of a coordinator."""
        request = Attach(run_id=self.run, incarnation=incarnation)
        self.fence = (await self.ledger.attach(request)).fence
        return self.fence

    async def beside(self, run: RunId) -> Self:
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
        """Write a rollout's next entries."""
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
        """Submit actions; return what became of each."""
        reply = await self.append(*actions)
        return [str(disposition) for disposition in reply.replies[0].submits]

    async def acknowledge(self, *ids: ActionId) -> None:
        """Apply results: the ledger may forget them."""
        await self.append(events=(b"applied",), acknowledges=ids)

    async def events(self, after: int = 0, wait: float = 0.0) -> list[LedgerEvent]:
        """Return what the coordinator is told after event ``after``."""
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
        """End actions."""
        request = Cancel(run_id=self.run, fence=self.fence, action_ids=ids, reason="test")
        return await self.ledger.cancel(request)

    # --- worker's moves

    async def enroll(self, worker: WorkerId = WORKER, slots: int = 64, **more: Any) -> None:  # noqa: ANN401 - any field
        """Introduce a worker."""
        await self.ledger.enroll(
            Enroll(worker_id=worker, name=str(worker), slots={"fast": slots}, **more)
        )

    async def lease(self, worker: WorkerId = WORKER, slots: int = 64) -> list[Lease]:
        """Ask for work once."""
        request = LeaseRequest(worker_id=worker, slots={"fast": slots})
        return list((await self.ledger.lease(request)).leases)

    async def start(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        """Ask to begin."""
        request = StartRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.start(request)).verdicts)

    async def heartbeat(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        """Show a sign of life."""
        request = HeartbeatRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.heartbeat(request)).verdicts)

    async def release(self, *leases: Lease, worker: WorkerId = WORKER) -> list[HoldVerdict]:
        """Give leases back."""
        request = ReleaseRequest(worker_id=worker, held=held(*leases))
        return list((await self.ledger.release(request)).verdicts)

    async def complete(
        self, *leases: Lease, worker: WorkerId = WORKER, said: bytes | Value = b"done"
    ) -> list[CompleteDisposition]:
        """Hand in results; ``said`` is what each observed."""
        observation = inline_value(said) if isinstance(said, bytes) else said
        results = tuple(
            Completion(
                action_id=lease.action.action_id,
                fence=lease.fence,
                status=CompletionStatus.OK,
                worker_id=worker,
                observation=observation,
            )
            for lease in leases
        )
        request = CompleteRequest(worker_id=worker, completions=results)
        return list((await self.ledger.complete(request)).dispositions)


def held(*leases: Lease) -> tuple[Held, ...]:
    """Return leases as the ledger is asked about them."""
    return tuple(Held(lease.action.action_id, lease.fence) for lease in leases)


def act(number: int) -> ActionId:
    """Return the id of action ``number``."""
    return ActionId(f"act_{number:04}")


def action(number: int, said: bytes = b"input", **more: Any) -> Action:  # noqa: ANN401 - any field
    """Return action ``number`` of the one rollout; ``more`` overrides its fields."""
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
