"""What a worker says to the ledger, batched: begin, done, given back.

A finished result is never thrown away for want of contact: it is sent again, under the incarnation
that earned it, until the ledger has decided what it is worth. A result the ledger cannot take is
replaced by a typed fault, so that the action ends.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from structlog.typing import FilteringBoundLogger

from stoker.broker.base import (
    CompleteDisposition,
    CompleteRequest,
    Held,
    HoldVerdict,
    Ledger,
    ReleaseRequest,
    StartRequest,
)
from stoker.errors import (
    InternalError,
    LedgerRefused,
    LedgerStorageFailed,
    LedgerUnavailable,
    StokerError,
    WireViolation,
)
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import WorkerId
from stoker.seams.clock import Clock
from stoker.seams.entropy import jittered
from stoker.seams.faultpoints import declare, reach

from .batches import Batcher

RETRY_SECONDS = 0.25
"""Pause before the ledger is tried again, jittered; its client has tried for a while itself."""

_AGAIN = (LedgerUnavailable, LedgerStorageFailed)
"""Nothing was kept and nothing is wrong with what was sent: away, or its disk is full for now."""

COMPLETE_BEFORE = declare("worker.complete.before", "a batch of results is about to be sent")
COMPLETE_AFTER = declare("worker.complete.after", "the ledger has answered a batch of results")
RELEASE_AFTER = declare("worker.release.after", "the ledger has taken leases back")
STARTED_BEFORE = declare("worker.started.before", "the ledger is about to be asked to begin work")
STARTED_AFTER = declare("worker.started.after", "work may begin, and has not")


class Hold(NamedTuple):
    """One lease of one incarnation."""

    worker_id: WorkerId
    held: Held


class Verdict(NamedTuple):
    """What the ledger said, and when it was asked."""

    verdict: HoldVerdict
    asked_at: float


class Reports:
    """Batched requests of one worker process."""

    def __init__(self, ledger: Ledger, clock: Clock, log: FilteringBoundLogger) -> None:
        self._ledger = ledger
        self._clock = clock
        self._log = log
        self._starts: Batcher[Hold, Verdict] = Batcher(self._send_starts)
        self._completes: Batcher[Completion, CompleteDisposition] = Batcher(self._send_completes)
        self._releases: Batcher[Hold, None] = Batcher(self._send_releases)

    async def start(self, hold: Hold) -> Verdict:
        """Ask whether work may begin.

        Raises:
            LedgerUnavailable: nobody answered; nothing may begin.
        """
        return await self._starts.ask(hold)

    async def complete(self, completion: Completion) -> CompleteDisposition:
        """Hand in a result; returns when the ledger has decided."""
        return await self._completes.ask(completion)

    async def release(self, hold: Hold) -> None:
        """Give back a lease; returns when the ledger knows."""
        await self._releases.ask(hold)

    async def _send_starts(self, holds: list[Hold]) -> list[Verdict]:
        answers: dict[Hold, Verdict] = {}
        for worker_id in _workers(hold.worker_id for hold in holds):
            mine = [hold for hold in holds if hold.worker_id == worker_id]
            reach(STARTED_BEFORE)
            asked_at = self._clock.monotonic()
            reply = await self._ledger.start(
                StartRequest(worker_id=worker_id, held=tuple(hold.held for hold in mine))
            )
            reach(STARTED_AFTER)
            for hold, verdict in zip(mine, reply.verdicts, strict=True):
                answers[hold] = Verdict(verdict, asked_at)
        return [answers[hold] for hold in holds]

    async def _send_releases(self, holds: list[Hold]) -> list[None]:
        for worker_id in _workers(hold.worker_id for hold in holds):
            mine = tuple(hold.held for hold in holds if hold.worker_id == worker_id)
            await self._give_back(ReleaseRequest(worker_id=worker_id, held=mine))
        return [None] * len(holds)

    async def _give_back(self, request: ReleaseRequest) -> None:
        """Send until answered: a lease nobody holds would stay alive with its worker."""
        while True:
            try:
                await self._ledger.release(request)
                reach(RELEASE_AFTER)
            except _AGAIN:
                await asyncio.sleep(jittered(RETRY_SECONDS))
            except StokerError as error:
                self._log.warning("release_refused", leases=len(request.held), error=error.message)
                return
            else:
                return

    async def _send_completes(self, completions: list[Completion]) -> list[CompleteDisposition]:
        answers: dict[tuple[str, int], CompleteDisposition] = {}
        for worker_id in _workers(one.worker_id for one in completions):
            mine = [one for one in completions if one.worker_id == worker_id]
            for one, disposition in zip(mine, await self._hand_in(worker_id, mine), strict=True):
                answers[one.action_id, one.fence] = disposition
        return [answers[one.action_id, one.fence] for one in completions]

    async def _hand_in(
        self, worker_id: WorkerId, completions: list[Completion]
    ) -> Sequence[CompleteDisposition]:
        """Send until decided; results the ledger refuses are sent one by one, then as faults."""
        while True:
            request = CompleteRequest(worker_id=worker_id, completions=tuple(completions))
            try:
                reach(COMPLETE_BEFORE)
                reply = await self._ledger.complete(request)
                reach(COMPLETE_AFTER)
            except (LedgerRefused, WireViolation, InternalError) as error:
                if len(completions) > 1:
                    return [(await self._hand_in(worker_id, [one]))[0] for one in completions]
                refused = completions[0]
                self._log.error("result_refused", action=refused.action_id, error=error.message)
                if refused.status is CompletionStatus.ERROR and refused.observation is None:
                    return [CompleteDisposition.STALE]  # not even the bare fault is wanted
                completions = [_unusable(refused, error)]
            except _AGAIN as error:
                self._log.warning("ledger_unavailable", results=len(completions), error=str(error))
                await asyncio.sleep(jittered(RETRY_SECONDS))
            else:
                return reply.dispositions


def _workers(ids: Iterable[WorkerId | None]) -> list[WorkerId]:
    return [worker for worker in dict.fromkeys(ids) if worker is not None]


def _unusable(completion: Completion, error: StokerError) -> Completion:
    fault = InternalError(
        f"the ledger refused the result of action {completion.action_id}: {error.message}; "
        "the result was thrown away"
    )
    return msgspec.structs.replace(
        completion, status=CompletionStatus.ERROR, observation=None, fault=fault.record()
    )
