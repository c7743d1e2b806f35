"""Looking at a server now and then: its metrics, its weights, and whether it is paused.

A paused server takes calls and answers none. vLLM says so where its development routes are on;
elsewhere it is inferred: calls of ours are in flight, and in two looks in a row nothing runs. A
server that cannot be reached is not paused: its calls fail, and the lane rests it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.base import ServerLoad
from stoker.inference.http.metrics import read_page
from stoker.inference.http.replica import Replica

_LOOK_SECONDS = 10.0
"""A look that takes longer is given up; the next one follows."""


_PAUSE_SECONDS = 0.05
"""Between two looks at least, however many calls fail."""


class Watch:
    """Looks at one replica; ``in_flight`` tells how many calls of ours it has."""

    def __init__(self, replica: Replica, in_flight: Callable[[], int]) -> None:
        self._replica = replica
        self._in_flight = in_flight
        self._silent_looks = 0
        self._hurry = asyncio.Event()
        self.load: ServerLoad | None = None
        """As of the last look; ``None`` where it told nothing."""
        self.preemptions = 0
        """Sequences it put back since the first look: a look that fails takes none of them away,
        and neither does a server that starts anew."""
        self._preemptions_said: int | None = None

    @property
    def paused(self) -> bool:
        """Whether the server was paused at the last look."""
        return self.load is not None and self.load.paused

    def hurry(self) -> None:
        """Let the next look follow at once: a call failed, which may be a pause that aborts."""
        self._hurry.set()

    async def rest(self, seconds: float) -> None:
        """Return when the next look is due."""
        await asyncio.sleep(min(seconds, _PAUSE_SECONDS))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()

    async def look(self) -> None:
        """Look once; never raises."""
        offer, weights = self._replica.offer, self._replica.weights
        if not (offer.metrics or offer.pauses or weights.route):
            return
        flying = self._in_flight()
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                load = await self._figures()
                said = await self._says_paused()
                version = await weights.look()
        except (ModelUnavailable, ModelRefused, TimeoutError, ValueError):
            self.load, self._silent_looks = None, 0
            return
        paused = said if said is not None else self._seems_paused(load, flying)
        self.load = msgspec.structs.replace(load, paused=paused, weight_version=version)
        before, self._preemptions_said = self._preemptions_said, load.preemptions
        if before is not None:
            self.preemptions += max(0, load.preemptions - before)

    async def _figures(self) -> ServerLoad:
        if not self._replica.offer.metrics:
            return ServerLoad()
        page = read_page(await self._replica.link.text("/metrics"))
        return page.load if page is not None else ServerLoad()

    async def _says_paused(self) -> bool | None:
        if not self._replica.offer.pauses:
            return None
        answer = await self._replica.link.get("/is_paused")
        return bool(answer.get("is_paused")) if isinstance(answer, dict) else None

    def _seems_paused(self, load: ServerLoad, flying: int) -> bool:
        silent = self._replica.offer.metrics and min(flying, self._in_flight()) > 0
        if silent and load.running == 0:
            self._silent_looks += 1
        else:
            self._silent_looks = 0
        return self._silent_looks > 1
