"""A standby takes over: synchronous, nothing is lost; asynchronous, it is another ledger."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from stoker.broker.base import CompleteDisposition, Durability, JournalRequest, LedgerLimits
from stoker.broker.client import connect, owner_pid
from stoker.broker.spawn import Database
from stoker.errors import ConfigInvalid, LedgerFenced
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import WorkerId
from support.ledger import BOUND_SECONDS, ROLLOUT, RUN, Harness, act, action
from support.postgres import Server

pytestmark = pytest.mark.slow
SCHEMA = "stoker"
OTHER = WorkerId("wrk_after")
CYCLES = 5


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """A primary and a standby that streams from it."""
    primary = Server("fsync=on", "wal_level=replica")
    primary.create()
    primary.start()
    standby = Server("fsync=on", "hot_standby=on")
    standby.run(
        [
            *(
                standby.binaries / "pg_basebackup",
                "--pgdata",
                standby.data,
                "--write-recovery-conf",
            ),
            *("--host", primary.place, "--username", "stoker", "--checkpoint", "fast"),
        ]
    )
    standby.start()
    yield primary, standby
    standby.remove()
    primary.remove()


def ask(server: Server, *statements: str) -> None:
    with psycopg.connect(server.url().reveal(), autocommit=True) as db:
        for statement in statements:
            db.execute(statement.encode())


async def harness_of(place: Path, server: Server, durability: Durability) -> Harness:
    harness = Harness("gateway", place, LedgerLimits())
    harness.ledger = await connect(
        place,
        role="test",
        durability=durability,
        elsewhere=Database(server.url(), SCHEMA),
    )
    return harness


async def cycle(h: Harness, number: int) -> None:
    await h.submit(action(number, effect=Effect.EXTERNAL))
    [lease] = await h.lease(slots=1)
    await h.start(lease)
    assert await h.complete(lease) == [CompleteDisposition.OK]


async def end(h: Harness) -> None:
    await h.ledger.close()
    if (pid := owner_pid(h.place)) is not None:
        os.kill(pid, signal.SIGKILL)


def test_a_synchronous_standby_that_takes_over_has_all_that_was_promised(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    primary, standby = servers
    named = "ALTER SYSTEM SET synchronous_standby_names"
    ask(primary, f"{named} = 'FIRST 2 (*)'", "SELECT pg_reload_conf()")

    async def whole() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            with pytest.raises(ConfigInvalid, match="1 of 2 synchronous standbys"):
                await harness_of(tmp_path / "a", primary, Durability.REPLICATED)
            ask(primary, f"{named} = '*'", "SELECT pg_reload_conf()")
            before = await harness_of(tmp_path / "a", primary, Durability.REPLICATED)
            await before.attach()
            await before.enroll()
            for number in range(CYCLES):
                await cycle(before, number)
            await before.submit(action(CYCLES, effect=Effect.EXTERNAL))
            [lease] = await before.lease()
            await before.start(lease)
            lineage = (await before.ledger.capabilities()).lineage
            primary.stop("immediate")
            await end(before)
            standby.promote()
            after = await harness_of(tmp_path / "b", standby, Durability.POWER_SAFE)
            after.fence, after.seqs = before.fence, before.seqs
            assert (await after.ledger.capabilities()).lineage == lineage
            assert await after.complete(lease) == [CompleteDisposition.OK], "the lease stands"
            assert set(await after.completed()) == {act(n) for n in range(CYCLES + 1)}
            reply = await after.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
            assert len(reply.events) == CYCLES + 1
            assert await after.submit(action(99)) == ["accepted"], "the old fence stands"
            [fresh] = await after.lease()
            assert fresh.fence > lease.fence
            await end(after)

    asyncio.run(whole())


def test_a_standby_that_lost_commits_is_another_ledger_and_old_fences_are_refused(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    primary, standby = servers

    async def whole() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            before = await harness_of(tmp_path / "a", primary, Durability.POWER_SAFE)
            await before.attach()
            await before.enroll()
            await cycle(before, 0)
            await before.submit(action(1, effect=Effect.EXTERNAL), action(2, effect=Effect.PURE))
            held = await before.lease()
            lineage = (await before.ledger.capabilities()).lineage
            await asyncio.to_thread(_until_replayed, primary, standby)
            ask(
                standby,
                "ALTER SYSTEM SET primary_conninfo = ''",
                "SELECT pg_reload_conf()",
            )
            await asyncio.to_thread(_until_cut_off, primary)
            await before.start(*held)  # promised, and lost with the server
            await before.submit(action(3))
            old = before.fence
            primary.stop("immediate")
            await end(before)
            standby.promote()
            after = await harness_of(tmp_path / "b", standby, Durability.POWER_SAFE)
            assert (await after.ledger.capabilities()).lineage != lineage
            after.fence, after.seqs = old, before.seqs
            with pytest.raises(LedgerFenced):
                await after.submit(action(4))
            assert await after.complete(*held) == [CompleteDisposition.STALE] * 2
            assert await after.attach("another") > old
            results = await after.completed()
            statuses = {action_id: result.status for action_id, result in results.items()}
            # The start of the external action was lost: it may have run, so it is not run again.
            assert statuses == {
                act(0): CompletionStatus.OK,
                act(1): CompletionStatus.AMBIGUOUS,
            }
            reply = await after.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
            after.seqs[ROLLOUT] = len(reply.events)
            await after.enroll(OTHER)
            [again] = await after.lease(OTHER)
            assert again.action.action_id == act(2), "a pure one is"
            assert again.fence > max(lease.fence for lease in held)
            assert await after.submit(action(3)) == ["accepted"], "what was lost is not there"
            await end(after)

    asyncio.run(whole())


def _until_replayed(primary: Server, standby: Server) -> None:
    with (
        psycopg.connect(primary.url().reveal(), autocommit=True) as at,
        psycopg.connect(standby.url().reveal(), autocommit=True) as behind,
    ):
        [written] = at.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
        for _ in range(int(BOUND_SECONDS / 0.02)):
            found = behind.execute(
                "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn, pg_sleep(0.02)", (written,)
            ).fetchone()
            if found and found[0]:
                return
    raise AssertionError("the standby did not follow")


def _until_cut_off(primary: Server) -> None:
    with psycopg.connect(primary.url().reveal(), autocommit=True) as at:
        for _ in range(int(BOUND_SECONDS / 0.02)):
            found = at.execute(
                "SELECT count(*), pg_sleep(0.02) FROM pg_stat_replication"
            ).fetchone()
            if found and found[0] == 0:
                return
    raise AssertionError("the standby still follows")
