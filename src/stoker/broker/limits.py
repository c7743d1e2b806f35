"""From the settings of a run to the limits of its ledger.

Whoever needs the owner may start it (coordinator, worker, command line), so all of them must ask
for the same.
"""

from stoker.broker.base import LedgerLimits
from stoker.broker.spawn import Database
from stoker.config.secret import DOTS, Secret
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


def database_of(settings: LedgerSettings) -> Database | None:
    """Return the PostgreSQL database that is to hold the ledger, or ``None``.

    Settings that were read back from a run's record hold dots instead of the address; then what
    the run's first gateway left in its directory counts.
    """
    if settings.url is None or settings.url == Secret(DOTS):
        return None
    return Database(settings.url, settings.db_schema)
