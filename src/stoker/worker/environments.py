"""Environments this incarnation holds: one serial queue each, and which life of it this is.

An action meant for another generation, or for an environment that is not here, is answered with
``environment_lost``; it never meets the bare baseline by mistake. After a timeout the files are
kept and every later program that runs there is told that the environment had been interrupted.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stoker.errors import EnvironmentLost
from stoker.model.ids import EnvironmentId, Fence
from stoker.sandbox.base import Box

from .boxes import Boxes


@dataclass(slots=True)
class HeldEnvironment:
    """One environment and its box."""

    environment_id: EnvironmentId
    generation: int
    box: Box
    opened_by: Fence
    """Lease under which it was opened."""
    interrupted: bool = False
    """One of its actions was cut short: processes were killed, files kept."""


class Environments:
    """All environments of one worker incarnation."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._held: dict[EnvironmentId, HeldEnvironment] = {}
        self._turns: defaultdict[EnvironmentId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._queued: Counter[EnvironmentId] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def turn(self, environment_id: EnvironmentId | None) -> AsyncIterator[None]:
        """Have the environment to oneself, in order of asking; at once for ``None``."""
        if environment_id is None:
            yield
            return
        self._queued[environment_id] += 1
        try:
            async with self._turns[environment_id]:
                yield
        finally:
            self._queued[environment_id] -= 1
            if not self._queued[environment_id]:
                del self._queued[environment_id]
                del self._turns[environment_id]

    def get(self, environment_id: EnvironmentId | None, generation: int) -> HeldEnvironment:
        """Return the environment in that life of it.

        Raises:
            EnvironmentLost: it is not here.
        """
        held = self._held.get(environment_id) if environment_id is not None else None
        if held is None or held.generation != generation:
            here = "not held by this worker" if held is None else f"generation {held.generation}"
            raise EnvironmentLost(
                f"environment {environment_id} generation {generation} is gone ({here}); nothing "
                "was run; it can only come back as its next generation",
                environment=environment_id,
                generation=generation,
            )
        return held

    def hold(self, held: HeldEnvironment) -> None:
        """Keep a box as this life of its environment; an earlier life's box is removed."""
        self.drop(held.environment_id)
        self._held[held.environment_id] = held

    def disown(self, environment_id: EnvironmentId, opened_by: Fence) -> None:
        """Let go of what was opened under a lease whose result nobody wants."""
        held = self._held.get(environment_id)
        if held is not None and held.opened_by == opened_by:
            self.drop(environment_id)

    def drop(self, environment_id: EnvironmentId, *, up_to: int | None = None) -> bool:
        """Let go of the environment, if held (in a life of at most ``up_to``); say whether."""
        held = self._held.get(environment_id)
        if held is None or (up_to is not None and held.generation > up_to):
            return False
        del self._held[environment_id]
        self._boxes.discard(held.box)
        return True

    def drop_all(self) -> int:
        """Let go of every environment; return how many there were."""
        count = len(self._held)
        for environment_id in list(self._held):
            self.drop(environment_id)
        return count
