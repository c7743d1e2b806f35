"""Dramatiq on Redis: acknowledged after the work, retried; a dead worker's messages come back."""

import os
import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from jobs import job

lease_ms = int(float(os.environ["BENCH_LEASE"]) * 1000)
dramatiq.set_broker(
    RedisBroker(
        url=os.environ["BENCH_REDIS"], heartbeat_timeout=lease_ms, maintenance_chance=100_000
    )
)


@dramatiq.actor(max_retries=3, min_backoff=500, time_limit=600_000)
def run(kind: str, key: str) -> None:
    """Run one job."""
    job(kind, key)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["submit", kind, *keys]:
            for key in keys:
                print(run.send(kind, key).message_id)
        case ["cancel", *_]:
            sys.exit("no cancel")
        case ["state", _]:
            print("unknown")
