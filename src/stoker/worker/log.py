"""The worker's log: JSON lines in ``RUN/logs/worker-NAME.log``, one event name each.

Nothing of a tool's output and no input is ever written here: ids, figures, our own messages. Only
what a box asks of the egress proxy is: names, and the first bytes of a request it refused.
"""

from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from stoker.seams.faultpoints import declare, reach

WORKER_LOG = declare("worker.log.write", "a line of a worker's log is written", "disk_full")

EVENTS: dict[str, str] = {
    "worker_started": "The process is up; says what it offers.",
    "worker_ended": "The process ends in order.",
    "worker_failed": "The process cannot serve; ``failed.json`` holds the fault.",
    "boxes_swept": "Boxes of dead incarnations were removed.",
    "enrolled": "The ledger knows this incarnation.",
    "fenced": "Out of contact: boxes killed, environments given up, another incarnation begins.",
    "finished": "An action's result was handed in, with what the ledger made of it.",
    "stopped": "A job ended without a result, with the reason.",
    "slots_changed": "A class runs more or fewer actions at once; says why.",
    "stale_result": "A result came under a lease that was no longer ours.",
    "start_refused": "The ledger refused to let work begin.",
    "result_refused": "The ledger could not take a result; a typed fault goes instead.",
    "release_refused": "The ledger refused to take leases back.",
    "verdict_too_old": "This process was stopped after asking to begin; it asks again.",
    "ledger_unavailable": "The ledger does not answer; tried again.",
    "poll_failed": "A poll for work failed; tried again.",
    "heartbeat_failed": "A heartbeat failed; tried again.",
    "leases_left_to_run_out": "The ledger could not be told that this worker ends.",
    "box_ahead_failed": "A box could not be made ahead; whoever needs one makes it and hears why.",
    "box_leaked": "A box could not be removed.",
    "backend_close_failed": "A backend could not let go of everything.",
    "file_not_written": "A status or identity file could not be written (a full disk).",
    "idle": "No coordinator and no work for long enough; the worker ends.",
    "signal": "A signal asked the worker to end.",
}
"""Event name → what it says. A line has one of these names (a test holds the worker to it)."""


class Lines:
    """The file: a line that the disk has no room for is lost, and the work goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> None:
        """Write a line."""
        with suppress(OSError):
            reach(WORKER_LOG)
            self._file.write(line)

    def flush(self) -> None:
        """Hand it to the system."""
        with suppress(OSError):
            self._file.flush()


def open_log(path: Path, *, level: str, **fields: str) -> FilteringBoundLogger:
    """Open the log at ``path`` for appending; every line carries ``fields``.

    Raises:
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lines go out as they are written; the file lives as long as the process.
    file = path.open("a", encoding="ascii", buffering=1)
    logger = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", Lines(file))),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return cast("FilteringBoundLogger", logger.bind(**fields))
