"""``stoker bench ledger --postgres``: a gateway's cycles beside plain batched SQL on one server.

Same load as the embedded ledger's bench (``bench_ledger_load``), through real gateway processes.
The floor is ``testing.raw_sql``; both in turn, round by round. Two gateways, each with its own
coordinator and worker, are compared with one; how much CPU a cycle costs where says what more cores
would give. Churn: one ledger under load for a while, its rate and size at the end against those
after a warm-up. The embedded engine stands beside the same floor.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import LedgerLimits
from stoker.broker.client import connect
from stoker.broker.place import owner_pid
from stoker.broker.postgres.connection import Db
from stoker.broker.postgres.connection import connect as connect_server
from stoker.broker.spawn import Database
from stoker.cli.bench_ledger_load import PAYLOAD_BYTES, ROW_BYTES, Load
from stoker.cli.bench_machine import Probe, figure, machine
from stoker.cli.bench_processes import cpu_seconds
from stoker.config.secret import Secret
from stoker.seams.clock import SystemClock
from stoker.seams.entropy import fresh_id
from stoker.testing.raw_sql import RawSql

OUTSTANDING = 256
CYCLES = 10_240
CHURN_BATCHES = 20
_QUEUED_MAX = 4_000_000
_LIMITS = LedgerLimits(
    queued_max=_QUEUED_MAX, queued_per_class_max=_QUEUED_MAX, results_max=_QUEUED_MAX
)
_SIZE = """SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r'
    AND c.relname NOT IN ('journal', 'rollout', 'action')"""
_KEPT = "SELECT pg_total_relation_size(%s::regclass)"

Say = Callable[[str], object]


class Rounds(msgspec.Struct):
    """What the rounds gave, one value each."""

    ours: list[float] = []
    raw: list[float] = []
    two: list[float] = []
    embedded: list[float] = []
    per_commit: list[float] = []
    cpu_us: list[float] = []
    raw_cpu_us: list[float] = []
    """Of the floor's client."""


def measure(url: Secret, *, runs: int, say: Say) -> dict[str, Any]:
    """Measure ``runs`` rounds and the churn once; return the bench document (DESIGN §9)."""
    rounds = Rounds()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", ignore_cleanup_errors=True) as kept:
        place = Path(kept)
        probe = Probe(place)
        for number in range(runs):
            say(f"bench ledger: round {number + 1} of {runs} …")
            probe.sample()
            _raw(url, rounds)
            asyncio.run(_embedded(place / f"{number}-embedded", rounds))
            asyncio.run(_round(place / str(number), url, rounds))
        say("bench ledger: churn …")
        rate, size, kept_size = asyncio.run(_churn(place / "churn", url))
        probe.sample()
        syncs = probe.median_ms()
    ratios = [ours / raw for ours, raw in zip(rounds.ours, rounds.raw, strict=True)]
    embedded = [ours / raw for ours, raw in zip(rounds.embedded, rounds.raw, strict=True)]
    twos = [two / ours for two, ours in zip(rounds.two, rounds.ours, strict=True)]
    return {
        "bench": "ledger",
        "machine": machine(sync_ms_p50=syncs),
        "figures": {
            "gateway_cycles_per_second": figure(rounds.ours, "1/s", None),
            "raw_sql_cycles_per_second": figure(rounds.raw, "1/s", None),
            "gateway_vs_raw_postgres": figure(ratios, "ratio", 0.8),
            "cycles_vs_raw_postgres": figure(embedded, "ratio", 1.2),
            "two_gateways_vs_one": figure(twos, "ratio", 1.6),
            "gateway_transitions_per_commit": figure(rounds.per_commit, "", 200.0),
            "gateway_cpu_us_per_cycle": figure(rounds.cpu_us, "us", None),
            "raw_sql_client_cpu_us_per_cycle": figure(rounds.raw_cpu_us, "us", None),
            "churn_rate_end_vs_warm": figure([rate], "ratio", 0.9),
            "churn_size_end_vs_warm": figure([size], "ratio", 1.1),
            "churn_action_bytes_end_vs_warm": figure([kept_size], "ratio", 1.1),
        },
        "notes": {},
    }


