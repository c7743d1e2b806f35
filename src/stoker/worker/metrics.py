"""A worker's own Prometheus endpoint: the figures of this process under the catalogue's names."""

import asyncio
from collections.abc import Callable

from stoker.model.completion import Completion
from stoker.observe import catalogue
from stoker.observe.metrics import Metrics, start_endpoint

from .figures import WorkerFigures

REFRESH_SECONDS = 1.0


class WorkerMetrics:
    """Keeps the endpoint's values up to date."""

    def __init__(self, figures: Callable[[], WorkerFigures], port: int) -> None:
        """Serve on loopback.

        Raises:
            BadInput: the port is taken.
        """
        self._figures = figures
        self.metrics = Metrics()
        self.endpoint = start_endpoint(self.metrics, port)

    async def run(self) -> None:
        """Refresh until cancelled; then stop serving."""
        try:
            while True:
                self.refresh()
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            self.endpoint.close()

    def refresh(self) -> None:
        """Bring every value up to date."""
        now = self._figures()
        for name, one in now.classes.items():
            self.metrics.set(catalogue.WORKER_SLOTS, one.slots, worker_class=name)
            self.metrics.set(catalogue.RUNNING_ACTIONS, one.busy, worker_class=name)
            self.metrics.set(catalogue.WORKER_BUSY_SHARE, one.busy_share, worker_class=name)
            for status, count in one.statuses.items():
                self.metrics.total(catalogue.ACTIONS, count, worker_class=name, status=status)
        for code, count in now.faults.items():
            side, _, short = code.partition(":")
            self.metrics.total(catalogue.FAULTS, count, code=short, side=side)
        self.metrics.total(catalogue.LATE_RESULTS, now.stale)
        self.metrics.set(catalogue.BOXES_ALIVE, now.boxes_alive)
        self.metrics.set(catalogue.BOXES_LEAKED, now.boxes_leaked)
        self.metrics.set(catalogue.BOXES_READY, now.boxes_ready)
        self.metrics.total(catalogue.BOXES, now.boxes_taken, ready="yes")
        self.metrics.total(catalogue.BOXES, now.boxes_made, ready="no")

    def observe(self, worker_class: str, completion: Completion) -> None:
        """Record one reported result."""
        timings = completion.timings
        self.metrics.observe(
            catalogue.EXECUTION_SECONDS,
            timings.run_seconds,
            worker_class=worker_class,
            status=completion.status.value,
        )
        self.metrics.observe(
            catalogue.BOOT_SECONDS, timings.boot_seconds, worker_class=worker_class
        )
