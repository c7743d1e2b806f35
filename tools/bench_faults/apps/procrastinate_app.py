"""Procrastinate on PostgreSQL, with the periodic task of its guide that retries stalled jobs."""

import asyncio
import os
import sys

from jobs import job
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_POSTGRES"]))


@app.task(name="job", retry=3, queue="faults")
def run(kind: str, key: str) -> None:
    """Run one job."""
    job(kind, key)


@app.periodic(cron="* * * * * */2")
@app.task(name="retry_stalled", queueing_lock="retry_stalled", pass_context=True)
async def retry_stalled(context, timestamp: int) -> None:  # noqa: ANN001, ARG001
    """Give the jobs of silent workers to others."""
    lease = float(os.environ["BENCH_LEASE"])
    manager = app.job_manager
    for stalled in await manager.get_stalled_jobs(seconds_since_heartbeat=lease):
        await manager.retry_job(stalled)


async def main() -> None:
    """Submit, cancel or look."""
    async with app.open_async():
        manager = app.job_manager
        match sys.argv[1:]:
            case ["schema"]:
                await app.schema_manager.apply_schema_async()
            case ["submit", kind, *keys]:
                for key in keys:
                    print(await run.defer_async(kind=kind, key=key))
            case ["cancel", *keys]:
                for key in keys:
                    await manager.cancel_job_by_id_async(int(key), abort=True)
            case ["state", key]:
                status = (await manager.get_job_status_async(int(key))).value
                states = {"succeeded": "done", "failed": "failed"}
                states |= {"cancelled": "cancelled", "aborted": "cancelled"}
                print(states.get(status, "waiting"))


if __name__ == "__main__":
    asyncio.run(main())
