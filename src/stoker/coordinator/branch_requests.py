"""Branching a rollout of a run that a coordinator runs, from another terminal.

As with cancelling, what is asked lies in the run directory, one file a request, and is never taken
away: the coordinator of the parent's group, now or after a resume, makes those branches that are
not there. Ids follow from the request, so that asking needs nobody to be there and nothing is made
twice. Whoever asks holds a lock meanwhile: two requests never name one branch. A coordinator marks
what it has taken in, for whoever asks what still waits.
"""

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.coordinator.branching import Point, point_branch_id
from stoker.coordinator.record import RunDirectory, write_atomically
from stoker.model.ids import RolloutId
from stoker.seams.disk import make_directories
from stoker.seams.entropy import fresh_id
from stoker.seams.locks import wait_for_lock

if TYPE_CHECKING:
    from stoker.coordinator.coordinator import Coordinator

_TAKEN = ".taken"


class BranchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants branched."""

    parent: RolloutId
    task_id: str
    """The parent's: it tells whose group it is of."""
    point: Point
    first: int
    """Number of the first branch; the others follow it."""
    count: int

    @property
    def rollouts(self) -> tuple[RolloutId, ...]:
        """Ids of the branches."""
        numbers = range(self.first, self.first + self.count)
        return tuple(point_branch_id(self.parent, self.point, number) for number in numbers)


@contextmanager
def asking(run: RunDirectory) -> Iterator[set[RolloutId]]:
    """Let one process at a time choose branches; gives all that were asked for before."""
    make_directories(_place(run))
    descriptor = wait_for_lock(_place(run) / "lock")
    try:
        yield {name for request in _requests(_place(run)).values() for name in request.rollouts}
    finally:
        os.close(descriptor)


def ask(run: RunDirectory, request: BranchRequest) -> None:
    """Leave a request for the run's coordinators.

    **Durability:** it is on disk when this returns.
    """
    name = f"{fresh_id('brn_')}.json"
    write_atomically(_place(run) / name, msgspec.json.encode(request), synced=True)


def waiting(run: RunDirectory) -> int:
    """Return how many branches were asked for in requests that no coordinator has taken in yet."""
    place = _place(run)
    return sum(
        request.count
        for name, request in _requests(place).items()
        if not (place / name).with_suffix(_TAKEN).exists()
    )


def _place(run: RunDirectory) -> Path:
    return run.path / "branches"


def _requests(place: Path, known: Container[str] = ()) -> dict[str, BranchRequest]:
    found: dict[str, BranchRequest] = {}
    for path in sorted(place.glob("*.json")):
        if path.name not in known:
            # Nothing of ours (a request is never torn), or not to be read now: looked at again.
            with suppress(msgspec.MsgspecError, OSError):
                found[path.name] = msgspec.json.decode(path.read_bytes(), type=BranchRequest)
    return found


class BranchWatch:
    """Carries requests out as long as a coordinator runs."""

    def __init__(self, run: RunDirectory, coordinator: "Coordinator") -> None:
        self._place = _place(run)
        self._coordinator = coordinator
        self._tasks = {task.task_id for task in coordinator.parts.plan.tasks}
        self._done: set[str] = set()
        coordinator.look_for_branches = self.look

    async def look(self) -> None:
        """Make what was asked for since; what another partition makes is not ours."""
        for name, request in _requests(self._place, self._done).items():
            self._done.add(name)
            if request.task_id in self._tasks:
                await self._coordinator.branches.carry_out(request)
                with suppress(OSError):  # nothing but what people are told hangs on it
                    (self._place / name).with_suffix(_TAKEN).touch()
