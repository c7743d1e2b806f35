"""What a server's settings promise, checked before anybody is told that something is durable."""

from typing import NamedTuple

from stoker.broker.base import Durability
from stoker.broker.postgres.connection import Db
from stoker.errors import ConfigInvalid

_LONG = """
SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
FROM pg_stat_activity
WHERE xact_start < clock_timestamp() - interval '5 minutes' AND backend_type = 'client backend'"""


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
    if found.synchronous_commit != "remote_apply":
        db.execute("SELECT set_config('synchronous_commit', 'on', false)")


def advice(db: Db) -> tuple[str, ...]:
    """Return what would make this server a better home for a ledger."""
    said: list[str] = []
    [(long, oldest)] = db.execute(_LONG).fetchall()
    if long:
        said.append(
            f"{long} transactions have been open for up to {oldest / 60:.0f} minutes on this "
            "server: nothing that died since can be vacuumed, and leasing slows down; end them"
        )
    if settings_of(db).autovacuum != "on":
        said.append("autovacuum is off: the ledger's tables grow without end; set autovacuum = on")
    return tuple(said)
