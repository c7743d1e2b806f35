"""Check replays: a sample of finished rollouts is replayed once more, to find nondeterminism.

A program that uses wall time, ``random`` or an unordered set shows it only at its next replay,
which would be after a crash. The sample finds it while everything is well. What is found is counted
and logged; outcomes stay, since the journal is what happened.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from stoker.coordinator.figures import RunFigures
from stoker.coordinator.hosts import HostLink
from stoker.coordinator.outcomes import outcome_of
from stoker.coordinator.rebuild import Standing, check_of
from stoker.coordinator.resuming import Resumer
from stoker.errors import NonDeterministicRollout, StokerError
from stoker.model.faults import FaultRecord
from stoker.model.ids import RolloutId, RunId
from stoker.model.outcome import OutcomeKind
from stoker.observe.log import Log
from stoker.rollout.messages import Differed, Evict, FromHost, ProgramOutcome, Stuck, Turn

_QUEUE_MAX = 100
_ID_DIGITS = 8


class Checker:
    """Replays a share of finished rollouts on a host of its own."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[HostLink]],
        resumer: Resumer,
        run_id: RunId,
        share: float,
        figures: RunFigures,
        log: Log,
    ) -> None:
        self._spawn = spawn
        self._resumer = resumer
        self._run_id = run_id
        self._share = share
        self._figures = figures
        self._log = log
        self._queue: deque[RolloutId] = deque(maxlen=_QUEUE_MAX)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.checked = 0

    def finished(self, rollout_id: RolloutId) -> None:
        """Queue the rollout when it is in the sample, which is chosen by its id."""
        digits = rollout_id.rpartition("_")[2][:_ID_DIGITS]
        if int(digits, 16) < self._share * 16**_ID_DIGITS:
            self._queue.append(rollout_id)
            self._idle.clear()
            self._wake.set()

    async def settle(self, seconds: float) -> None:
        """Wait until everything queued is checked, at most ``seconds``: short runs count too."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def run(self) -> None:
        """Check what is queued until cancelled; the host is started with the first one.

        A host that dies or is held by a program is replaced. What it was checking stays unchecked,
        as does a rollout whose record is damaged, and all that is queued when no host can start.
        """
        while True:
            await self._wake.wait()
            try:
                link = await self._spawn(-1)
            except (OSError, StokerError) as error:
                self._unchecked(str(error), *self._queue)
                self._queue.clear()
                self._wake.clear()
            else:
                try:
                    await self._check_while_it_answers(link)
                finally:
                    await asyncio.shield(link.end())
            if not self._queue:
                self._idle.set()

    def _unchecked(self, why: str, *rollouts: RolloutId) -> None:
        for rollout in rollouts:
            self._log.event("check_failed", level="warning", rollout=rollout, why=why)

    async def _check_while_it_answers(self, link: HostLink) -> None:
        messages = link.messages()
        while True:
            while self._queue:
                if not await self._check(link, messages, self._queue.popleft()):
                    return
            self._wake.clear()
            self._idle.set()
            await self._wake.wait()

    async def _check(
        self, link: HostLink, messages: AsyncIterator[FromHost], rollout_id: RolloutId
    ) -> bool:
        """Check one rollout; ``False``: the host does not answer any more."""
        try:
            standing = await self._resumer.standing(self._run_id, rollout_id)
            link.send(check_of(standing, standing.turns))
        except StokerError as error:  # an artifact is damaged, or the record is too long to send
            self._unchecked(error.message, rollout_id)
            return True
        async for message in messages:
            if isinstance(message, Differed):
                self._found(rollout_id, message.fault)
            if isinstance(message, Turn) and (said := _other_ending(standing, message.outcome)):
                self._found(rollout_id, NonDeterministicRollout(said).record())
            if isinstance(message, Stuck):
                return False
            if isinstance(message, Turn | Differed):
                link.send(Evict(rollout_id=rollout_id))
                self.checked += 1
                return True
        return False

    def _found(self, rollout_id: RolloutId, fault: FaultRecord) -> None:
        self._figures.fault(fault.code)
        self._log.event(
            "fault",
            level="warning",
            rollout=rollout_id,
            code=fault.code,
            side=fault.side,
            taints=False,
            message=fault.message,
        )


def _other_ending(standing: Standing, ended: ProgramOutcome | None) -> str:
    """Say how a completed rollout ends otherwise when replayed; the host compared its calls."""
    recorded = standing.finished.outcome if standing.finished is not None else None
    if recorded is None or recorded.kind is not OutcomeKind.COMPLETED:
        return ""
    again = outcome_of(ended, standing.tainted) if ended is not None else None
    if again is None:
        return "on replay the program goes on where it had completed; the recorded outcome stands"
    told = f"reward {again.reward}, metrics {again.metrics}"
    kept = f"reward {recorded.reward}, metrics {recorded.metrics}"
    if again.kind is recorded.kind and told == kept:
        return ""
    return (
        f"on replay the program ended {again.kind}, {told}; the recorded outcome stands: {kept}; "
        "use ctx.random, ctx.now or ctx.local for what is not the same on every call"
    )
