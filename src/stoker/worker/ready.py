"""Boxes made ahead: for each baseline and policy in use some wait, so that nobody waits for them.

A box that waits is an ordinary box nobody has used: written down before it exists, swept when its
worker is killed. It is handed out once, to whoever asks for exactly its class, baseline and policy.
What waits for what was last asked for longest ago goes first when a class has no room for more, all
of it when memory is short, and what nobody asked for in a while goes by itself.

Boxes are made ahead one at a time, and none while memory is short: the boxes of actions come first.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from structlog.typing import FilteringBoundLogger

from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.sandbox.base import Box
from stoker.seams.clock import Clock

_WARM_UP = RunRequest(argv=("python", "-c", "pass"))
"""Its interpreter waits once this has run."""
_WARM_UP_SECONDS = 30.0

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Ahead(NamedTuple):
    """How many boxes of a worker class wait at most, over all baselines and policies of it."""

    most: int
    idle_seconds: float
    """Those of a baseline and policy that nobody asked for so long go."""
    light: bool = False
    """Of boxes only that take next to nothing while they wait."""


@dataclass(slots=True)
class _Kind:
    """What boxes that can stand for each other have in common, and those of them that wait."""

    worker_class: str
    baseline: Baseline
    policy: ExecutionPolicy
    asked_at: float = 0.0
    failed: bool = False
    """The last one could not be made; none is made ahead until one is asked for."""
    boxes: deque[Box] = field(default_factory=deque)


class ReadyBoxes:
    """The boxes of one worker that wait for use."""

    def __init__(
        self,
        make: Callable[[Baseline, ExecutionPolicy], Awaitable[Box]],
        discard: Callable[[Box], None],
        memory_short: Callable[[], bool],
        clock: Clock,
        log: FilteringBoundLogger,
        *,
        light: Callable[[ExecutionPolicy], Awaitable[bool]],
    ) -> None:
        self._make = make
        self._light = light
        self._discard = discard
        self._memory_short = memory_short
        self._clock = clock
        self._log = log
        self._kinds: dict[tuple[str, bytes], _Kind] = {}
        self._filling: asyncio.Task[None] | None = None
        self._closed = False
        self.ahead: Mapping[str, Ahead] = {}
        """By worker class; others have none."""
        self.taken = 0
        """Boxes handed out so far."""

    def __len__(self) -> int:
        return sum(len(kind.boxes) for kind in self._kinds.values())

    def take(self, worker_class: str, baseline: Baseline, policy: ExecutionPolicy) -> Box | None:
        """Return a box that waited, now the caller's; ``None``: there is none.

        Either way others are made ahead from now on.
        """
        if self._closed or not self._most(worker_class):
            return None
        key = (worker_class, _encoder.encode((baseline, policy)))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(worker_class, baseline, policy)
        kind.asked_at, kind.failed = self._clock.monotonic(), False
        box = self._next(kind)
        self.taken += box is not None
        self._fill()
        return box

    def tend(self) -> None:
        """Let go of what nobody asked for in a while, and of all where memory is short."""
        now, short = self._clock.monotonic(), self._memory_short()
        for key, kind in list(self._kinds.items()):
            ahead = self.ahead.get(kind.worker_class)
            idle = ahead is None or now - kind.asked_at >= ahead.idle_seconds
            if short or idle:
                self._empty(kind)
            if idle:
                del self._kinds[key]
        self._fill()

    async def settled(self) -> None:
        """Wait until no box is being made ahead."""
        while self._filling is not None and not self._filling.done():
            await asyncio.wait([self._filling])

    async def close(self) -> None:
        """Discard all that wait; none is made or handed out any more."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        for kind in self._kinds.values():
            self._empty(kind)
        self._kinds.clear()

    def _most(self, worker_class: str) -> int:
        ahead = self.ahead.get(worker_class)
        return ahead.most if ahead is not None else 0

    def _next(self, kind: _Kind) -> Box | None:
        while kind.boxes:
            box = kind.boxes.popleft()
            if not box.lost:
                return box
            self._discard(box)  # a guest that ended while it waited
        return None

    def _empty(self, kind: _Kind) -> None:
        while kind.boxes:
            self._discard(kind.boxes.popleft())

    def _fill(self) -> None:
        if not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._make_ahead(), name="boxes made ahead")

    async def _make_ahead(self) -> None:
        while not self._memory_short() and (kind := self._wanted()) is not None:
            box = await self._made(kind)
            if box is None:
                kind.failed = True
            elif self._kinds_hold(kind):
                kind.boxes.append(box)
            else:  # it was idle for too long meanwhile
                self._discard(box)

    def _wanted(self) -> _Kind | None:
        """Return what one more box should wait for, having made room for it in its class."""
        for kind in sorted(self._kinds.values(), key=lambda k: k.asked_at, reverse=True):
            if kind.failed:
                continue
            most = self._most(kind.worker_class)
            of_class = [k for k in self._kinds.values() if k.worker_class == kind.worker_class]
            if sum(len(k.boxes) for k in of_class) < most:
                return kind
            longest = min((k for k in of_class if k.boxes), key=lambda k: k.asked_at)
            share = max(1, most // len(of_class))
            if longest.asked_at < kind.asked_at and len(kind.boxes) < share:
                self._discard(longest.boxes.popleft())
                return kind
        return None

    def _kinds_hold(self, kind: _Kind) -> bool:
        return any(one is kind for one in self._kinds.values())

    async def _made(self, kind: _Kind) -> Box | None:
        """Make one; ``None``: it could not be made, which whoever needs one hears for himself.

        So too where its class has none of that kind made ahead.
        """
        box = None
        try:
            if self.ahead[kind.worker_class].light and not await self._light(kind.policy):
                return None
            box = await self._make(kind.baseline, kind.policy)
            if kind.policy.warm:
                await box.run(_WARM_UP, timeout_seconds=_WARM_UP_SECONDS)
        except Exception as error:  # noqa: BLE001 - a bug in one kind must not end all in silence
            self._log.warning(
                "box_ahead_failed", worker_class=kind.worker_class, error=str(error) or repr(error)
            )
            if box is not None:
                self._discard(box)
            return None
        except BaseException:
            if box is not None:
                self._discard(box)
            raise
        return box
