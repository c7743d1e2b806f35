"""Adaptive slots: how many actions of a class a worker runs at once, within bounds.

Pure decisions on what a window of finished actions showed (``slots_max`` set; else slots are
fixed). More slots are tried while all are busy and work queues, and kept only where they gave more
results: on a host out of cores actions merely take longer, and the step is taken back. Fewer are
used when the host is short of memory, when its cores are fought over and actions take longer than
they can, or when many end in infrastructure faults.
"""

import math

import msgspec

WINDOW_SECONDS_MIN = 1.0
WINDOW_ACTIONS_MIN = 8
"""And twice the slots: of fewer, the mean time says nothing."""
BUSY_SHARE_MIN = 0.8
"""From which slots are what limits the class."""
QUEUED_SHARE_MIN = 0.1
"""Mean wait for a worker ÷ time in a slot from which work queues."""
GAIN_MIN = 0.5
"""Share of a step up that must come back as results, or it is taken back."""
FAULTS_SHARE_MAX = 0.2
SLOWER_MAX = 1.5
"""Time in a slot over the best seen, from which contention is believed."""
PRESSURE_MAX = 0.5
"""Share of time in which somebody waits for a core (PSI, ten seconds)."""
FORGET_SECONDS = 600.0
"""In which the best time seen rises by itself as much as it is."""
PAUSE_SECONDS = 60.0
"""After a step up was taken back, before it is tried again."""


class SlotTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one class since the worker began."""

    finished: int = 0
    faults: int = 0
    """Of those, with an infrastructure fault."""
    busy_seconds: float = 0.0
    """Slots in use over time."""
    queued_seconds: float = 0.0
    """Waits for a worker of what was leased, summed."""


class SlotChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change, and why."""

    before: int
    after: int
    reason: str


class SlotControl:
    """Decides one class's slots, between ``least`` and ``most``."""

    def __init__(self, *, start: int, least: int, most: int, now: float) -> None:
        assert 1 <= least <= start <= most, "bounds are held by the settings"
        self.slots = start
        self._least = least
        self._most = most
        self._since = now
        self._before = SlotTotals()
        self._best: float | None = None
        """Least mean time in a slot of any window, rising slowly."""
        self._step: tuple[int, float] | None = None
        """Slots and results a second before the latest step up, until it is judged."""
        self._quiet_until = -math.inf

    def observe(
        self, totals: SlotTotals, now: float, *, memory_short: bool, pressure: float | None
    ) -> SlotChange | None:
        """Look at the counters, about once a second; return what was changed.

        ``pressure``: share of time in which somebody waited for a core; ``None``: not known.
        """
        seconds, done = now - self._since, totals.finished - self._before.finished
        if memory_short and seconds >= WINDOW_SECONDS_MIN:
            self._close(totals, now)
            return self._to(now, math.floor(self.slots * 0.75), "the host is short of memory")
        if seconds < WINDOW_SECONDS_MIN or done < max(WINDOW_ACTIONS_MIN, 2 * self.slots):
            return None
        faults = (totals.faults - self._before.faults) / done
        held = (totals.busy_seconds - self._before.busy_seconds) / done
        queued = (totals.queued_seconds - self._before.queued_seconds) / done
        busy, rate = held * done / (seconds * self.slots), done / seconds
        self._close(totals, now)
        if faults >= FAULTS_SHARE_MAX:
            return self._to(now, self.slots // 2, f"{faults:.0%} ended in infrastructure faults")
        change = self._judged(rate, now) or self._eased(held, pressure, seconds, now)
        if change is None and busy >= BUSY_SHARE_MIN and queued >= QUEUED_SHARE_MIN * held:
            change = self._up(rate, now)
        return change

    def _close(self, totals: SlotTotals, now: float) -> None:
        self._before, self._since = totals, now

    def _judged(self, rate: float, now: float) -> SlotChange | None:
        """Take the latest step up back where it gave too little."""
        if self._step is None:
            return None
        (slots, before), self._step = self._step, None
        wanted = before * (1 + GAIN_MIN * (self.slots / slots - 1))
        if rate >= wanted:
            return None
        why = f"{self.slots} slots gave {rate:.2f} results a second, {slots} gave {before:.2f}"
        return self._to(now, slots, why)

    def _eased(
        self, held: float, pressure: float | None, seconds: float, now: float
    ) -> SlotChange | None:
        """Go down where cores are fought over and actions take longer than they can."""
        # Forgotten by and by: work that has become longer must not look like contention for ever.
        best = held if self._best is None else self._best * (1 + seconds / FORGET_SECONDS)
        self._best = min(best, held)
        slower = held / self._best if self._best else 1.0
        if pressure is None or pressure < PRESSURE_MAX or slower < SLOWER_MAX:
            return None
        why = f"cores are fought over and actions take {slower:.1f} times their best"
        return self._to(now, math.floor(self.slots * 0.75), why)

    def _up(self, rate: float, now: float) -> SlotChange | None:
        if now < self._quiet_until or self.slots >= self._most:
            return None
        before = self.slots
        self.slots = min(self._most, before + max(1, before // 4))
        self._step = (before, rate)
        return SlotChange(
            before=before, after=self.slots, reason="all slots are busy and work queues"
        )

    def _to(self, now: float, slots: int, reason: str) -> SlotChange | None:
        self._quiet_until = now + PAUSE_SECONDS
        self._step = None
        before, self.slots = self.slots, max(self._least, slots)
        if before == self.slots:
            return None
        return SlotChange(before=before, after=self.slots, reason=reason)
