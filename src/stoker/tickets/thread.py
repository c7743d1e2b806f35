"""A ``TicketWorker`` for consumers that are ordinary functions: Celery, Dramatiq, RQ.

One thread with an event loop of its own runs the worker; any number of the consumer's threads may
call ``run`` at once.
"""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from stoker.tickets.worker import TicketWorker


class TicketThread:
    """A worker in a thread; start it after the consumer has forked."""

    def __init__(self, run_directory: Path, worker_class: str, *, name: str) -> None:
        """See ``TicketWorker``."""
        self._worker = TicketWorker(run_directory, worker_class, name=name)
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=f"tickets-{name}", daemon=True
        )

    def start(self) -> Self:
        """Start the worker and wait until it serves. Raises what ``TicketWorker`` raises."""
        self._thread.start()
        self._ready.result()
        return self

    def run(self, action_id: str, timeout_seconds: float | None = None) -> bool:
        """Carry out one action; see ``TicketWorker.run``.

        Raises:
            TimeoutError: it takes longer than ``timeout_seconds``; it goes on under its lease.
        """
        loop = self._ready.result()
        running = asyncio.run_coroutine_threadsafe(self._worker.run(action_id), loop)
        return running.result(timeout_seconds)

    def close(self) -> None:
        """Finish what is in hand and end the worker."""
        if not self._thread.is_alive():
            return
        self._ready.result().call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self) -> None:
        try:
            async with self._worker:
                self._ready.set_result(asyncio.get_running_loop())
                await self._ending.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
