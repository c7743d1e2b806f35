"""What a program's processes used, and their end: by the guest's control group, or without one.

The kernel of a guest is ours, so its version 2 control groups are there; where they are not (a
runner tried outside a guest), processes are found as descendants, and kills of memory and refused
forks are not counted: those limits do not hold then.
"""

import contextlib
import os
import resource
import signal
from typing import NamedTuple, Protocol


class Counters(NamedTuple):
    """Cumulative figures."""

    cpu_seconds: float
    memory_kills: int
    refused_forks: int
    memory_peak_bytes: int


class Group(Protocol):
    """All processes of a box, whatever they did to leave."""

    def limit(self, *, memory_bytes: int, processes_max: int) -> None:
        """Hold it to these from now on."""
        ...

    def join(self) -> None:
        """Put the calling process in it."""
        ...

    def counters(self) -> Counters:
        """Read the figures."""
        ...

    def kill(self) -> None:
        """Kill every process in it."""
        ...

    def empty(self) -> bool:
        """Whether none is left."""
        ...


class ControlGroup:
    """A version 2 control group with the limits of the box."""

    def __init__(self, directory: str, *, memory_bytes: int, processes_max: int) -> None:
        self._directory = directory
        os.mkdir(directory)  # noqa: PTH102 - the runner imports as little as it can
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            self._write("memory.swap.max", "0")
        self._write("memory.oom.group", "1")
        self.limit(memory_bytes=memory_bytes, processes_max=processes_max)

    def limit(self, *, memory_bytes: int, processes_max: int) -> None:
        """Hold it to these from now on."""
        self._write("memory.max", str(memory_bytes))
        self._write("pids.max", str(processes_max))

    def join(self) -> None:
        """Put the calling process in it."""
        self._write("cgroup.procs", "0")

    def counters(self) -> Counters:
        """Read the kernel's figures."""
        peak = 0
        with contextlib.suppress(OSError, ValueError):  # kernels before 5.19
            peak = int(self._read("memory.peak"))
        return Counters(
            self._field("cpu.stat", "usage_usec") / 1e6,
            self._field("memory.events", "oom_kill"),
            self._field("pids.events", "max"),
            peak,
        )

    def kill(self) -> None:
        """Kill every process in it, however fast they fork."""
        self._write("cgroup.kill", "1")

    def empty(self) -> bool:
        """Whether none is left."""
        return self._field("cgroup.events", "populated") == 0

    def _field(self, file: str, name: str) -> int:
        for line in self._read(file).splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
        return 0

    def _read(self, file: str) -> str:
        with open(f"{self._directory}/{file}", encoding="ascii") as opened:  # noqa: PTH123 - as above
            return opened.read()

    def _write(self, file: str, value: str) -> None:
        with open(f"{self._directory}/{file}", "w", encoding="ascii") as opened:  # noqa: PTH123 - as above
            opened.write(value)


class Descendants:
    """The processes below this one, which is the nearest subreaper of all of them."""

    def limit(self, *, memory_bytes: int, processes_max: int) -> None:
        """Do nothing: only a control group has limits."""

    def join(self) -> None:
        """Do nothing: a child is in it."""

    def counters(self) -> Counters:
        """Add up what was reaped and what lives."""
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = sum(_cpu_ticks(pid) for pid in _below(os.getpid()))
        cpu = reaped.ru_utime + reaped.ru_stime + ticks / os.sysconf("SC_CLK_TCK")
        return Counters(cpu, 0, 0, reaped.ru_maxrss * 1024)

    def kill(self) -> None:
        """Kill those that are there now; an orphan of one of them is here the next time."""
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def empty(self) -> bool:
        """Whether none is left; one that was not reaped yet counts."""
        return not _below(os.getpid())


def _below(top: int) -> list[int]:
    found: list[int] = []
    waiting = [top]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123 - as above
                    waiting += map(int, file.read().split())
        found.append(pid)
    return found[1:]


def _cpu_ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))  # its own, and of the children it has waited for
