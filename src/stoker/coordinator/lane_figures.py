"""The figures of the inference lane: counted at each change, never sampled, never assumed.

``LaneTotals`` only grow; the difference of two is the figures of the time between them. The meter
is told the lane's state after each change and charges the time since the last one to that state:
constant work per change, whatever is waiting.
"""

import msgspec

from stoker.inference.base import DeviceLoad
from stoker.seams.clock import Clock


class LaneTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the lane was made; seconds of the lane's clock."""

    seconds: float = 0.0
    active_seconds: float = 0.0
    """With at least one call running on some replica."""
    call_seconds: float = 0.0
    """Integral of running calls."""
    window_seconds: float = 0.0
    """Integral of the window, which changes where a server is shared."""
    active_window_seconds: float = 0.0
    """Of it, what was while active."""
    idle_while_ready_seconds: float = 0.0
    """With a ready call and room for it on a healthy replica, and the lane not paused."""
    room_seconds: float = 0.0
    """Integral of unused window of healthy replicas with nothing ready for it, in call seconds."""
    kv_held_seconds: float = 0.0
    """With room, and calls or new rollouts held back for memory in a KV cache."""
    paused_seconds: float = 0.0
    calls: int = 0
    """Answered."""
    tokens: int = 0
    """Sampled in answered calls."""
    retries: int = 0
    """Tries after the first."""
    failures: int = 0
    """Tries that failed."""
    continued: int = 0
    """Tries that were aborted and left what the next one goes on from."""
    anew: int = 0
    """Tries that were aborted and left nothing."""
    service_seconds: float = 0.0
    """Issued to answered, over answered calls."""
    wait_seconds: float = 0.0
    """In the ready set, over issued tries."""
    issued: int = 0
    device_tokens: int = 0
    """Sampled by the replicas by their own count."""
    preemptions: int = 0
    """Sequences that replicas put back for lack of KV memory."""

    def since(self, earlier: "LaneTotals") -> "LaneTotals":
        """Return what was added after ``earlier``."""
        return LaneTotals(
            **{
                field: getattr(self, field) - getattr(earlier, field)
                for field in self.__struct_fields__
            }
        )


class LaneFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The lane over a stretch of time: the four figures that stand together, and the rest."""

    model: str
    simulated: bool
    replicas: int
    window: int
    """Calls all replicas take at once."""
    running: int
    ready: int
    parked: int
    """Calls that wait for memory in a KV cache."""
    healthy: int
    """Replicas that are given calls."""
    paused: bool
    active_share: float
    throughput_share: float | None
    """Tokens the devices sampled ÷ what full windows would have; ``None``: capacity unknown."""
    occupancy: float
    """Mean running calls ÷ window while active."""
    idle_while_ready_share: float
    kv_held_share: float
    """Share of the time held for KV: room, and no memory for what would use it."""
    room_share: float
    """Share of the window that was unused with nothing ready: what admission can fill."""
    calls: int
    tokens: int
    retries: int
    service_seconds: float | None
    """Mean time of an answered call; ``None`` before the first."""
    wait_seconds: float | None
    """Mean time in the ready set."""
    capacity_calls_per_second: float | None
    """Calls a second at full windows, at the mean length of a call; ``None``: not known yet."""
    kv_share: float | None
    """Fullest KV cache, running sequences only; ``None``: no replica says."""
    preemptions: int
    """Sequences that replicas put back for lack of KV memory."""

    @staticmethod
    def capacity(loads: list[DeviceLoad]) -> float | None:
        """Return tokens a second of all replicas at full windows; ``None``: one does not say."""
        known = [load.capacity_tokens_per_second for load in loads]
        return sum(one for one in known if one is not None) if None not in known else None


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """What the lane looks like between two changes."""

    running: int
    window: int
    room: int
    """Free window of healthy replicas; 0 while paused."""
    idle: bool
    """A call waits that could run: ready beside room, or given room and not yet issued."""
    kv_held: bool = False
    """There is room, and what waits for it waits for memory in a KV cache."""
    paused: bool


class LaneMeter:
    """Integrates the lane's states over time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at = clock.monotonic()
        """Up to when it was charged."""
        self.calls = self.tokens = self.retries = self.failures = self.issued = 0
        self.continued = self.anew = 0
        self.service_seconds = self.wait_seconds = 0.0
        self._seconds = self._active = self._call = 0.0
        self._window = self._active_window = 0.0
        self._idle_while_ready = self._room = self._paused = self._kv_held = 0.0

    def charge(self, state: LaneState) -> float:
        """Charge the time since the last charge to ``state``; return this moment."""
        now = self._clock.monotonic()
        seconds, self.at = now - self.at, now
        if seconds <= 0:
            return now
        self._seconds += seconds
        self._window += seconds * state.window
        if state.running:
            self._active += seconds
            self._active_window += seconds * state.window
            self._call += seconds * state.running
        if state.paused:
            self._paused += seconds
        elif state.idle:
            self._idle_while_ready += seconds
        elif state.kv_held:
            self._kv_held += seconds
        else:
            self._room += seconds * state.room
        return now

    def totals(self, loads: list[DeviceLoad], before: list[DeviceLoad]) -> LaneTotals:
        """Return the sums up to the last charge, and what replicas counted after ``before``."""
        return LaneTotals(
            seconds=self._seconds,
            active_seconds=self._active,
            call_seconds=self._call,
            window_seconds=self._window,
            active_window_seconds=self._active_window,
            idle_while_ready_seconds=self._idle_while_ready,
            room_seconds=self._room,
            kv_held_seconds=self._kv_held,
            paused_seconds=self._paused,
            calls=self.calls,
            tokens=self.tokens,
            retries=self.retries,
            failures=self.failures,
            continued=self.continued,
            anew=self.anew,
            service_seconds=self.service_seconds,
            wait_seconds=self.wait_seconds,
            issued=self.issued,
            device_tokens=sum(now.tokens_sampled for now in loads)
            - sum(then.tokens_sampled for then in before),
            preemptions=sum(now.preemptions for now in loads)
            - sum(then.preemptions for then in before),
        )


def share(part: float, whole: float) -> float:
    """Return ``part ÷ whole``, 0 when there is no whole yet."""
    return part / whole if whole > 0 else 0.0
