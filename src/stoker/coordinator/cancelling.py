"""Ending a run, or one rollout of it, from another terminal.

What is asked lies in the run directory, one file a request, and is never taken away: every
coordinator of the run, now or after a resume, ends what a request names and what has no outcome
yet. So it needs nobody to be there, and asking twice is asking once.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.coordinator.record import RunDirectory, write_atomically
from stoker.model.ids import RolloutId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.seams.disk import make_directories
from stoker.seams.entropy import fresh_id

if TYPE_CHECKING:
    from stoker.coordinator.coordinator import Coordinator

_LOOK_SECONDS = 0.25


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants ended."""

    rollout_id: RolloutId | None
    """``None``: every rollout of the run, also those that have not begun."""
    reason: str
    """Becomes the reason of the outcome."""


def ask(run: RunDirectory, request: CancelRequest) -> None:
    """Leave a request for the run's coordinators.

    **Durability:** it is on disk when this returns.
    """
    place = _place(run)
    make_directories(place)
    write_atomically(place / f"{fresh_id('cnl_')}.json", msgspec.json.encode(request), synced=True)


def _place(run: RunDirectory) -> Path:
    return run.path / "cancels"


class CancelWatch:
    """Carries requests out as long as a coordinator runs."""

    def __init__(self, run: RunDirectory, coordinator: "Coordinator") -> None:
        self._place = _place(run)
        self._coordinator = coordinator
        self._requests: dict[str, CancelRequest] = {}
        self._read()
        coordinator.asked_end = self._asked_end

    async def run(self) -> None:
        """Look a few times a second, which also serves coordinators on other machines."""
        while True:
            self._read()
            for request in self._requests.values():
                self._carry_out(request)
            await asyncio.sleep(_LOOK_SECONDS)

    def _read(self) -> None:
        for path in self._place.glob("*.json"):
            if path.name not in self._requests:
                # Nothing of ours (a request is never torn), or not to be read now: looked at again.
                with suppress(msgspec.MsgspecError, OSError):
                    content = path.read_bytes()
                    self._requests[path.name] = msgspec.json.decode(content, type=CancelRequest)

    def _carry_out(self, request: CancelRequest) -> None:
        if request.rollout_id is None:
            self._coordinator.end_all(_outcome(request))
        elif rollout := self._coordinator.flow.active.get(request.rollout_id):
            self._coordinator.flow.finish(rollout, _outcome(request))

    def _asked_end(self, rollout_id: RolloutId) -> Outcome | None:
        for request in self._requests.values():
            if request.rollout_id in {None, rollout_id}:
                return _outcome(request)
        return None


def _outcome(request: CancelRequest) -> Outcome:
    return Outcome(kind=OutcomeKind.CANCELLED, reason=request.reason)
