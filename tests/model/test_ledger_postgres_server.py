"""What a PostgreSQL server must be, and what a gateway says of one that could be better."""

from collections.abc import Iterator

import psycopg
import pytest

from stoker.broker.base import LedgerLimits
from stoker.broker.postgres import connection, promises
from stoker.broker.postgres.connection import connect
from stoker.errors import ConfigInvalid
from support.ledger import ManualClock, gateway_service
from support.postgres import drop_schema, fresh_schema, server

CLOCK = ManualClock()


@pytest.fixture
def schema() -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(server(), name)


def test_an_older_server_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SERVER_VERSION_MIN", 990_000)
    with pytest.raises(ConfigInvalid, match="needs PostgreSQL 15 or newer, this server is"):
        connect(server().url(), "any")


def test_long_transactions_and_a_server_without_autovacuum_are_named(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_service(schema, LedgerLimits())
    gateway.open(CLOCK.now(), boot_id="", lineage="lin_test")
    assert not gateway.store.advice()
    with psycopg.connect(server().url().reveal()) as other:
        other.execute("SELECT 1")
        monkeypatch.setattr(promises, "LONG_SECONDS", 0.0)
        asked = promises.settings_of
        monkeypatch.setattr(
            promises, "settings_of", lambda db: asked(db)._replace(autovacuum="off")
        )
        long, vacuum = gateway.store.advice()
    gateway.close()
    assert "1 transactions have been open" in long
    assert "set autovacuum = on" in vacuum


def test_sessions_that_may_not_be_looked_at_are_named_and_other_databases_are_not(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that no transaction is long by a user who cannot know."""
    monkeypatch.setattr(promises, "LONG_SECONDS", 0.0)
    at = server().url()
    with psycopg.connect(at.reveal(), autocommit=True) as db:
        db.execute(f"CREATE ROLE {schema} LOGIN".encode())
        db.execute("SELECT 1")
        plain = at.reveal().replace("stoker@", f"{schema}@")
        with psycopg.connect(plain, autocommit=True) as own, psycopg.connect(plain) as other:
            [hidden] = promises.advice(own)
            assert "1 sessions in this database may not be looked at" in hidden
            other.execute("SELECT 1")
            long, hidden = promises.advice(own)
            assert "1 transactions have been open" in long
        with (
            psycopg.connect(server().url("template1").reveal()) as elsewhere,
            psycopg.connect(at.reveal()) as looking,
        ):
            elsewhere.execute("SELECT 1")
            assert promises.advice(looking) == ()
        db.execute(f"DROP ROLE {schema}".encode())
