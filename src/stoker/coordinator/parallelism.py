"""How many model calls of one rollout are on the lane at once, where admission bounds that."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stoker.model.ids import RolloutId


class Parallelism:
    """Places on the lane, per rollout; first come first served within one."""

    def __init__(self) -> None:
        self._bound: int | None = None
        self._taken: Counter[RolloutId] = Counter()
        self._waiting: dict[RolloutId, deque[asyncio.Future[None]]] = {}

    def limit(self, bound: int | None) -> None:
        """Allow each rollout ``bound`` calls from now on, ``None`` any number; those on the lane
        go on.
        """  # noqa: D205 - one thought
        assert bound is None or bound >= 1, "a rollout without any call never ends"
        self._bound = bound
        for rollout in list(self._waiting):
            self._let_in(rollout)

    @asynccontextmanager
    async def place(self, rollout: RolloutId) -> AsyncIterator[None]:
        """Hold one of the rollout's places; waits for one.

        **Cancellation:** the place, or the wait for it, is given up.
        """
        if not self._has_place(rollout):
            await self._wait(rollout)
        else:
            self._taken[rollout] += 1
        try:
            yield
        finally:
            self._give_back(rollout)

    async def _wait(self, rollout: RolloutId) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(rollout)
            raise

    def _has_place(self, rollout: RolloutId) -> bool:
        return self._bound is None or self._taken[rollout] < self._bound

    def _give_back(self, rollout: RolloutId) -> None:
        self._taken[rollout] -= 1
        if not self._taken[rollout]:
            del self._taken[rollout]
        self._let_in(rollout)

    def _let_in(self, rollout: RolloutId) -> None:
        waiting = self._waiting.get(rollout)
        while waiting and self._has_place(rollout):
            turn = waiting.popleft()
            if not turn.done():
                self._taken[rollout] += 1
                turn.set_result(None)
        if waiting is not None and not waiting:
            del self._waiting[rollout]
