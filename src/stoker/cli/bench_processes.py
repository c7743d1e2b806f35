"""Processes of a run that a bench looks at or ends: by command line, and hit through a handle."""

import os
import signal
from pathlib import Path

from stoker.errors import InternalError


def processes(module: str, word: str) -> list[int]:
    """Return living processes that run ``module`` and have ``word`` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if module in line and word in line:
            found.append(int(entry.name))
    return sorted(found)


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process through a handle, so that a number that was used again is never hit."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a living process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Return a living process's proportional share of memory (``smaps_rollup``)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise InternalError(f"the kernel does not say how much memory process {pid} has")
