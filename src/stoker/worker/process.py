"""What a worker does to its own process before it serves."""

import os

from stoker.seams import faultpoints

NICENESS = 5
"""Of worker and boxes, where cores are reserved: coordinator and ledger stay at 0 and go first."""


def arm_faults() -> None:
    """Arm the fault points a test named for this process."""
    faultpoints.arm(os.environ)


def yield_cores(reserve_cores: float) -> None:
    """Let coordinator, ledger and host go first when cores are short.

    Boxes inherit the niceness. It is a share, not a wall: an idle host gives boxes every core.
    Backends that make control groups bound them besides.
    """
    if reserve_cores > 0:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def cores() -> int:
    """Return how many cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))
