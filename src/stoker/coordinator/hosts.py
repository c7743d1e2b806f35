"""The pool of program hosts: who runs where, and what happens when a host is held or dies.

A host that a program holds past the bound is ended: the innocent are replayed on other hosts, the
program that held it goes on in *quarantine*, a host of its own, where it can harm nobody; its
rollout's timeout ends it there. ``rollout.hosts`` tells of silent hosts in the same way.

A host that dies is replaced. It works through its messages in order, so the suspects are the
rollout whose turn it owed longest and those whose ``ctx.local`` functions ran in it; one that takes
down its host again and again fails. Nobody else is blamed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stoker.coordinator.rollouts import ActiveRollout
from stoker.errors import HostLost, InternalError, ProgramInvalid, StokerError, WireViolation
from stoker.model.events import Verb
from stoker.model.ids import RolloutId
from stoker.rollout.messages import (
    Deliver,
    Differed,
    Evict,
    FromHost,
    Loaded,
    LoadFailed,
    LocalDone,
    RecordedTurn,
    StartRollout,
    Stuck,
    Turn,
)
from stoker.wire.frames import FRAME_BYTES_MAX

HISTORY_BYTES_MAX = FRAME_BYTES_MAX * 7 // 8
"""Results and arguments of a replay together; the rest of its frame is for everything else."""
STRIKES_MAX = 4
"""A rollout that ended this many hosts is given up."""
_UNLOADED_MAX = 4
"""So many hosts in a row that end before they have loaded the program end the run."""
_UNLOADED_SECONDS = 0.1
"""Before the first of them is replaced; doubles."""


class HostLink(Protocol):
    """A running host process with its program being loaded."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message."""
        ...

    def messages(self) -> AsyncIterator[FromHost]:
        """Yield what it says until it ends."""
        ...

    async def end(self) -> None:
        """End the process and reap it."""
        ...


class PoolListener(Protocol):
    """Who is told what hosts say."""

    def turned(self, rollout: ActiveRollout, turn: Turn) -> None:
        """A program ran until nothing could move."""
        ...

    def local_done(self, rollout: ActiveRollout, done: LocalDone) -> None:
        """A local call ended."""
        ...

    def differed(self, rollout: ActiveRollout, differed: Differed) -> None:
        """A replay asked for something else."""
        ...

    def hostless(self, rollouts: list[ActiveRollout]) -> None:
        """These rollouts need another host, by replay."""
        ...

    def broke(self, error: Exception) -> None:
        """No host can be had any more; the run cannot go on."""
        ...


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    quarantine: bool
    link: HostLink | None = None
    backlog: list[msgspec.Struct] = field(default_factory=list)
    rollouts: dict[RolloutId, ActiveRollout] = field(default_factory=dict)
    owed: dict[RolloutId, None] = field(default_factory=dict)
    """Rollouts whose turn has not come, in the order in which the host gets to them."""
    loaded: bool = False
    stuck: bool = False
    """A program holds it and is known: nobody else is to blame for its end."""
    ending: bool = False
    task: asyncio.Task[None] | None = None

    def send(self, message: StartRollout | Deliver | Evict) -> None:
        if self.link is None:
            self.backlog.append(message)
        else:
            self.link.send(message)
        if not isinstance(message, Evict):
            self.owed[message.rollout_id] = None


