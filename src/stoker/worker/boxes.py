"""The boxes of one worker: which backend makes them, how many live, and that all of them go.

Boxes are torn down in the background, a few at a time, since whoever asked has its result already;
``close`` waits for all of it. A box that could not be removed is counted as leaked and tried once
more at the end. Some may wait for use, made ahead (``ready``).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from stoker.errors import StokerError
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.model.tools import Tests, Verdict
from stoker.sandbox.base import Backend, Box, BoxOffer
from stoker.seams.clock import Clock, SystemClock
from stoker.seams.entropy import fresh_id

from .ready import ReadyBoxes

TEARDOWNS_MAX = 4
"""Boxes torn down at once: removal must not starve the boxes that work."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The backend for one policy, and what it gives."""

    backend: Backend
    offer: BoxOffer


Chooser = Callable[[ExecutionPolicy], Awaitable[Chosen]]
"""Picks the backend for a policy. Raises ``IsolationUnavailable``; nothing is weakened."""


class Boxes:
    """Makes boxes, counts them and sees them gone."""

    def __init__(
        self, choose: Chooser, log: FilteringBoundLogger, clock: Clock | None = None
    ) -> None:
        self._choose = choose
        self._log = log
        self._chosen: dict[tuple[Isolation, Trust, bool], Chosen] = {}
        self._choosing = asyncio.Lock()
        self._alive: dict[str, Box] = {}
        self._stuck: dict[str, Box] = {}
        self._making = 0
        self.made = 0
        """Boxes made for somebody who waited for them."""
        self.ready = ReadyBoxes(
            self._make,
            self.discard,
            self.memory_short,
            clock or SystemClock(),
            log,
            light=self._is_light,
        )
        self._unswept = 0
        self._teardowns: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(TEARDOWNS_MAX)
        self.reserve_memory_bytes = 0
        """Memory the boxes together leave to the rest of the host."""
        self.memory_available: Callable[[], int | None] = lambda: None
        self.cpu_pressure: Callable[[], float | None] = lambda: None
        """Share of time in which somebody waits for a core, where the host says so."""

    @property
    def alive(self) -> int:
        """Boxes that exist, or are being made or removed."""
        return len(self._alive) + self._making

    @property
    def leaked(self) -> int:
        """Boxes that could not be removed, ours or a dead incarnation's."""
        return len(self._stuck) + self._unswept

    def has_room(self) -> bool:
        """Return whether work for more boxes should be taken on now; one box is always allowed."""
        return self.alive <= len(self.ready) or not self.memory_short()

    def memory_short(self) -> bool:
        """Return whether the host has less memory left than boxes are to leave it."""
        if not self.reserve_memory_bytes:
            return False
        available = self.memory_available()
        return available is not None and available < self.reserve_memory_bytes

    async def backend(self, policy: ExecutionPolicy) -> Chosen:
        """Return the backend for ``policy``.

        Raises:
            IsolationUnavailable: this host cannot give it.
        """
        # Mounts and limits are checked for each box; what a host can give depends on these alone.
        key = (policy.isolation, policy.trust, policy.accept_shared_kernel)
        if (known := self._chosen.get(key)) is not None:
            return known
        async with self._choosing:
            if key not in self._chosen:
                self._chosen[key] = await self._choose(policy)
            return self._chosen[key]

    async def create(
        self,
        baseline: Baseline,
        policy: ExecutionPolicy,
        begins: Checkpoint | None = None,
        *,
        worker_class: str = "",
    ) -> Box:
        """Return a box, fresh or in a saved state; one that waited for its class, where one did.

        **Cancellation:** what was made is removed.

        Raises:
            IsolationUnavailable: this host cannot give the policy.
            ArtifactDamaged: the saved state is not what it was.
            BoxFailed: making it failed; nothing is left.
        """
        if begins is None and (box := self.ready.take(worker_class, baseline, policy)) is not None:
            return box
        self.made += 1
        return await self._make(baseline, policy, begins)

    async def _is_light(self, policy: ExecutionPolicy) -> bool:
        """Return whether its boxes take next to nothing while they wait: no guest, no program."""
        isolation = (await self.backend(policy)).offer.isolation
        return isolation in (Isolation.PROCESS, Isolation.NAMESPACE) and not policy.warm

    async def _make(
        self, baseline: Baseline, policy: ExecutionPolicy, begins: Checkpoint | None = None
    ) -> Box:
        chosen = await self.backend(policy)
        box_id = fresh_id("box_")
        self._making += 1
        try:
            if begins is None:
                box = await chosen.backend.create(box_id, baseline, policy)
            else:
                box = await chosen.backend.restore(box_id, baseline, policy, begins)
        finally:
            self._making -= 1
        self._alive[box_id] = box
        return box

    async def judge(
        self,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Grade ``files``; the backend makes and removes the boxes this takes.

        Raises:
            BoxFailed: an infrastructure fault; never a verdict.
        """
        chosen = await self.backend(policy)
        self._making += 1
        try:
            return await chosen.backend.judge(
                fresh_id("box_"), files, tests, policy=policy, timeout_seconds=timeout_seconds
            )
        finally:
            self._making -= 1

    def discard(self, box: Box) -> None:
        """See the box gone, in the background."""
        task = asyncio.create_task(self._tear_down(box), name=f"teardown {box.box_id}")
        self._teardowns.add(task)
        task.add_done_callback(self._teardowns.discard)

    async def settled(self) -> None:
        """Wait until every discarded box is gone or counted as leaked."""
        while self._teardowns:
            await asyncio.wait(set(self._teardowns))

    async def sweep(self) -> int:
        """Remove what dead incarnations left behind; return how many boxes that were."""
        swept = 0
        for chosen in self._unique():
            try:
                swept += await chosen.backend.sweep()
            except StokerError as error:
                # Serving goes on: the count of leaked boxes says that somebody must look.
                self._unswept += 1
                self._log.error("box_leaked", error=error.message)
        return swept

    async def close(self) -> None:
        """Remove every box and let go of the backends."""
        await self.ready.close()
        for box in list(self._alive.values()):
            self.discard(box)
        await self.settled()
        for chosen in self._unique():
            try:
                await chosen.backend.close()
            except (StokerError, OSError) as error:
                self._log.error("backend_close_failed", error=str(error))

    def _unique(self) -> list[Chosen]:
        return list({id(chosen.backend): chosen for chosen in self._chosen.values()}.values())

    async def _tear_down(self, box: Box) -> None:
        async with self._room:
            try:
                await box.destroy()
            except Exception as error:  # noqa: BLE001 - a failed removal is counted, whatever it was
                self._stuck[box.box_id] = box
                self._log.error("box_leaked", box=box.box_id, error=str(error))
            else:
                self._stuck.pop(box.box_id, None)
                self._alive.pop(box.box_id, None)
