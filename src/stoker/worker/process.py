"""What a worker does to its own process and to the helper that starts its boxes."""

import os
import resource
from contextlib import suppress
from pathlib import Path

from stoker.seams import faultpoints

_MEMINFO = Path("/proc/meminfo")
_CPU_PRESSURE = Path("/proc/pressure/cpu")
DESCRIPTORS_MAX = 65_536
"""As many as a worker asks for."""
NICENESS = 5
"""Of boxes, where cores are reserved: coordinator, ledger and worker stay at 0 and go first."""


def arm_faults() -> None:
    """Arm the fault points a test named for this process."""
    faultpoints.arm(os.environ)


def allow_descriptors() -> None:
    """Let this process have as many descriptors as it may: a box that waits holds eight.

    What runs in boxes has limits of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def yield_cores(maker_pid: int) -> None:
    """Let coordinator, ledger and worker go before boxes when cores are short.

    Boxes are children of the maker and inherit its niceness. It is a share, not a wall: an idle
    host gives boxes every core. Where that is not allowed nothing changes.
    """
    with suppress(OSError):
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, maker_pid, max(NICENESS, mine))


def memory_available() -> int | None:
    """Return how many bytes the host can still give without swapping, where it says so."""
    with suppress(OSError, ValueError), _MEMINFO.open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def cpu_pressure() -> float | None:
    """Return the share of the last ten seconds in which somebody waited for a core, if known."""
    with suppress(OSError, ValueError, IndexError):
        some = _CPU_PRESSURE.read_text(encoding="ascii").splitlines()[0].split()
        return float(some[1].removeprefix("avg10=")) / 100
    return None


def cores() -> int:
    """Return how many cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))
