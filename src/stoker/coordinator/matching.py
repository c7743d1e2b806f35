"""Which ready call gets room on which replica next.

Four kinds of calls wait. *Open* ones may go anywhere, their own replica first. Where a replica's
KV cache is known, a call whose context lies there waits *at home*, for room there; one of another
history of a rollout that has begun goes *where it fits*; one whose context was given up is *parked*
until the working set has memory for it; so is one whose replica rests while another does not, or it
would wait for a dead one. A call goes to another replica than its home only where that has memory
for the whole context: it is prefilled again there.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator

from stoker.coordinator.lane_replica import Health, LaneReplica
from stoker.coordinator.ready_set import ReadyCall, ReadySet
from stoker.coordinator.working_set import WorkingSet

_HOMES_MAX = 131_072
"""Histories and rollouts whose replica is remembered for its cached prefix."""

Match = tuple[ReadyCall, LaneReplica]


class Matching:
    """Ready calls, replicas, and who goes where; waits for nothing."""

    def __init__(self, replicas: dict[int, LaneReplica], working: WorkingSet) -> None:
        self._replicas = replicas
        self._working = working
        self._open = ReadySet()
        self._fitting = ReadySet()
        """Those that go where they fit."""
        self._at_home = {index: ReadySet() for index in replicas}
        self._parked = ReadySet()
        self._homes: OrderedDict[str, int] = OrderedDict()
        """History → where it went last; rollout → where its latest one went."""

    def __len__(self) -> int:
        """Return how many calls are ready, parked ones not counted."""
        ready = len(self._open) + len(self._fitting)
        return ready + sum(len(calls) for calls in self._at_home.values())

    @property
    def parked(self) -> int:
        """How many calls wait for memory."""
        return len(self._parked)

    @property
    def parked_since(self) -> float | None:
        """Since when the first of them waits."""
        first = self._parked.first()
        return first.since if first is not None else None

    def parked_longest_since(self) -> float | None:
        """Return since when the one that waits longest does, first or not; looks at each."""
        return min((call.since for call in self._parked.waiting_since(math.inf)), default=None)

    def room(self) -> int:
        """Return how many calls the replicas could take."""
        return sum(replica.room for replica in self._replicas.values())

    def add(self, call: ReadyCall, now: float) -> None:
        """A call is ready."""
        self._working.ready(call.history, call.rollout, call.tokens, now)
        self._shelf_for(call).add(call)

    def remove(self, call: ReadyCall) -> None:
        """A call is wanted no more, or was given room."""
        if call.shelf is not None:
            call.shelf.remove(call)

    def waiting_since(self, before: float) -> Iterator[ReadyCall]:
        """Return the calls that wait since then or longer."""
        for calls in (self._open, self._fitting, *self._at_home.values(), self._parked):
            yield from calls.waiting_since(before)

    def next(self, now: float) -> Match | None:
        """Return the next call to issue and where; it still waits, and the room is not taken."""
        if self.room() <= 0:
            return None
        for call in self._heads():
            replica = self._place(call)
            if replica is not None:
                return call, replica
        return self._restore(now)

    def given(self, call: ReadyCall, replica: LaneReplica) -> None:
        """``call`` was given room on ``replica``."""
        self.remove(call)
        for name in (call.rollout, call.history):
            self._homes[name] = replica.index
            self._homes.move_to_end(name)
        while len(self._homes) > _HOMES_MAX:
            self._homes.popitem(last=False)

    def _shelf_for(self, call: ReadyCall) -> ReadySet:
        working = self._working
        if not working.limits or working.is_first(call.history):
            return self._open
        home = self._home(call)
        if home is not None and working.is_cached(call.history, home.index):
            return self._at_home[home.index]
        # One whose context never was anywhere goes where it fits, but not before those parked.
        late = len(self._parked) or working.had_turns(call.history)
        return self._parked if late else self._fitting

    def _heads(self) -> list[ReadyCall]:
        """Return the first call of each kind but the parked, in order; give up stale homes."""
        heads = []
        resting = {i for i, one in self._replicas.items() if one.health is Health.RESTING}
        if len(resting) == len(self._replicas):
            resting = set()  # nobody is a better choice
        for index, calls in self._at_home.items():
            while (call := calls.first()) is not None:
                if index not in resting and self._working.is_cached(call.history, index):
                    heads.append(call)
                    break
                calls.pop()
                self._parked.add(call)
        if (first := self._first_open()) is not None:
            heads.append(first)
        while (call := self._fitting.first()) is not None:
            if self._fits_somewhere(call, resting):
                heads.append(call)
                break
            self._fitting.pop()
            self._parked.add(call)
        return sorted(heads, key=lambda call: (call.order, call.number)) if heads[1:] else heads

    def _first_open(self) -> ReadyCall | None:
        """Return the first call that goes anywhere, now that another of its rollout may have gone.

        One that must fit would hold up all behind it where only a full replica has memory for it.
        """
        working = self._working
        while (call := self._open.first()) is not None:
            if not working.limits or working.is_first(call.history):
                return call
            self._open.pop()
            self._fitting.add(call)
        return None

    def _place(self, call: ReadyCall) -> LaneReplica | None:
        """Return where a call goes whose context is where it should be."""
        home = self._home(call)
        anywhere = call.shelf in {self._open, self._fitting}
        # The one that just failed it is better than none: it alone may have its context, or memory.
        for choice in (self._choice(call), self._with_room()):
            if home in choice and (not anywhere or not self._working.limits):
                return home
            first = self._working.is_first(call.history)
            fit = [one for one in choice if first or self._working.fits(call.history, one.index)]
            if fit:
                return max(fit, key=self._spare)
        return None

    def _restore(self, now: float) -> Match | None:
        """Return the oldest parked call where there is memory for its context again."""
        call = self._parked.first()
        if call is None:
            return None
        choice = self._choice(call)
        # As above: the one that just failed it is better than none.
        for some in (choice, self._with_room()):
            fitting = [one for one in some if self._working.fits(call.history, one.index)]
            if fitting:
                break
        if not fitting and choice and self._working.aged(call.since, now):
            self._working.forced(now)
            fitting = choice
        if not fitting:
            return None
        home = self._home(call)
        return call, home if home in fitting else max(fitting, key=self._spare)

    def _fits_somewhere(self, call: ReadyCall, resting: Collection[int]) -> bool:
        """Whether a replica that does not rest has memory for a call, with or without room."""
        well = self._replicas.keys() - resting
        return any(self._working.fits(call.history, index) for index in well)

    def _home(self, call: ReadyCall) -> LaneReplica | None:
        for there, calls in self._at_home.items():
            if call.shelf is calls:
                return self._replicas[there]
        index = self._homes.get(call.history, self._homes.get(call.rollout))
        return self._replicas[index] if index is not None else None

    def _choice(self, call: ReadyCall) -> list[LaneReplica]:
        """Return the replicas with room, without the one that just failed the call if possible."""
        with_room = self._with_room()
        return [one for one in with_room if one.index != call.avoid] or with_room

    def _with_room(self) -> list[LaneReplica]:
        return [replica for replica in self._replicas.values() if replica.room > 0]

    def _spare(self, replica: LaneReplica) -> float:
        memory = self._working.memory(replica.index)
        if memory is not None:
            return memory.free / memory.residency.kept
        return replica.room / replica.window
