"""Connections to the server: how they are set, what they refuse, and numbered migrations.

The connection string may hold a password: it is a ``Secret`` until psycopg has it, and no message
repeats what psycopg says of it.
"""

from hashlib import blake2b
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import Connection

import stoker
from stoker.broker.postgres.arrays import register
from stoker.config.secret import Secret
from stoker.errors import ConfigInvalid, LedgerUnavailable

SERVER_VERSION_MIN = 150_000
_MIGRATIONS_LOCK = 3
_SERVING_LOCK = 4
"""Shared by every connection that counts on the schema as it is, until it ends."""
_SESSION = {
    "application_name": "stoker-gateway",
    "enable_seqscan": "off",  # tables start empty and grow; a plan made for an empty one stays
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
}
_DONE = """
SELECT number, to_jsonb(schema_version) ->> 'stoker' FROM schema_version
ORDER BY number DESC LIMIT 1"""
"""Tables of before keep no version of Stoker: as JSON a column may be missing."""

Db = Connection[tuple[Any, ...]]


def ledger_key(schema: str) -> int:
    """Return the first half of this ledger's advisory locks."""
    return int.from_bytes(blake2b(schema.encode(), digest_size=4).digest(), "big", signed=True)


def partition_key(schema: str, partition: tuple[str, str]) -> int:
    """Return the advisory lock under which a partition's events get their numbers."""
    text = "\0".join((schema, *partition)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big", signed=True)


def connect(url: Secret, schema: str) -> Db:
    """Return a connection in which ``schema`` is searched first, every statement on its own.

    Raises:
        ConfigInvalid: the address cannot be read, or the server is older than 15.
        LedgerUnavailable: no server answers there.
    """
    try:
        db: Db = psycopg.connect(url.reveal(), autocommit=True, connect_timeout=10)
    except psycopg.OperationalError as error:
        raise LedgerUnavailable(
            f"no PostgreSQL server could be used for the ledger: {_without(url, error)}; nothing "
            "was changed; look at ledger.url and at the server"
        ) from None
    except psycopg.ProgrammingError:
        raise ConfigInvalid(
            "ledger.url is not an address PostgreSQL's client can read; it looks like "
            "postgresql://user@host:5432/database"
        ) from None
    if db.info.server_version < SERVER_VERSION_MIN:
        version = db.info.parameter_status("server_version")
        db.close()
        raise ConfigInvalid(
            f"the ledger needs PostgreSQL 15 or newer, this server is {version}; nothing was "
            "changed; upgrade the server or use the embedded ledger"
        )
    [(standby,)] = db.execute("SELECT pg_is_in_recovery()").fetchall()
    if standby:
        db.close()
        raise LedgerUnavailable(
            "this PostgreSQL server is a standby and takes no writes; nothing was changed; name "
            "its primary in ledger.url, or promote it"
        )
    register(db)
    for name, value in _SESSION.items():
        db.execute("SELECT set_config(%s, %s, false)", (name, value))
    db.execute("SELECT set_config('search_path', quote_ident(%s), false)", (schema,))
    return db


def _without(url: Secret, error: Exception) -> str:
    """Return what the client said, on one line, without any part of the address."""
    password = psycopg.conninfo.conninfo_to_dict(url.reveal()).get("password")
    said = " ".join(str(error).split())
    return said.replace(str(password), "•••") if password else said


def migrate(db: Db, schema: str) -> None:
    """Bring the schema to this version, one migration after another, all in one transaction.

    It stays as it is while ``db`` lives: an older gateway would go on writing what it knows, and
    leave out what a newer one looks for.

    Raises:
        ConfigInvalid: a newer version of Stoker made the schema.
        LedgerUnavailable: an older one is at work in it.
    """
    known, key = _migrations(), ledger_key(schema)
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s, %s)", (key, _MIGRATIONS_LOCK))
        found = db.execute(
            "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s", (schema,)
        ).fetchone()
        if found is None:
            db.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(schema)))
        db.execute("SET LOCAL client_min_messages = warning")
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (number bigint PRIMARY KEY)")
        done, made_by = (db.execute(_DONE).fetchall() or [(0, None)])[0]
        if done > len(known):
            newer = f"stoker {made_by} or newer" if made_by else "the newer stoker that made it"
            raise ConfigInvalid(
                f"the ledger in schema {schema!r} has version {done} and this is stoker "
                f"{stoker.__version__}, which knows {len(known)}; nothing was changed; "
                f"use {newer}"
            )
        tried = "SELECT pg_try_advisory_xact_lock(%s, %s)"
        if 0 < done < len(known) and not db.execute(tried, (key, _SERVING_LOCK)).fetchall()[0][0]:
            raise LedgerUnavailable(
                f"a gateway of an older Stoker serves the ledger in schema {schema!r}, which has "
                f"version {done} and needs version {len(known)}; nothing was changed; end it first"
            )
        if done < len(known):
            db.execute("ALTER TABLE schema_version ADD COLUMN IF NOT EXISTS stoker text")
        for number, script in enumerate(known[done:], start=done + 1):
            db.execute(script)
            db.execute(
                "INSERT INTO schema_version (number, stoker) VALUES (%s, %s)",
                (number, stoker.__version__),
            )
        db.execute("SELECT pg_advisory_lock_shared(%s, %s)", (key, _SERVING_LOCK))


def _migrations() -> list[bytes]:
    folder = files("stoker.broker.postgres") / "migrations"
    scripts = sorted((one.name, one) for one in folder.iterdir() if one.name.endswith(".sql"))
    return [one.read_bytes() for _, one in scripts]
