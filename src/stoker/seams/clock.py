"""Clocks: monotonic for durations, boot for deadlines that outlive a process, wall for people.

The pure rooms are given an ``Instant``; only the outermost loop of a process asks a ``Clock``.
"""

import time
from typing import NamedTuple, Protocol


class Instant(NamedTuple):
    """One moment on both clocks the ledger needs."""

    boot: float
    """Seconds since the machine booted, suspends included; never goes back."""
    wall: float
    """Seconds since 1970; may jump. Used across reboots and for people only."""


class Clock(Protocol):
    """Source of time for one process."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...

    def now(self) -> Instant:
        """Return this moment."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return the monotonic clock, seconds."""
        return time.monotonic()

    def now(self) -> Instant:
        """Return this moment."""
        return Instant(boot=time.clock_gettime(time.CLOCK_BOOTTIME), wall=time.time())


def boot_id() -> str:
    """Return the identity of this boot; deadlines on the boot clock hold within it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
        return file.read().strip()
