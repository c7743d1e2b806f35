"""Journal appends of all rollouts, batched: while one batch is on its way the next one gathers.

Order per rollout is the order of ``append`` calls; a rollout may have several under way. The first
failure (fenced, refused) is final: it is kept, every later append fails with it and the coordinator
ends, since nothing it does can be made durable any more.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendDisposition,
    AppendReply,
    Ledger,
    SubmitDisposition,
)
from stoker.errors import InternalError, LedgerRefused, StokerError
from stoker.model.ids import ActionId, Fence, RolloutId, RunId
from stoker.seams.faultpoints import declare, reach

APPEND_BEFORE = declare("coordinator.append.before", "turns are about to be sent to the ledger")
APPEND_AFTER = declare("coordinator.append.after", "turns are committed and nobody here knows")

_BATCH_MAX = 2000
BATCH_BYTES_MAX = 16 * 1024 * 1024
"""After a stall of the ledger thousands of turns wait; together they must fit one frame."""


class Appender:
    """The one writer of a partition's journals."""

    def __init__(self, ledger: Ledger, run_id: RunId, fence: Fence, *, partition: str) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._partition = partition
        self._fence = fence
        self._queue: list[tuple[Append, asyncio.Future[AppendReply]]] = []
        self._wake = asyncio.Event()
        self._latest: asyncio.Future[AppendReply] | None = None
        self.refused: Callable[[RolloutId, ActionId], None] = lambda _rollout, _action: None
        """Told of a submit under a key that another action has (I7): nothing will answer it."""
        self.failure: asyncio.Future[StokerError] = asyncio.get_running_loop().create_future()
        self._unsettled: set[ActionId] = set()
        self.settled = asyncio.Event()
        """Set while every action that was submitted here is acknowledged."""
        self.settled.set()
        self._task = asyncio.create_task(self._run(), name="appender")

    def append(self, append: Append) -> asyncio.Future[AppendReply]:
        """Queue ``append``; the future gives the reply once it is committed.

        **Durability:** as the ledger's rules say for what it holds (``broker.base``).
        """
        future: asyncio.Future[AppendReply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        if self.failure.done():
            future.set_exception(self.failure.result())
            return future
        self._settle(append)
        self._queue.append((append, future))
        self._latest = future
        self._wake.set()
        return future

    def _settle(self, append: Append) -> None:
        """Note what is handed out and what is taken back; an append may do both with one."""
        self._unsettled.update(action.action_id for action in append.submits)
        self._unsettled.difference_update(append.acknowledges)
        if self._unsettled:
            self.settled.clear()
        else:
            self.settled.set()

    async def flush(self) -> None:
        """Return once everything queued so far is committed; what is queued later is not waited
        for, so that a busy run holds nobody up.

        Raises:
            StokerError: the appender has failed.
        """  # noqa: D205 - one thought
        if self._latest is not None:
            either: set[asyncio.Future[Any]] = {self._latest, self.failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            raise self.failure.result()

    async def close(self) -> None:
        """Stop; what was queued and not sent is dropped."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self.failure.cancel()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                count = self._fitting()
                batch, self._queue = self._queue[:count], self._queue[count:]
                try:
                    await self._send(batch)
                except StokerError as error:
                    self._fail(error, batch)
                    return

    def _fitting(self) -> int:
        """Return how many of the queue go together, at least one."""
        size = count = 0
        for append, _ in self._queue[:_BATCH_MAX]:
            size += _inline_bytes(append)
            if count and size > BATCH_BYTES_MAX:
                break
            count += 1
        return count

    async def _send(self, batch: list[tuple[Append, asyncio.Future[AppendReply]]]) -> None:
        reach(APPEND_BEFORE)
        reply = await self._ledger.append(
            AppendBatch(
                run_id=self._run_id,
                partition=self._partition,
                fence=self._fence,
                appends=tuple(append for append, _ in batch),
            )
        )
        reach(APPEND_AFTER)
        if len(reply.replies) != len(batch):
            raise InternalError("the ledger answered another number of appends than were sent")
        for (append, future), one in zip(batch, reply.replies, strict=True):
            if one.disposition is AppendDisposition.CONFLICT:
                raise LedgerRefused(
                    f"the journal of {append.rollout_id} has {one.seq} entries where this "
                    f"coordinator knows {append.expected_seq}; it ends without writing"
                )
            if not future.done():
                future.set_result(one)
            for action, submitted in zip(append.submits, one.submits, strict=False):
                if submitted is SubmitDisposition.CONFLICT:
                    self.refused(append.rollout_id, action.action_id)

    def _fail(
        self, error: StokerError, batch: list[tuple[Append, asyncio.Future[AppendReply]]]
    ) -> None:
        if not self.failure.done():
            self.failure.set_result(error)
        for _, future in [*batch, *self._queue]:
            if not future.done():
                future.set_exception(error)
        self._queue.clear()


def _inline_bytes(append: Append) -> int:
    inputs = (action.input.inline or b"" for action in append.submits)
    return sum(map(len, append.events)) + sum(map(len, inputs))


def _retrieve(future: asyncio.Future[AppendReply]) -> None:
    """Mark the exception as seen: most callers watch ``failure`` instead."""
    if not future.cancelled():
        future.exception()
