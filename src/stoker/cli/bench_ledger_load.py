"""The load of ``stoker bench ledger``: whole cycles through a ledger, from one client process.

A cycle is append (two journal rows and a submit) → lease → start → heartbeat → complete → event →
apply and acknowledge, with 1 KiB of input and of result. As in a run, the acknowledgement of one
action travels with the append that submits the next, and whatever is ready goes in one request.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from stoker.broker.base import (
    Append,
    AppendBatch,
    Attach,
    Cancel,
    CompleteRequest,
    Enroll,
    EventsRequest,
    HeartbeatRequest,
    Held,
    Lease,
    LeaseRequest,
    Ledger,
    LedgerEvent,
    ReleaseRequest,
    StartRequest,
)
from stoker.model.action import Action, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId, WorkerId
from stoker.model.value import Value, inline_value
from stoker.seams.clock import SystemClock
from stoker.seams.entropy import fresh_id

RUN = RunId("run_bench")
CLASS = "fast"
PAYLOAD_BYTES = 1024
ROW_BYTES = 256
_WAIT_SECONDS = 5.0
_DEADLINE_SECONDS = 86_400.0


@dataclass
class Measured:
    """What one load took."""

    cycles: int
    seconds: float
    latencies: list[float] = field(default_factory=list)
    """Append issued to event received, seconds, one a cycle."""

    @property
    def rate(self) -> float:
        """Cycles a second."""
        return self.cycles / self.seconds

    @property
    def latency_p50(self) -> float:
        """Median latency, seconds."""
        return statistics.median(self.latencies)


class Load:
    """One coordinator and one worker of a ledger, each with a connection of its own."""

    def __init__(self, coordinator: Ledger, worker: Ledger, partition: str = "0") -> None:
        self._partition = partition  # loads of different partitions may share a ledger
        self.coordinator = coordinator
        self._worker = worker
        self.worker_id = WorkerId(fresh_id("wrk_"))
        self.fence = Fence(0)
        self._clock = SystemClock()
        self._serial = count()
        self._seqs: dict[RolloutId, int] = {}
        self.told = 0
        """Id of the last event heard."""
        self._input = inline_value(b"i" * PAYLOAD_BYTES)
        self._result = inline_value(b"r" * PAYLOAD_BYTES)
        self._row = b"j" * ROW_BYTES

    async def begin(self, slots: int) -> None:
        """Own the partition, introduce the worker."""
        attach = Attach(run_id=RUN, partition=self._partition, incarnation=fresh_id("crd_"))
        self.fence = (await self.coordinator.attach(attach)).fence
        await self._worker.enroll(
            Enroll(worker_id=self.worker_id, name="bench", slots={CLASS: slots})
        )

    async def cycles(self, total: int, outstanding: int) -> Measured:
        """Pass ``total`` actions through, never more than ``outstanding`` at once."""
        measured = Measured(0, 0.0)
        issued: dict[ActionId, float] = {}
        working = asyncio.create_task(self._work(outstanding))
        began = self._clock.monotonic()
        left = total - outstanding
        rollouts = [self._rollout() for _ in range(outstanding)]
        await self._append([(rollout, None) for rollout in rollouts], issued)
        while measured.cycles < total:
            events = await self._events()
            now = self._clock.monotonic()
            measured.cycles += len(events)
            # What was queued before is passed through as well; only our own is timed.
            mine = [event.action_id for event in events if event.action_id in issued]
            measured.latencies += [now - issued.pop(action_id) for action_id in mine]
            again = [(event.rollout_id, event.action_id) for event in events[: max(0, left)]]
            rest = [(event.rollout_id, event.action_id) for event in events[max(0, left) :]]
            left -= len(again)
            await self._append(again, issued, rest)
        measured.seconds = self._clock.monotonic() - began
        working.cancel()
        await asyncio.wait([working])
        return measured

    async def submit(self, total: int, batch: int) -> float:
        """Queue ``total`` actions and leave them there; return how long it took, seconds."""
        began = self._clock.monotonic()
        for _ in range(0, total, batch):
            rollouts = [self._rollout() for _ in range(batch)]
            await self.coordinator.append(
                AppendBatch(
                    run_id=RUN,
                    partition=self._partition,
                    fence=self.fence,
                    appends=tuple(self._one(one, None) for one in rollouts),
                )
            )
        return self._clock.monotonic() - began

    async def cancelled(self) -> float:
        """Cancel one running action; return how long its worker took to hear of it, seconds."""
        me = self.worker_id
        await self._append([(self._rollout(), None)], {})
        (lease,) = await self.leased(1)
        waiting = asyncio.create_task(
            self._worker.lease(LeaseRequest(worker_id=me, wait_seconds=_WAIT_SECONDS))
        )
        await asyncio.sleep(0)  # its request is on the wire before ours
        began = self._clock.monotonic()
        named = Cancel(
            run_id=RUN,
            partition=self._partition,
            fence=self.fence,
            action_ids=(lease.action.action_id,),
        )
        await asyncio.gather(self.coordinator.cancel(named), waiting)
        seconds = self._clock.monotonic() - began
        assert lease.action.action_id in waiting.result().revoked
        held = (Held(lease.action.action_id, lease.fence),)
        await self._worker.release(ReleaseRequest(worker_id=me, held=held))
        return seconds

    async def leased(self, slots: int) -> tuple[Lease, ...]:
        """Lease and start up to ``slots`` actions."""
        reply = await self._worker.lease(
            LeaseRequest(worker_id=self.worker_id, slots={CLASS: slots}, wait_seconds=_WAIT_SECONDS)
        )
        held = tuple(Held(one.action.action_id, one.fence) for one in reply.leases)
        await self._worker.start(StartRequest(worker_id=self.worker_id, held=held))
        return reply.leases

    async def _events(self) -> tuple[LedgerEvent, ...]:
        reply = await self.coordinator.events(
            EventsRequest(
                run_id=RUN,
                partition=self._partition,
                fence=self.fence,
                after=self.told,
                wait_seconds=_WAIT_SECONDS,
            )
        )
        if reply.events:
            self.told = reply.events[-1].event_id
        return reply.events

    async def _append(
        self,
        again: Sequence[tuple[RolloutId, ActionId | None]],
        issued: dict[ActionId, float],
        rest: Sequence[tuple[RolloutId, ActionId]] = (),
    ) -> None:
        appends = [self._one(rollout, done) for rollout, done in again]
        appends += [self._last(rollout, done) for rollout, done in rest]
        now = self._clock.monotonic()
        issued.update((one.submits[0].action_id, now) for one in appends if one.submits)
        if appends:
            await self.coordinator.append(
                AppendBatch(
                    run_id=RUN, partition=self._partition, fence=self.fence, appends=tuple(appends)
                )
            )

    def _rollout(self) -> RolloutId:
        return RolloutId(f"rol_{self._partition}_{next(self._serial)}")

    def _one(self, rollout: RolloutId, done: ActionId | None) -> Append:
        seq = self._seqs.get(rollout, 0)
        self._seqs[rollout] = seq + 2
        number = next(self._serial)
        action = Action(
            action_id=ActionId(f"act_{self._partition}_{number}"),
            run_id=RUN,
            rollout_id=rollout,
            path=CallPath(str(seq)),
            step=seq,
            worker_class=CLASS,
            tool="call",
            input=self._input,
            effect=Effect.PURE,
            timeout_seconds=60.0,
            deadline_seconds=_DEADLINE_SECONDS,
        )
        return Append(
            rollout_id=rollout,
            expected_seq=seq,
            events=(self._row, self._row),
            submits=(action,),
            acknowledges=(done,) if done is not None else (),
        )

    def _last(self, rollout: RolloutId, done: ActionId) -> Append:
        seq = self._seqs.pop(rollout)
        return Append(
            rollout_id=rollout, expected_seq=seq, events=(self._row,), acknowledges=(done,)
        )

    async def _work(self, slots: int) -> None:
        """Lease, start, say that all is well, complete; ends when cancelled."""
        me = self.worker_id
        while True:
            reply = await self._worker.lease(
                LeaseRequest(worker_id=me, slots={CLASS: slots}, wait_seconds=_WAIT_SECONDS)
            )
            if not reply.leases:
                continue
            held = tuple(Held(one.action.action_id, one.fence) for one in reply.leases)
            await self._worker.start(StartRequest(worker_id=me, held=held))
            await self._worker.heartbeat(HeartbeatRequest(worker_id=me, held=held))
            results = tuple(completion(one, me, self._result) for one in reply.leases)
            await self._worker.complete(CompleteRequest(worker_id=me, completions=results))


def completion(lease: Lease, worker_id: WorkerId, observation: Value) -> Completion:
    """Return a good result of ``lease``."""
    return Completion(
        action_id=lease.action.action_id,
        fence=lease.fence,
        status=CompletionStatus.OK,
        attempt=lease.attempt,
        worker_id=worker_id,
        observation=observation,
    )
