"""A worker inside somebody else's consumer: boxes, limits and leases of the run, tickets of theirs.

It has the class's slots, sends its own heartbeats and kills its own boxes when it loses the ledger,
as every worker does; it never polls for work, and it ends when its run has had no coordinator for
``workers.idle_exit``. One living worker has a name; a consumer that comes
back under the same name first ends whatever its predecessor left behind.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from stoker.errors import ConfigInvalid, WorkerLost
from stoker.model.ids import ActionId
from stoker.tickets.place import settings_of
from stoker.worker.desk import TicketDesk
from stoker.worker.home import WorkerHome
from stoker.worker.log import open_log
from stoker.worker.service import Service


class TicketWorker:
    """Carries out the actions of one worker class by ticket; ``async with`` it.

    Raises (on entering):
        RunNotFound: there is no such run (yet).
        ConfigInvalid: the class is not one that goes by ticket.
        RunOwned: a living worker has this name.
        IsolationUnavailable: the class cannot have its isolation on this host.
    **Cancellation** and leaving: takes nothing new, finishes what is in hand.
    """

    def __init__(self, run_directory: Path, worker_class: str, *, name: str) -> None:
        """``name``: stable, and another one for each process of a host."""
        self._run_directory = run_directory.absolute()
        self._class = worker_class
        self._name = name
        self._stack = AsyncExitStack()
        self._working: set[asyncio.Task[bool]] = set()
        self._desk: TicketDesk
        self._serving: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        settings = settings_of(self._run_directory)
        if self._class not in settings.workers.ticket_classes:
            raise ConfigInvalid(
                f"worker class {self._class!r} of {self._run_directory} does not go by ticket "
                f"({', '.join(settings.workers.ticket_classes) or 'none does'}); nothing was "
                f"started; set workers.classes.{self._class}.by_ticket = true for the run"
            )
        async with AsyncExitStack() as stack:
            home = WorkerHome(self._run_directory, self._name)
            stack.callback(home.close)
            log = open_log(
                self._run_directory / "logs" / f"worker-{self._name}.log",
                level=settings.observe.log_level,
                worker=self._name,
            )
            service = Service(home, settings, log, ticket_class=self._class)
            await service.open(stack, None)
            assert service.desk is not None, "a service for tickets has a desk"
            self._desk = service.desk
            self._serving = asyncio.create_task(service.run(), name="ticket-worker")
            stack.push_async_callback(self._end, service)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, action_id: str) -> bool:
        """Carry out one action; waits for a free slot.

        Returns whether the message has done its work: acknowledge it on ``True``; bring it again
        later on ``False`` (or drop it: it is published again while the action waits).

        Raises:
            LedgerUnavailable: nobody answers; bring it again later.
            ConfigInvalid: the action is of another worker class.
            WorkerLost: this worker has ended, for instance since its run is over; start another.
        **Cancellation:** the ticket is worked off all the same, within its slot and its lease.
        """
        working = asyncio.create_task(self._desk.run(ActionId(action_id)))
        self._working.add(working)
        working.add_done_callback(self._done)
        await asyncio.wait({working, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            raise WorkerLost(
                f"the worker {self._name} has ended (its run may be over); {action_id} was not "
                f"finished by it; its log is in {self._run_directory / 'logs'}"
            )
        return working.result()

    def _done(self, working: "asyncio.Task[bool]") -> None:
        self._working.discard(working)
        if not working.cancelled():
            working.exception()  # whoever brought it may have stopped waiting

    async def _end(self, service: Service) -> None:
        service.end()
        await self._serving
