"""Ledger files of older versions are opened and finished by this one; newer ones are refused.

``files/ledger_vN.db.gz`` and ``ledger_postgres_vN.sql.gz`` were made by the Stoker whose newest
schema was N (``PYTHONPATH=tests python tests/golden/test_golden_ledger.py`` adds the present file).
"""

import asyncio
import gzip
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import psycopg
import pytest

from stoker.broker.base import ActionsRequest, JournalRequest
from stoker.broker.client import connect
from stoker.broker.place import DATABASE
from stoker.broker.postgres import connection
from stoker.broker.schema import Migration, check_version, migrate, migrations
from stoker.broker.store_sqlite import SqliteStore
from stoker.errors import LedgerTooNew
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, RolloutId, WorkerId
from support.ledger import RUN, WORKER, Harness, with_ledger
from support.ledger_golden import ENTRIES, STATES, make
from support.postgres import check_unfinished, fresh_schema, server

FILES = Path(__file__).parent / "files"
NEWEST = migrations()[-1].version
OLDER = sorted(FILES.glob("ledger_v*.db.gz"))
OLDER_SCHEMAS = sorted(FILES.glob("ledger_postgres_v*.sql.gz"))
"""What ``pg_dump --inserts`` said of the same ledger, its schema called ``golden``."""


def unpack(stored: Path, place: Path) -> Path:
    path = place / DATABASE
    path.write_bytes(gzip.decompress(stored.read_bytes()))
    return path


async def finished(h: Harness) -> None:
    """Look at every action that ``make`` left, and finish what waits."""
    views = (
        await h.ledger.actions(ActionsRequest(action_ids=tuple(map(ActionId, STATES))))
    ).actions
    assert {v.action.action_id: v.state.value for v in views} == STATES
    for rollout, count in ENTRIES.items():
        request = JournalRequest(run_id=RUN, rollout_id=RolloutId(rollout))
        assert len((await h.ledger.journal(request)).events) == count
    waiting = await h.completed()
    assert waiting[ActionId("act_0005")].status is CompletionStatus.AMBIGUOUS
    assert waiting[ActionId("act_0007")].status is CompletionStatus.DEAD
    for name in (WORKER, WorkerId("wrk_9")):
        await h.enroll(name)
    leases = await h.lease()
    assert {one.action.action_id for one in leases} == {"act_0006", "act_0008"}
    h.seqs = {RolloutId(rollout): count for rollout, count in ENTRIES.items()}
    await h.start(*leases)
    await h.complete(*leases)
    await h.enroll(WorkerId("wrk_5"), replaces=WORKER)
    again = await h.lease(WorkerId("wrk_5"))
    await h.start(*again, worker=WorkerId("wrk_5"))
    await h.complete(*again, worker=WorkerId("wrk_5"))
    await h.acknowledge(*await h.completed())
    stats = await h.ledger.stats()
    assert (stats.unacknowledged, stats.dead_total) == (0, 2)
    assert stats.classes["fast"].queued == stats.classes["fast"].leased == 0


@pytest.mark.parametrize("stored", OLDER, ids=lambda path: path.name)
def test_a_ledger_of_every_version_is_opened_and_finished(stored: Path, tmp_path: Path) -> None:
    unpack(stored, tmp_path)
    with_ledger("sqlite", tmp_path, finished)
    check_version(tmp_path / DATABASE)


@pytest.mark.parametrize("stored", OLDER_SCHEMAS, ids=lambda path: path.name)
def test_a_postgres_schema_of_an_older_version_is_migrated_and_finished(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = fresh_schema()
    script = gzip.decompress(stored.read_bytes()).replace(b"golden.", f"{schema}.".encode())
    with psycopg.connect(server().url().reveal(), autocommit=True) as db:
        db.execute(script.replace(b"SCHEMA golden", f"SCHEMA {schema}".encode()))
        here = f"""UPDATE {schema}.meta SET history = system_identifier || '/' || left(
            pg_walfile_name(pg_current_wal_insert_lsn()), 8) FROM pg_control_system()"""
        db.execute(here.encode())  # as on the server that it was made on
    monkeypatch.setattr("support.ledger.fresh_schema", lambda: schema)

    async def scenario(h: Harness) -> None:
        check_unfinished(server(), schema)
        await finished(h)
        check_unfinished(server(), schema)

    with_ledger("postgres", tmp_path, scenario)


def test_there_is_a_golden_file_of_every_version_before_this_one() -> None:
    assert [path.name for path in OLDER][: NEWEST - 1] == [
        f"ledger_v{version}.db.gz" for version in range(1, NEWEST)
    ]
    newest_schema = len(connection._migrations())
    assert [path.name for path in OLDER_SCHEMAS][: newest_schema - 1] == [
        f"ledger_postgres_v{version}.sql.gz" for version in range(1, newest_schema)
    ]


def test_a_migration_is_applied_once_and_whole(tmp_path: Path) -> None:
    path = unpack(OLDER[0], tmp_path)
    next_one = Migration(NEWEST + 1, "ALTER TABLE worker ADD COLUMN host TEXT NOT NULL DEFAULT '';")
    broken = Migration(NEWEST + 2, "CREATE TABLE spare (one INTEGER); SELECT * FROM nowhere;")
    steps = (*migrations(), next_one)
    db = apsw.Connection(str(path))
    with pytest.raises(apsw.SQLError, match="nowhere"):
        migrate(db, path, (*steps, broken))
    assert db.execute("PRAGMA user_version").fetchall() == [(0,)], "nothing of it was kept"
    assert migrate(db, path, steps) == 1
    assert migrate(db, path, steps) == NEWEST + 1, "the second time there is nothing to do"
    assert db.execute("SELECT DISTINCT host FROM worker").fetchall() == [("",)]
    db.close()


def test_a_newer_ledger_is_refused_with_the_version_it_needs(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / DATABASE
    newer = Migration(NEWEST + 1, "CREATE TABLE future (one INTEGER);")
    db = apsw.Connection(str(path))
    migrate(db, path, (*migrations(), newer))
    db.execute("UPDATE migration SET stoker = '7.2.0' WHERE version = ?", (NEWEST + 1,))
    db.close()
    before = path.read_bytes()

    async def ask() -> None:
        await connect(tmp_path, role="test")

    for attempt in (
        lambda: SqliteStore(path),
        lambda: check_version(path),
        lambda: asyncio.run(ask()),
    ):
        with pytest.raises(LedgerTooNew) as refused:
            attempt()
        said = str(refused.value)
        assert f"schema version {NEWEST + 1}" in said
        assert f"reads up to {NEWEST}" in said
        assert "stoker 7.2.0 or newer" in said
    assert path.read_bytes() == before
    assert not (tmp_path / "ledger.lock").exists(), "no owner was started"


if __name__ == "__main__":
    target = FILES / f"ledger_v{NEWEST}.db.gz"
    if target.exists():
        sys.exit(f"{target} exists; files of a version are never made again")
    with TemporaryDirectory() as folder:
        make(Path(folder))
        target.write_bytes(gzip.compress((Path(folder) / DATABASE).read_bytes(), 9, mtime=0))
