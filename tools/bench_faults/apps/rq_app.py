"""RQ: abandoned jobs are retried up to three times."""

import os
import sys

import redis
from jobs import job
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.job import Job

connection = redis.Redis.from_url(os.environ["BENCH_REDIS"])


def run(kind: str, key: str) -> None:
    """Run one job."""
    job(kind, key)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["submit", kind, *keys]:
            for key in keys:
                queue = Queue("faults", connection=connection)
                retry = Retry(max=3)
                print(queue.enqueue("rq_app.run", kind, key, job_id=key, retry=retry).id)
        case ["cancel", *keys]:
            for key in keys:
                found = Job.fetch(key, connection=connection)
                if found.get_status() == "started":
                    send_stop_job_command(connection, key)
                else:
                    found.cancel()
        case ["state", key]:
            status = str(Job.fetch(key, connection=connection).get_status(refresh=True).value)
            states = {"finished": "done", "failed": "failed", "stopped": "cancelled"}
            states["canceled"] = "cancelled"
            print(states.get(status, "waiting"))
