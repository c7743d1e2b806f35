"""What a bench says of the machine it ran on: without it a figure means nothing."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stoker
from stoker.seams.clock import SystemClock

_SYNCS = 60
_BLOCK = b"\0" * 4096
_STEAL = 7
"""Field of ``/proc/stat``'s first line after the label: time taken by other guests."""


class Probe:
    """The time of one ``fdatasync`` of 4 KiB in a directory, in the minutes of the bench."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._file = place / "sync-probe"
        self._clock = SystemClock()
        self._times: list[float] = []

    def sample(self) -> None:
        """Measure a round of syncs."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for _ in range(_SYNCS):
                began = self._clock.monotonic()
                os.write(descriptor, _BLOCK)
                os.fdatasync(descriptor)
                self._times.append(self._clock.monotonic() - began)
        finally:
            os.close(descriptor)

    def median_ms(self) -> float:
        """Return the median of all rounds, milliseconds."""
        return statistics.median(self._times) * 1000


def figure(
    values: Sequence[float], unit: str, target: float | None = None, against: str = ""
) -> dict[str, Any]:
    """Return one figure of a bench document (DESIGN §9): the median of its runs and their span."""
    return {
        "value": statistics.median(values) if values else None,
        "unit": unit,
        "target": target,
        "against": against,
        "runs": len(values),
        "low": min(values, default=None),
        "high": max(values, default=None),
    }


def machine(*, sync_ms_p50: float | None = None) -> dict[str, Any]:
    """Return cores, load, steal share since boot, sync time and versions."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "steal": round(ticks[_STEAL] / sum(ticks), 4),
        "sync_ms_p50": sync_ms_p50,
        "versions": {
            "stoker": stoker.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
    }
