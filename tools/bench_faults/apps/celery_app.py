"""Celery at its documented durable settings: late acknowledgement, lost workers' tasks back."""

import os
import sys

from celery import Celery
from jobs import job

VISIBILITY_SECONDS = 15
"""Its guide: longer than the longest job (but for the one that is cancelled)."""

app = Celery("faults", broker=os.environ["BENCH_REDIS"], backend=os.environ["BENCH_REDIS"])
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_track_started=True,
    broker_transport_options={"visibility_timeout": VISIBILITY_SECONDS},
    broker_connection_retry_on_startup=True,
)


@app.task(name="job")
def run(kind: str, key: str) -> None:
    """Run one job."""
    job(kind, key)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["submit", kind, *keys]:
            for key in keys:
                print(run.apply_async((kind, key), task_id=key).id)
        case ["cancel", *keys]:
            for key in keys:
                app.control.revoke(key, terminate=True, signal="SIGKILL")
        case ["state", key]:
            states = {"SUCCESS": "done", "FAILURE": "failed", "REVOKED": "cancelled"}
            print(states.get(app.AsyncResult(key).state, "waiting"))
