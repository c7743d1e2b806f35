"""Where tickets are brought: one action each, within the slots of one worker class.

A ticket may be lost, doubled, late or wrong: it is a hint, and the ledger alone says whether there
is anything to do. Whoever brings one is told whether the message has done its work.
"""

import asyncio

from stoker.broker.base import ActionsRequest, Ledger
from stoker.errors import ConfigInvalid
from stoker.model.action import ActionState
from stoker.model.ids import ActionId

from .loop import Worker

_WAITING = (ActionState.PARKED, ActionState.ACCEPTED)


class TicketDesk:
    """Leases and carries out what it is brought, one action per ticket."""

    def __init__(self, worker: Worker, ledger: Ledger, worker_class: str, slots: int) -> None:
        self._worker = worker
        self._ledger = ledger
        self._worker_class = worker_class
        self._slots = asyncio.Semaphore(slots)
        self._open = asyncio.Event()
        self._open.set()

    async def run(self, action_id: ActionId) -> bool:
        """Carry out one action; waits for a free slot first.

        Returns:
            ``True`` when the message has done its work and may be dropped: the result is in the
            ledger, or there was nothing to do (over, cancelled, unknown, in other hands).
            ``False`` when the action waits on: bring it again later.

        Raises:
            LedgerUnavailable: nobody answers; bring it again later.
            ConfigInvalid: the action is of another worker class.
        **Cancellation:** work that has begun goes on under its lease, but its slot is free: let a
        task of its own wait for it.
        """
        async with self._slots:
            await self._open.wait()
            if await self._worker.bring(action_id):
                return await self._worker.seen_out(action_id)
            if not await self._waits(action_id):
                return True
            if not await self._alone(action_id):
                return not await self._waits(action_id)
            return await self._worker.seen_out(action_id)

    async def _waits(self, action_id: ActionId) -> bool:
        """Return whether the action is in nobody's hands and has no result."""
        found = (await self._ledger.actions(ActionsRequest(action_ids=(action_id,)))).actions
        for view in found:
            of = view.action.worker_class
            if of != self._worker_class:
                raise ConfigInvalid(
                    f"the ticket {action_id} is of worker class {of!r}, this worker serves "
                    f"{self._worker_class!r}; nothing was run; bring it to a worker of its class"
                )
        return any(view.state in _WAITING for view in found)

    async def _alone(self, action_id: ActionId) -> bool:
        """Lease with empty hands: a suspect of a poison is refused beside other work (I5)."""
        if not self._open.is_set():
            return False  # another one waits for that already
        self._open.clear()
        try:
            await self._worker.quiet()
            return await self._worker.bring(action_id)
        finally:
            self._open.set()
