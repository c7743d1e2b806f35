"""Cases of the hand-off that need a whole run or a gateway's process, on PostgreSQL."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.broker.base import JournalRequest, LedgerLimits
from stoker.broker.client import connect
from stoker.broker.place import owner_pid
from stoker.broker.postgres.connection import connect as connect_server
from stoker.broker.spawn import Database
from stoker.errors import LedgerStorageFailed
from support.ledger import BOUND_SECONDS, ROLLOUT, RUN, Harness, act, action
from support.ledger_process import refuses_bad_frames
from support.postgres import drop_schema, fresh_schema, server
from support.runs import until
from support.runs_gated import count, gate, gated
from support.runs_records import read

ROLLOUTS, SLOTS = 200, 4
FULL = """CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION full_disk()"""


@pytest.fixture
def database() -> Iterator[Database]:
    """A fresh ledger on a server that waits for its disk."""
    found = Database(server("on").url(), fresh_schema())
    yield found
    drop_schema(server("on"), found.schema)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A gateway's directory; what still lives there is ended afterwards."""
    yield tmp_path
    if (pid := owner_pid(tmp_path)) is not None:
        os.kill(pid, signal.SIGKILL)


async def harness_of(place: Path, database: Database) -> Harness:
    harness = Harness("gateway", place, LedgerLimits())
    harness.ledger = await connect(
        place, role="test", limits=harness.limits, idle_exit_seconds=30.0, elsewhere=database
    )
    return harness


@pytest.mark.slow
def test_b4_a_run_on_postgres_whose_every_party_is_killed_goes_on(
    tmp_path: Path, database: Database
) -> None:
    settings = {
        "ledger": {"url": database.url.reveal(), "db_schema": database.schema},
        "admission": {"mode": "fixed", "active_max": ROLLOUTS},
    }
    with gated(tmp_path, ROLLOUTS, settings) as one:
        one.start()
        one.until_lines(SLOTS)
        until(lambda: one.status().get("rollouts_active") == ROLLOUTS, "all of them in flight")
        for party in ("worker", "coordinator", "owner"):
            one.signal(party, signal.SIGKILL)
        one.ended()
        gate(one)
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": ROLLOUTS}
        assert ROLLOUTS <= count(one, "done") <= ROLLOUTS + SLOTS, "who was cut off, once more"
        attempts = Counter(view.attempts for view in read(one.run.path).actions.values())
        assert attempts.keys() <= {1, 2}
        assert attempts[2] <= SLOTS


def test_b12_a_full_disk_of_the_server_rejects_the_group_and_the_gateway_goes_on(
    place: Path, database: Database
) -> None:
    async def scenario() -> None:
        h = await harness_of(place, database)
        db = connect_server(database.url, database.schema)
        try:
            await h.attach()
            await h.enroll()
            await h.submit(action(0))
            [lease] = await h.lease()
            gateway = owner_pid(place)
            for table in ("action", "journal"):
                db.execute(FULL.format(table=table).encode())
                with pytest.raises(LedgerStorageFailed, match="extend"):
                    await h.submit(action(1))
                if table == "action":
                    with pytest.raises(LedgerStorageFailed, match="extend"):
                        await h.complete(lease)
                db.execute(f"DROP TRIGGER full_disk ON {table}; DROP FUNCTION full_disk".encode())
            assert await h.submit(action(1)) == ["accepted"], "nothing half-written"
            await h.complete(lease, *await h.lease())
            assert sorted(await h.completed()) == [act(0), act(1)]
            asked = JournalRequest(run_id=RUN, rollout_id=ROLLOUT)
            assert len((await h.ledger.journal(asked)).events) == 2
            assert owner_pid(place) == gateway, "the gateway lives"
        finally:
            db.close()
            await h.ledger.close()

    asyncio.run(asyncio.wait_for(scenario(), BOUND_SECONDS))


def test_b14_bad_frames_close_their_connection_and_the_gateway_lives(
    place: Path, database: Database
) -> None:
    async def scenario() -> None:
        h = await harness_of(place, database)
        gateway = owner_pid(place)
        await asyncio.to_thread(refuses_bad_frames, place)
        await h.attach()
        assert owner_pid(place) == gateway
        await h.ledger.close()

    asyncio.run(asyncio.wait_for(scenario(), BOUND_SECONDS))
