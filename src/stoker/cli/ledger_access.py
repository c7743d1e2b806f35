"""Reach the ledger of a run that is running, finished or dead; its owner is started when needed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stoker.broker.base import Ledger, RolloutsRequest, RolloutSummary
from stoker.broker.client import connect
from stoker.coordinator.record import RunDirectory
from stoker.model.ids import RolloutId, RunId

_PAGE = 1000


@asynccontextmanager
async def ledger_of(run: RunDirectory) -> AsyncIterator[Ledger]:
    """Yield the ledger of ``run``.

    Raises:
        LedgerUnavailable: it can be neither reached nor started.
    """
    ledger = await connect(directory=run.ledger, role="cli")
    try:
        yield ledger
    finally:
        await ledger.close()


async def all_rollouts(ledger: Ledger, run_id: RunId) -> list[RolloutSummary]:
    """Return every rollout of the run in order of admission."""
    found: list[RolloutSummary] = []
    after: RolloutId | None = None
    while True:
        reply = await ledger.rollouts(RolloutsRequest(run_id=run_id, after=after, limit=_PAGE))
        found += reply.rollouts
        if len(reply.rollouts) < _PAGE:
            return found
        after = reply.rollouts[-1].rollout_id
