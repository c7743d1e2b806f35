"""taskiq on Redis Streams: acknowledged when executed, idle messages taken over."""

import asyncio
import os
import sys

from jobs import job
from taskiq import SimpleRetryMiddleware
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

url = os.environ["BENCH_REDIS"]
broker = (
    RedisStreamBroker(url=url, idle_timeout=int(float(os.environ["BENCH_LEASE"]) * 1000))
    .with_result_backend(RedisAsyncResultBackend(url))
    .with_middlewares(SimpleRetryMiddleware(default_retry_count=3))
)


@broker.task(task_name="job", retry_on_error=True)
def run(kind: str, key: str) -> None:
    """Run one job."""
    job(kind, key)


async def main() -> None:
    """Submit, or look."""
    await broker.startup()
    match sys.argv[1:]:
        case ["submit", kind, *keys]:
            for key in keys:
                task = await run.kicker().with_task_id(key).kiq(kind, key)
                print(task.task_id)
        case ["cancel", *_]:
            sys.exit("no cancel")
        case ["state", key]:
            backend = broker.result_backend
            ready = await backend.is_result_ready(key)
            failed = ready and (await backend.get_result(key)).is_err
            print("failed" if failed else "done" if ready else "waiting")
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