@contextlib.contextmanager
def _schema(url: Secret) -> Iterator[tuple[Db, str]]:
    name = fresh_id("bench_")
    db: Db = connect_server(url, name)
    try:
        db.execute(f'CREATE SCHEMA "{name}"'.encode())
        yield db, name
    finally:
        db.execute(f'DROP SCHEMA "{name}" CASCADE'.encode())
        db.close()


def _raw(url: Secret, rounds: Rounds) -> None:
    clock = SystemClock()
    with _schema(url) as (db, _):
        raw = RawSql(db, PAYLOAD_BYTES, ROW_BYTES)
        raw.cycles(OUTSTANDING * 4, OUTSTANDING)
        began, cpu = clock.monotonic(), sum(os.times()[:2])
        raw.cycles(CYCLES, OUTSTANDING)
        rounds.raw.append(CYCLES / (clock.monotonic() - began))
        rounds.raw_cpu_us.append((sum(os.times()[:2]) - cpu) / CYCLES * 1e6)


async def _embedded(place: Path, rounds: Rounds) -> None:
    async with _gateway(place, None, "0") as load:
        await load.cycles(OUTSTANDING * 4, OUTSTANDING)
        rounds.embedded.append((await load.cycles(CYCLES, OUTSTANDING)).rate)


async def _round(place: Path, url: Secret, rounds: Rounds) -> None:
    with _schema(url) as (_, name):
        database = Database(url, name)
        async with _gateway(place / "a", database, "a") as one:
            await one.cycles(OUTSTANDING * 4, OUTSTANDING)
            pid = owner_pid(place / "a")
            assert pid is not None, "the gateway lives while we are connected"
            before, cpu = await one.coordinator.stats(), cpu_seconds(pid)
            measured = await one.cycles(CYCLES, OUTSTANDING)
            rounds.cpu_us.append((cpu_seconds(pid) - cpu) / CYCLES * 1e6)
            after = await one.coordinator.stats()
            rounds.ours.append(measured.rate)
            transitions = after.transitions_total - before.transitions_total
            rounds.per_commit.append(transitions / (after.commits_total - before.commits_total))
            async with _gateway(place / "b", database, "b") as other:
                await other.cycles(OUTSTANDING * 4, OUTSTANDING)
                both = await asyncio.gather(
                    *(load.cycles(CYCLES, OUTSTANDING) for load in (one, other))
                )
                rounds.two.append(2 * CYCLES / max(m.seconds for m in both))


async def _churn(place: Path, url: Secret) -> tuple[float, float, float]:
    """Return rate, size of what ends, and bytes for each action, at the end ÷ after a warm-up."""
    with _schema(url) as (db, name):
        async with _gateway(place, Database(url, name), "a") as load:
            rates, sizes, kept = [], [], []
            for number in range(1, CHURN_BATCHES + 1):
                rates.append((await load.cycles(CYCLES // 2, OUTSTANDING)).rate)
                sizes.append(db.execute(_SIZE, (name,)).fetchall()[0][0])
                kept.append(db.execute(_KEPT, (f'"{name}".action',)).fetchall()[0][0] / number)
            warm = CHURN_BATCHES // 4
            rate = statistics.median(rates[-warm:]) / statistics.median(rates[warm : 2 * warm])
            before = 2 * warm - 1
            return rate, float(sizes[-1] / sizes[before]), float(kept[-1] / kept[before])


@contextlib.asynccontextmanager
async def _gateway(place: Path, database: Database | None, partition: str) -> AsyncIterator[Load]:
    """Yield a load through a gateway of its own, or through an embedded ledger."""
    clients = [
        await connect(place, role=role, limits=_LIMITS, elsewhere=database)
        for role in ("coordinator", "worker")
    ]
    try:
        load = Load(clients[0], clients[1], partition)
        await load.begin(OUTSTANDING)
        yield load
    finally:
        for client in clients:
            await client.close()
        if (pid := owner_pid(place)) is not None:
            os.kill(pid, signal.SIGTERM)
            while owner_pid(place) == pid:
                await asyncio.sleep(0.01)
