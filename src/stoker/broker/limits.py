"""From the settings of a run to the limits of its ledger.

Whoever needs the owner may start it (coordinator, worker, command line), so all of them must ask
for the same.
"""

from collections.abc import Mapping
from pathlib import Path

from stoker.broker.base import Capabilities, Durability, LedgerLimits
from stoker.broker.rates import ServiceRate
from stoker.broker.spawn import Database
from stoker.config.classes import ServiceSettings
from stoker.config.secret import DOTS, Secret
from stoker.config.tree import LedgerSettings, WorkerSettings
from stoker.errors import ConfigInvalid


def limits_of(
    settings: LedgerSettings, workers: WorkerSettings, services: Mapping[str, ServiceSettings]
) -> LedgerLimits:
    """Return the caps, lease lengths, ticket classes and rates that the settings ask for."""
    return LedgerLimits(
        queued_max=settings.queued_max,
        queued_per_class_max=settings.queued_max,
        results_max=settings.results_max,
        outstanding_per_rollout_max=settings.outstanding_per_rollout_max,
        queued_per_run_max=settings.queued_per_run_max,
        leased_per_run_max=settings.leased_per_run_max,
        ticket_classes=workers.ticket_classes,
        services={
            name: ServiceRate(rate=one.rate, burst=one.burst or max(1.0, one.rate))
            for name, one in services.items()
        },
        class_services={
            name: one.service for name, one in workers.classes.items() if one.service is not None
        },
        lease_seconds=settings.lease,
        grace_seconds=settings.lease,
    )


def refuse_other(
    offered: Capabilities, limits: LedgerLimits, durability: Durability, place: Path
) -> None:
    """Refuse a ledger that promises less than is asked for, or knows other rates of services.

    Other caps and lease lengths are its own affair; a rate that is silently not kept is not.

    Raises:
        ConfigInvalid: nothing was started.
    """
    if not offered.durability.keeps(durability):
        raise ConfigInvalid(
            f"the ledger in {place} is {offered.durability} and the configuration asks for "
            f"{durability}; nothing was started; change one of the two"
        )
    known = offered.limits
    for name, service in limits.class_services.items():
        rate = known.services.get(service)
        if known.class_services.get(name) != service or rate != limits.services[service]:
            raise ConfigInvalid(
                f"the ledger in {place} was started with other rates of remote services: worker "
                f"class {name!r} is to use {service!r} at {limits.services[service].rate:g} a "
                f"second, there it uses {known.class_services.get(name)!r}"
                f"{f' at {rate.rate:g} a second' if rate else ''}; nothing was started; give all "
                "that share the ledger the same [services], or wait until it has ended"
            )


def database_of(settings: LedgerSettings) -> Database | None:
    """Return the PostgreSQL database that is to hold the ledger, or ``None``.

    Settings that were read back from a run's record hold dots instead of the address; then what
    the run's first gateway left in its directory counts.
    """
    if settings.url is None or settings.url == Secret(DOTS):
        return None
    return Database(settings.url, settings.db_schema)
