"""DBOS with a queue on PostgreSQL; a process that comes back recovers what it was at."""

import os
import sys
import threading

from dbos import DBOS, DBOSClient, DBOSConfig
from jobs import job

url = os.environ["BENCH_POSTGRES"]


config: DBOSConfig = {"name": "faults", "system_database_url": url, "run_admin_server": False}


def migrate() -> None:
    """Make the tables."""
    DBOS(config=config)
    DBOS.launch()
    DBOS.destroy()


def serve() -> None:
    """Run workflows until ended."""
    DBOS(config=config)

    @DBOS.step(name="act")
    def act(kind: str, key: str) -> None:
        job(kind, key)

    @DBOS.workflow(name="job", max_recovery_attempts=3)
    def run(kind: str, key: str) -> None:
        act(kind, key)

    DBOS.launch()
    DBOS.register_queue("faults", worker_concurrency=2, polling_interval_sec=0.2)
    threading.Event().wait()


def main() -> None:
    """Submit, cancel or look."""
    client = DBOSClient(system_database_url=url)
    match sys.argv[1:]:
        case ["submit", kind, *keys]:
            for key in keys:
                client.enqueue(
                    {"workflow_name": "job", "queue_name": "faults", "workflow_id": key}, kind, key
                )
                print(key)
        case ["cancel", *keys]:
            for key in keys:
                client.cancel_workflow(key)
        case ["state", key]:
            status = client.retrieve_workflow(key).get_status().status
            states = {"SUCCESS": "done", "ERROR": "failed", "CANCELLED": "cancelled"}
            states["MAX_RECOVERY_ATTEMPTS_EXCEEDED"] = "failed"
            print(states.get(status, "waiting"))


if __name__ == "__main__":
    {"serve": serve, "migrate": migrate}.get(sys.argv[1], main)()
