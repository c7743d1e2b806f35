"""What the ledger lists of a run's rollouts: how each was admitted, and how it ended."""

from collections.abc import AsyncIterator

from stoker.broker.base import Ledger, RolloutsRequest, RolloutSummary
from stoker.model.events import Admitted, Finished, decode_event
from stoker.model.ids import RolloutId, RunId


async def summaries(ledger: Ledger, run_id: RunId) -> AsyncIterator[RolloutSummary]:
    """Yield every rollout of the run, all partitions', in order of admission."""
    after: RolloutId | None = None
    while True:
        page = await ledger.rollouts(RolloutsRequest(run_id=run_id, after=after))
        for summary in page.rollouts:
            yield summary
        if not page.rollouts:
            return
        after = page.rollouts[-1].rollout_id


def admitted_of(summary: RolloutSummary) -> Admitted:
    """Return how the rollout was admitted."""
    admitted = decode_event(summary.first)
    assert isinstance(admitted, Admitted), "a journal begins with its admission"
    return admitted


def finished_of(summary: RolloutSummary) -> Finished | None:
    """Return how it ended; ``None``: it has not."""
    if summary.last is None:
        return None
    finished = decode_event(summary.last)
    assert isinstance(finished, Finished), "a finished journal ends with its outcome"
    return finished