class HostPool:
    """Places rollouts on hosts."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[HostLink]],
        count: int,
    ) -> None:
        self._spawn = spawn
        self._count = count
        self._unloaded = 0
        """Hosts in a row that ended before they had loaded the program."""
        self.listener: PoolListener
        """Set before the first rollout is placed."""
        self._slots: dict[int, _Slot] = {}
        self._next = 0
        self._closing = False
        self.first_loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()

    async def start(self) -> Loaded:
        """Start the hosts; return what the program says of itself.

        Raises:
            ProgramInvalid: it cannot be loaded.
        """
        for _ in range(self._count):
            self._open(quarantine=False)
        return await self.first_loaded

    # --- rollouts ----------------------------------------------------------------------------

    def place(self, rollout: ActiveRollout, history: tuple[RecordedTurn, ...]) -> None:
        """Give ``rollout`` a host and start it there, by replay when it has a history.

        Raises:
            WireViolation: its history does not fit a message.
        """
        _check_fits(rollout, history)
        if rollout.quarantined:
            slot = self._open(quarantine=True)
        else:
            ordinary = [slot for slot in self._slots.values() if not slot.quarantine]
            slot = min(ordinary, key=lambda slot: len(slot.rollouts))
        slot.rollouts[rollout.rollout_id] = rollout
        rollout.host = slot.number
        admitted = rollout.admitted
        slot.send(
            StartRollout(
                rollout_id=rollout.rollout_id,
                task=admitted.task,
                epoch=admitted.epoch,
                index=admitted.index,
                group_id=admitted.group_id,
                at=admitted.at,
                history=history,
                became=rollout.became,
            )
        )

    def deliver(self, rollout: ActiveRollout, message: Deliver) -> None:
        """Put a result into a program.

        Raises:
            WireViolation: it does not fit a message; nothing was sent.
        """
        if rollout.host is not None:
            self._slots[rollout.host].send(message)

    def evict(self, rollout: ActiveRollout) -> None:
        """Throw the rollout's object away; a host that it holds is ended with it."""
        slot = self._slots.get(rollout.host) if rollout.host is not None else None
        rollout.host = None
        if slot is None:
            return
        slot.rollouts.pop(rollout.rollout_id, None)
        if slot.quarantine:
            self._end(slot)
        else:
            slot.send(Evict(rollout_id=rollout.rollout_id))

    @property
    def pids(self) -> list[int]:
        """Processes of the hosts that are up."""
        return [slot.link.pid for slot in self._slots.values() if slot.link is not None]

    async def close(self) -> None:
        """End every host."""
        self._closing = True
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- hosts -------------------------------------------------------------------------------

    def _open(self, *, quarantine: bool, after_seconds: float = 0.0) -> _Slot:
        slot = _Slot(number=self._next, quarantine=quarantine)
        self._next += 1
        self._slots[slot.number] = slot
        serving = self._serve(slot, after_seconds)
        slot.task = asyncio.create_task(serving, name=f"host {slot.number}")
        slot.task.add_done_callback(self._served)
        return slot

    def _end(self, slot: _Slot) -> None:
        if slot.task is not None and not slot.ending:
            slot.ending = True  # a second cancellation would cut its cleanup short
            slot.task.cancel()

    async def _serve(self, slot: _Slot, after_seconds: float) -> None:
        try:
            await asyncio.sleep(after_seconds)
            slot.link = await self._spawn(slot.number)
            for message in slot.backlog:
                slot.link.send(message)
            slot.backlog.clear()
            async for message in slot.link.messages():
                self._heard(slot, message)
                if slot.stuck:
                    break
        except WireViolation:
            pass  # treated as a dead host: its rollouts are replayed elsewhere
        except OSError as error:
            what = "start a program host" if slot.link is None else "store what a program gave"
            self._broke(HostLost(f"the coordinator could not {what} ({error}); resume the run"))
        finally:
            if slot.link is not None:
                await asyncio.shield(slot.link.end())
            self._gone(slot)

    def _served(self, task: asyncio.Task[None]) -> None:
        """End the run over what was raised here: the next host would meet the same, for ever."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            bug = InternalError(f"the coordinator met a bug: {error!r}")
            self._broke(error if isinstance(error, StokerError) else bug)

    def _heard(self, slot: _Slot, message: FromHost) -> None:
        if isinstance(message, Loaded):
            slot.loaded = True
            self._unloaded = 0
            if not self.first_loaded.done():
                self.first_loaded.set_result(message)
            return
        if isinstance(message, LoadFailed):
            self._broke(ProgramInvalid(message.message))
            return
        if isinstance(message, Turn | Differed):
            slot.owed.pop(message.rollout_id, None)
        rollout = slot.rollouts.get(message.rollout_id)
        if rollout is None:
            # Evicted while its message was on the way; what holds the host must go all the same.
            slot.stuck = isinstance(message, Stuck)
            return
        match message:
            case Turn():
                self.listener.turned(rollout, message)
            case LocalDone():
                self.listener.local_done(rollout, message)
            case Differed():
                self.listener.differed(rollout, message)
            case Stuck():
                self._held(slot, rollout, message)

    def _held(self, slot: _Slot, rollout: ActiveRollout, message: Stuck) -> None:
        rollout.stuck_where = rollout.stuck_where or message.where
        if slot.quarantine:
            return  # it harms nobody here; its timeout decides
        rollout.quarantined = True
        slot.stuck = True

    def _gone(self, slot: _Slot) -> None:
        del self._slots[slot.number]
        rollouts = list(slot.rollouts.values())
        if self._closing:
            return
        if not slot.quarantine and not self._replace(slot):
            return
        suspects = [] if slot.stuck else _suspects(slot)
        for rollout in rollouts:
            rollout.host = None
            if rollout in suspects:
                rollout.strikes += 1
                rollout.quarantined = rollout.strikes > 1
        if rollouts:
            self.listener.hostless(rollouts)

    def _replace(self, slot: _Slot) -> bool:
        """Open a host in the place of ``slot``; ``False``: there is no use in it."""
        after_seconds = 0.0
        if not slot.loaded:
            after_seconds = _UNLOADED_SECONDS * 2**self._unloaded
            self._unloaded += 1
        if self._unloaded >= _UNLOADED_MAX:
            self._broke(
                HostLost(
                    f"{self._unloaded} program hosts in a row ended before they had loaded the "
                    "program; the run can be resumed; the logs of its hosts say more"
                )
            )
            return False
        self._open(quarantine=False, after_seconds=after_seconds)
        return True

    def _broke(self, error: Exception) -> None:
        if not self.first_loaded.done():
            self.first_loaded.set_exception(error)
        else:
            self.listener.broke(error)


def _check_fits(rollout: ActiveRollout, history: tuple[RecordedTurn, ...]) -> None:
    results = (turn.result.value or b"" for turn in history if turn.result is not None)
    calls = (call.arguments.inline or b"" for turn in history for call in turn.calls)
    size = sum(map(len, results)) + sum(map(len, calls))
    if size > HISTORY_BYTES_MAX:
        raise WireViolation(
            f"rollout {rollout.rollout_id} has seen {size} bytes of results, which cannot be "
            f"replayed: a host takes {HISTORY_BYTES_MAX}; it was ended; read or export less",
            rollout_id=rollout.rollout_id,
        )


def _suspects(slot: _Slot) -> list[ActiveRollout]:
    """Return who may have ended the host: see the module."""
    working = next(iter(slot.owed), None)
    return [
        rollout
        for rollout in slot.rollouts.values()
        if rollout.rollout_id == working
        or any(call.verb is Verb.LOCAL for call in rollout.calls.values())
    ]
