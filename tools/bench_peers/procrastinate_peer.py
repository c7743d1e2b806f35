"""Procrastinate on PostgreSQL. It has no results: who submitted looks for ended jobs and removes
them, all at once by one statement, as somebody in a hurry would write it.
"""  # noqa: D205 - one thought

import asyncio
import sys
from pathlib import Path

from bench_faults.servers import Postgres
from procrastinate import App, PsycopgConnector

from bench_peers.meter import PAYLOAD, PORT, START_SECONDS, Meter, workers

PACKAGES = ("procrastinate", "psycopg")
DURABILITY = Postgres.settings + ", jobs deferred in batches"
SETTINGS = {"processes": 2, "concurrency": 16, "look_ms": 20}

app = App(connector=PsycopgConnector(conninfo=f"postgresql://faults@127.0.0.1:{PORT}/postgres"))
_ENDED = "DELETE FROM procrastinate_jobs WHERE status = 'succeeded' RETURNING args"


@app.task(name="echo")
async def echo(given: str) -> str:
    """Do nothing."""
    return given


async def _submit(meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()

        async def ended() -> int:
            while not (rows := await app.connector.execute_query_all_async(_ENDED)):
                await asyncio.sleep(settings["look_ms"] / 1000)
            assert all(row["args"]["given"] == PAYLOAD for row in rows)
            return len(rows)

        await echo.batch_defer_async({"given": PAYLOAD})
        await asyncio.wait_for(ended(), START_SECONDS)
        meter.begin()
        free = outstanding
        while meter.going:
            await echo.batch_defer_async(*({"given": PAYLOAD} for _ in range(free)))
            free = await asyncio.wait_for(ended(), START_SECONDS)
            meter.count(free)


def work(folder: Path, meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    """Bring everything up, pass round trips through, bring it down."""
    code = (
        "from bench_peers.procrastinate_peer import app;"
        f"app.run_worker(concurrency={settings['concurrency']}, fetch_job_polling_interval=0.05)"
    )
    commands = [[sys.executable, "-c", code]] * settings["processes"]
    with Postgres.over(folder, PORT), workers(folder, *commands):
        asyncio.run(_submit(meter, outstanding, settings))
