"""Batches by themselves: while one request is in flight, what comes in gathers for the next.

No timer and no size to tune: a lone item goes at once, a crowd goes together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BATCH_MAX = 256


class Batcher(Generic[Item, Answer]):
    """Turns single questions into batched ones."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Answer:
        """Return the answer to ``item``.

        Raises: what sending raised. **Cancellation:** the item may be sent all the same.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._sender is None:
            self._sender = asyncio.create_task(self._drain(), name="batcher")
        return await future

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                await self._one(batch)
        finally:
            self._sender = None

    async def _one(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(
                        error if isinstance(error, Exception) else asyncio.CancelledError()
                    )
                    future.exception()  # an asker that was cancelled never looks
            if not isinstance(error, Exception):
                raise
            return
        assert len(answers) == len(batch), f"{len(batch)} questions got {len(answers)} answers"
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
