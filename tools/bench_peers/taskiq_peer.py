"""taskiq over Redis Streams, acknowledged when the result is saved; results removed as read."""

import asyncio
import sys
from collections import deque
from pathlib import Path

from bench_faults.servers import Redis
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from bench_peers.meter import PAYLOAD, PORT, START_SECONDS, Meter, workers

PACKAGES = ("taskiq", "taskiq-redis", "redis")
DURABILITY = Redis.settings + ", acknowledged when saved"
SETTINGS = {"processes": 2, "lanes": 32, "look_ms": 10}
"""``lanes``: how many coroutines of the submitter wait at once, each for its oldest."""

_URL = f"redis://127.0.0.1:{PORT}/0"
broker = RedisStreamBroker(_URL).with_result_backend(
    RedisAsyncResultBackend(_URL, keep_results=False)
)


@broker.task(task_name="echo")
async def echo(given: str) -> str:
    """Do nothing."""
    return given


async def _submit(meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    look = settings["look_ms"] / 1000
    await broker.startup()
    await (await echo.kiq(PAYLOAD)).wait_result(check_interval=look, timeout=START_SECONDS)
    meter.begin()

    async def lane() -> None:
        depth = outstanding // settings["lanes"]
        waiting = deque([await echo.kiq(PAYLOAD) for _ in range(depth)])
        while meter.going:
            found = await waiting.popleft().wait_result(check_interval=look, timeout=START_SECONDS)
            assert found.return_value == PAYLOAD
            meter.count()
            waiting.append(await echo.kiq(PAYLOAD))

    await asyncio.gather(*(lane() for _ in range(settings["lanes"])))
    await broker.shutdown()


def work(folder: Path, meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    """Bring everything up, pass round trips through, bring it down."""
    command = [
        sys.executable, "-m", "taskiq", "worker", "bench_peers.taskiq_peer:broker",
        "--workers", str(settings["processes"]), "--ack-type", "when_saved",
        "--log-level", "WARNING",
    ]  # fmt: skip
    with Redis.over(folder, PORT), workers(folder, command):
        asyncio.run(_submit(meter, outstanding, settings))
