"""From the settings of a run to the limits of its ledger.

Whoever needs the owner may start it (coordinator, worker, command line), so all of them must ask
for the same.
"""

from stoker.broker.base import LedgerLimits
from stoker.config.tree import LedgerSettings, WorkerSettings


def limits_of(settings: LedgerSettings, workers: WorkerSettings) -> LedgerLimits:
    """Return the caps, lease lengths and ticket classes that the settings ask for."""
    return LedgerLimits(
        queued_max=settings.queued_max,
        queued_per_class_max=settings.queued_max,
        results_max=settings.results_max,
        outstanding_per_rollout_max=settings.outstanding_per_rollout_max,
        queued_per_run_max=settings.queued_per_run_max,
        leased_per_run_max=settings.leased_per_run_max,
        ticket_classes=workers.ticket_classes,
        lease_seconds=settings.lease,
        grace_seconds=settings.lease,
    )
