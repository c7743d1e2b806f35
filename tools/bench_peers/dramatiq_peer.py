"""Dramatiq on Redis with its result backend, whose results end by themselves after a minute."""

import sys
import threading
from collections import deque
from pathlib import Path

import dramatiq
from bench_faults.servers import Redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from bench_peers.meter import PAYLOAD, PORT, START_SECONDS, Meter, workers

PACKAGES = ("dramatiq", "redis")
DURABILITY = Redis.settings
SETTINGS = {"processes": 2, "threads": 16, "lanes": 32}
"""``lanes``: how many threads of the submitter wait at once, each for its oldest."""

_URL = f"redis://127.0.0.1:{PORT}/0"
broker = RedisBroker(url=_URL)
broker.add_middleware(
    Results(backend=RedisBackend(url=_URL), store_results=True, result_ttl=60_000)
)
dramatiq.set_broker(broker)


@dramatiq.actor
def echo(given: str) -> str:
    """Do nothing."""
    return given


def _seen(message: dramatiq.Message[str]) -> None:
    found = message.get_result(block=True, timeout=int(START_SECONDS * 1000))
    assert found == PAYLOAD


def _lane(meter: Meter, depth: int) -> None:
    waiting = deque([echo.send(PAYLOAD) for _ in range(depth)])
    while meter.going:
        _seen(waiting.popleft())
        meter.count()
        waiting.append(echo.send(PAYLOAD))


def work(folder: Path, meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    """Bring everything up, pass round trips through, bring it down."""
    command = [
        sys.executable, "-m", "dramatiq", "bench_peers.dramatiq_peer",
        "--processes", str(settings["processes"]), "--threads", str(settings["threads"]),
    ]  # fmt: skip
    with Redis.over(folder, PORT), workers(folder, command):
        _seen(echo.send(PAYLOAD))
        meter.begin()
        depth = outstanding // settings["lanes"]
        lanes = [
            threading.Thread(target=_lane, args=(meter, depth)) for _ in range(settings["lanes"])
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
