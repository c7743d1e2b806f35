"""Calls of Ray actors, whose results go when the reference does. Nothing of it is kept."""

import os
from collections import deque
from pathlib import Path

import ray

from bench_peers.meter import PAYLOAD, Meter

PACKAGES = ("ray",)
DURABILITY = "keeps nothing"
SETTINGS = {"actors": 1, "together": 64}
"""``together``: how many of the oldest results are fetched by one call."""


@ray.remote
class Echo:
    """An actor that does nothing."""

    def call(self, given: bytes) -> bytes:
        """Do nothing."""
        return given


def work(folder: Path, meter: Meter, outstanding: int, settings: dict[str, int]) -> None:
    """Bring everything up, pass round trips through, bring it down."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home directory
    ray.init(
        num_cpus=settings["actors"], include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 1024 * 1024, _temp_dir=str(folder),
        _system_config={"metrics_report_interval_ms": 0},
    )  # fmt: skip
    given, together = PAYLOAD.encode(), settings["together"]
    actors = [Echo.remote() for _ in range(settings["actors"])]
    for actor in actors:
        assert ray.get(actor.call.remote(given)) == given
    meter.begin()
    waiting = deque([actors[n % len(actors)].call.remote(given) for n in range(outstanding)])
    while meter.going:
        found = ray.get([waiting.popleft() for _ in range(together)])
        assert all(one == given for one in found)
        meter.count(together)
        waiting.extend(actors[n % len(actors)].call.remote(given) for n in range(together))
    ray.shutdown()
