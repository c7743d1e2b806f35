"""What a server's settings promise, checked before anybody is told that something is durable."""

import re
import select
from typing import NamedTuple

from stoker.broker.base import Durability
from stoker.broker.postgres.connection import Db
from stoker.errors import ConfigInvalid, LedgerUnavailable

# Sessions of other databases hold up no vacuum of this one. Of a session that this user may not
# look at, only where it is is told.
_LONG = """
SELECT count(*) FILTER (WHERE age > %s), coalesce(max(age), 0)::float8,
    count(*) FILTER (WHERE backend_type IS NULL)
FROM (
    SELECT backend_type, extract(epoch FROM clock_timestamp() - xact_start) AS age
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND coalesce(backend_type, 'client backend') = 'client backend'
) AS session"""
LONG_SECONDS = 300.0
"""A transaction that is open for longer is named."""

_STANDBYS = """
SELECT count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')),
    count(*) FILTER (WHERE sync_state IS NULL)
FROM pg_stat_replication"""
_STANDBY_LOOKS, _STANDBY_SECONDS = 30, 0.1
_NEEDED = re.compile(r"\s*(?:FIRST|ANY)?\s*(\d+)\s*\(", re.IGNORECASE)


class Settings(NamedTuple):
    """Settings of a server that durability depends on."""

    fsync: str
    full_page_writes: str
    synchronous_commit: str
    standbys: str
    autovacuum: str


def settings_of(db: Db) -> Settings:
    """Ask the server."""
    [found] = db.execute(
        "SELECT current_setting('fsync'), current_setting('full_page_writes'), "
        "current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), "
        "current_setting('autovacuum')"
    ).fetchall()
    return Settings(*found)


def verify(db: Db, asked: Durability) -> None:
    """Set this connection's commits as ``asked`` demands, or refuse.

    Raises:
        ConfigInvalid: the server's settings cannot keep the promise; says which and what to do.
        LedgerUnavailable: synchronous standbys are named and not there: commits would never end.
    """
    found = settings_of(db)
    if asked is not Durability.PROCESS_SAFE:
        for name in ("fsync", "full_page_writes"):
            if getattr(found, name) != "on":
                raise ConfigInvalid(
                    f"the ledger is to be {asked}, and this PostgreSQL server has {name} = "
                    f"{getattr(found, name)}: a power cut may destroy what it has committed; "
                    f"nothing was started; set {name} = on, or ledger.durability = process-safe"
                )
    if asked is Durability.REPLICATED and not found.standbys.strip():
        raise ConfigInvalid(
            "the ledger is to be replicated, and this PostgreSQL server names no synchronous "
            "standby; nothing was started; set synchronous_standby_names, or ledger.durability = "
            "power-safe"
        )
    if asked is Durability.REPLICATED:
        _await_standbys(db, found.standbys)
    if found.synchronous_commit != "remote_apply":
        db.execute("SELECT set_config('synchronous_commit', 'on', false)")


def _await_standbys(db: Db, named: str) -> None:
    """Return when they are connected; one that was just named or started takes a moment."""
    for _ in range(_STANDBY_LOOKS):
        if not (missing := _missing_standbys(db, named)):
            return
        select.select([], [], [], _STANDBY_SECONDS)
    raise LedgerUnavailable(missing)


def _missing_standbys(db: Db, named: str) -> str:
    """Return what is wrong with the synchronous standbys that are connected now, or nothing."""
    needed = _NEEDED.match(named)
    wanted = int(needed[1]) if needed else 1
    [(connected, hidden)] = db.execute(_STANDBYS).fetchall()
    if connected >= wanted:
        return ""
    if hidden:
        return (
            "the ledger is to be replicated, and this user may not see which standbys are "
            "connected; nothing was started; GRANT pg_read_all_stats to it"
        )
    return (
        f"the ledger is to be replicated, and {connected} of {wanted} synchronous standbys "
        f"({named.strip()}) are connected: commits would wait for the others without end; nothing "
        "was started; start them, or set ledger.durability = power-safe"
    )


def advice(db: Db) -> tuple[str, ...]:
    """Return what would make this server a better home for a ledger."""
    said: list[str] = []
    [(long, oldest, hidden)] = db.execute(_LONG, (LONG_SECONDS,)).fetchall()
    if long:
        said.append(
            f"{long} transactions have been open for up to {oldest / 60:.0f} minutes in this "
            "database: nothing that died since can be vacuumed, and leasing slows down; end them"
        )
    if hidden:
        said.append(
            f"{hidden} sessions in this database may not be looked at by this user, so long "
            "transactions of theirs are not told; GRANT pg_read_all_stats to it"
        )
    settings = settings_of(db)
    if settings.standbys.strip() and (missing := _missing_standbys(db, settings.standbys)):
        said.append(missing.replace("nothing was started; ", ""))
    if settings.autovacuum != "on":
        said.append("autovacuum is off: the ledger's tables grow without end; set autovacuum = on")
    return tuple(said)
