"""A Celery application whose one task carries out an action by its id.

The broker is Celery's file system transport, so that nothing has to be installed; it forgets what
a killed worker had fetched. Any other broker is one line: set ``CELERY_BROKER``.
"""

import atexit
import os
import threading
from functools import cache
from pathlib import Path

from billiard.process import current_process
from celery import Celery

from stoker.tickets import TicketThread

RUN = Path(os.environ.get("STOKER_RUN_DIRECTORY", "."))
FOLDER = os.environ.get("TICKETS_FOLDER", "celery-broker")

app = Celery("tickets", broker=os.environ.get("CELERY_BROKER", "filesystem://"))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
if app.conf.broker_url.startswith("filesystem"):
    folders = ("data_folder_in", "data_folder_out", "control_folder", "processed_folder")
    Path(FOLDER).mkdir(parents=True, exist_ok=True)
    app.conf.broker_transport_options = dict.fromkeys(folders, FOLDER)

_starting = threading.Lock()


@cache
def _worker() -> TicketThread:
    index = getattr(current_process(), "index", 0)
    started = TicketThread(RUN, "tools", name=f"celery-{index}").start()
    atexit.register(started.close)
    return started


def worker() -> TicketThread:
    """Return this process's worker; made on first use, so after Celery has forked."""
    with _starting:
        return _worker()


@app.task(name="tickets.carry_out")
def carry_out(action_id: str) -> None:
    """Carry out one action; one that waits on is published again, so nothing is retried here."""
    worker().run(action_id)
