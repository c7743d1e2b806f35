"""Puts tickets into a queue that is not ours, at least once each, whoever dies.

Nothing is remembered outside this process: what is queued stands in the ledger. A publisher that
starts anew publishes every head of a queue again; a ticket that nobody came with in time is
published again, since the other queue may have lost it. At most ``window`` tickets of a class and
run are out at once, so that publishing again cannot flood a queue whose consumers are slow.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from stoker.broker.base import Ledger, Ticket, TicketsRequest
from stoker.errors import LedgerUnavailable
from stoker.model.ids import ActionId
from stoker.seams.clock import Clock, SystemClock
from stoker.seams.entropy import jittered

Publish = Callable[[Ticket], Awaitable[object]]
"""Hands one ticket to the other queue; returns when that queue has it, raises when it has not."""

_POLL_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
"""Between two looks while the queue moves: what changes meanwhile is published together."""
_RETRY_SECONDS = 1.0
_PUBLISH_SECONDS = 10.0
"""A queue that has not taken a ticket by then counts as one that refused it."""
_log = logging.getLogger("stoker.tickets")


class _Published(NamedTuple):
    delivery: int
    again_at: float
    """When it is published again, if it still waits then."""


class Publisher:
    """Publishes the tickets of one ledger. Several at once only double tickets."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        republish_seconds: float = 30.0,
        window: int = 256,
        clock: Clock | None = None,
    ) -> None:
        """``republish_seconds``: a ticket nobody came with for this long is published again."""
        self._ledger = ledger
        self._republish = republish_seconds
        self._window = window
        self._clock = clock or SystemClock()
        self._heads: tuple[Ticket, ...] = ()
        self._mark = ""
        self._published: dict[ActionId, _Published] = {}

    async def run(self, publish: Publish) -> None:
        """Publish until cancelled, through every failure of ``publish`` and of the ledger.

        **Cancellation:** a ticket that was on its way may or may not have been published; the next
        publisher publishes it again.
        """
        while True:
            try:
                await self._look()
                taken = await self._publish(publish)
            except LedgerUnavailable as error:
                _log.warning("tickets wait: %s", error.message)
                taken = False
            await asyncio.sleep(_PAUSE_SECONDS if taken else jittered(_RETRY_SECONDS))

    async def _look(self) -> None:
        """See what is queued; wait while that is known and nothing is due again."""
        due = min(map(self._wanting, self._heads), default=_POLL_SECONDS)
        reply = await self._ledger.tickets(
            TicketsRequest(
                mark=self._mark,
                limit=self._window,
                wait_seconds=max(0.0, min(due, _POLL_SECONDS)),
            )
        )
        if reply.mark != self._mark:
            self._mark, self._heads = reply.mark, reply.tickets
            queued = {ticket.action_id for ticket in reply.tickets}
            self._published = {i: one for i, one in self._published.items() if i in queued}

    def _wanting(self, ticket: Ticket) -> float:
        """Return in how many seconds a ticket is to be published (again)."""
        known = self._published.get(ticket.action_id)
        if known is None or known.delivery != ticket.delivery:
            return 0.0
        return known.again_at - self._clock.monotonic()

    async def _publish(self, publish: Publish) -> bool:
        """Publish what is due; stop at the first that is refused, and let others go before it."""
        for ticket in [one for one in self._heads if self._wanting(one) <= 0]:
            try:
                async with asyncio.timeout(_PUBLISH_SECONDS):
                    await publish(ticket)
            except Exception as error:  # noqa: BLE001 - a boundary: any client may raise anything
                _log.warning("the queue did not take a ticket: %r; it is tried again", error)
                self._note(ticket, _RETRY_SECONDS)
                return False
            self._note(ticket, self._republish)
        return True

    def _note(self, ticket: Ticket, again_seconds: float) -> None:
        again_at = self._clock.monotonic() + again_seconds
        self._published[ticket.action_id] = _Published(ticket.delivery, again_at)
