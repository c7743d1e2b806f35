"""Reach the ledger of a run that is running, finished or dead; its owner is started when needed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stoker.broker.base import (
    Durability,
    JournalRequest,
    Ledger,
    RolloutsRequest,
    RolloutSummary,
)
from stoker.broker.client import LedgerClient, connect
from stoker.broker.limits import limits_of
from stoker.broker.network import remote_of
from stoker.broker.place import DATABASE, DATABASE_ADDRESS
from stoker.config.classes import ServiceSettings
from stoker.config.tree import LedgerSettings, WorkerSettings
from stoker.coordinator.record import RunDirectory
from stoker.errors import BadInput
from stoker.model.events import JournalEvent, decode_event
from stoker.model.ids import RolloutId, RunId

_PAGE = 1000
_IDLE_EXIT_SECONDS = 5.0


@asynccontextmanager
async def ledger_of(run: RunDirectory) -> AsyncIterator[LedgerClient]:
    """Yield the ledger of ``run``.

    Raises:
        BadInput: the caller's: there is none; asking makes no empty one in its place.
        LedgerUnavailable: it can be neither reached nor started.
    """
    settings = LedgerSettings.model_validate(run.record.settings.get("ledger", {}))
    workers = WorkerSettings.model_validate(run.record.settings.get("workers", {}))
    services = {
        name: ServiceSettings.model_validate(one)
        for name, one in run.record.settings.get("services", {}).items()
    }
    elsewhere = remote_of(settings)
    files = (run.ledger / name for name in (DATABASE, DATABASE_ADDRESS))
    if elsewhere is None and not any(file.exists() for file in files):
        raise BadInput(
            f"there is no ledger in {run.ledger}: run {run.record.run_id} never began, or somebody "
            "took it away; nothing was done"
        )
    # An owner started here serves whoever comes next, so it gets what the run was made with.
    ledger = await connect(
        directory=run.ledger,
        role="cli",
        limits=limits_of(settings, workers, services),
        durability=Durability(settings.durability),
        idle_exit_seconds=_IDLE_EXIT_SECONDS,
        elsewhere=elsewhere,
    )
    try:
        yield ledger
    finally:
        await ledger.close()


async def each_rollout(ledger: Ledger, run_id: RunId) -> AsyncIterator[RolloutSummary]:
    """Yield every rollout of the run in order of admission, a page in memory at a time."""
    after: RolloutId | None = None
    while True:
        reply = await ledger.rollouts(RolloutsRequest(run_id=run_id, after=after, limit=_PAGE))
        for summary in reply.rollouts:
            yield summary
        if len(reply.rollouts) < _PAGE:
            return
        after = reply.rollouts[-1].rollout_id


async def all_rollouts(ledger: Ledger, run_id: RunId) -> list[RolloutSummary]:
    """Return every rollout of the run in order of admission."""
    return [summary async for summary in each_rollout(ledger, run_id)]


async def journal_of(ledger: Ledger, run_id: RunId, rollout_id: RolloutId) -> list[JournalEvent]:
    """Return the journal of a rollout."""
    reply = await ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout_id))
    return [decode_event(stored) for stored in reply.events]
