"""Control groups of boxes, versions 1 and 2 behind one small interface.

One group per box, reused by its actions, so verdicts are *differences* of cumulative counters:
``memory`` from the kernel's own count of kills where the box had met its limit (else it was killed
for somebody else's want of memory), ``pids`` from its count of refused forks, CPU time over all
processes that ever were in the box. A group is named after the worker's state directory and the
box, so that a later incarnation finds what a dead one left.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from stoker.errors import BoxFailed
from stoker.model.execution import Limits
from stoker.sandbox import delegation

_V1_CONTROLLERS = ("memory", "pids", "cpuacct", "freezer")
_IN_CONTAINER = "make them writable in this container (docker run --privileged), or leave it"
_UNLIMITED = 1 << 60
_KILL_PAUSE_SECONDS = 0.002
_FREEZE_AFTER = 3
"""Rounds of plain killing before the group is frozen first: a fork bomb outruns plain killing."""
_KILL_ROUNDS_MAX = 2500
_REMOVE_ROUNDS_MAX = 500
_READ_BYTES = 65536


class Counters(NamedTuple):
    """Cumulative figures of a group."""

    cpu_seconds: float
    memory_kills: int
    refused_forks: int
    memory_peak_bytes: int | None
    memory_met: int
    """How often it met its own memory limit. Version 1 does not tell: there each kill counts."""


class Group(Protocol):
    """The control group of one box."""

    directories: tuple[str, ...]

    def join_descriptors(self) -> list[int]:
        """Open what a process joins by: a single-threaded one that writes ``0`` to each is in.

        The caller closes them.
        """
        ...

    def counters(self) -> Counters:
        """Read the cumulative figures."""
        ...

    def reset_peak(self) -> None:
        """Begin a new maximum of memory, where the kernel can."""
        ...

    def close(self) -> None:
        """Close the descriptors held."""
        ...


class Tree(Protocol):
    """Where groups are made on this host."""

    version: int

    def create(self, name: str, limits: Limits) -> Group:
        """Make a group with ``limits``."""
        ...

    def directories(self, name: str) -> tuple[str, ...]:
        """Where a group of this name lies, whether or not it exists."""
        ...

    def kept(self, name: str) -> str:
        """Return what a record says of a group, for whoever removes it (``directories_of``)."""
        ...

    def find(self, prefix: str) -> set[str]:
        """Return the names of groups that begin so."""
        ...


# --- version 1 -------------------------------------------------------------------------------


class TreeV1:
    """One hierarchy per controller."""

    version = 1

    def __init__(self, parents: dict[str, str]) -> None:
        self._parents = parents

    def directories(self, name: str) -> tuple[str, ...]:
        """Return one directory per hierarchy; the freezer first, memory last."""
        found = dict.fromkeys(
            f"{self._parents[c]}/{name}" for c in ("freezer", "pids", "cpuacct", "memory")
        )
        return tuple(found)

    def create(self, name: str, limits: Limits) -> Group:
        """Make a directory in each hierarchy and set its limits."""
        directories = self.directories(name)
        try:
            for directory in directories:
                os.mkdir(directory)  # noqa: PTH102 - made for every box
            memory = f"{self._parents['memory']}/{name}"
            _write(f"{memory}/memory.limit_in_bytes", limits.memory_bytes)
            with contextlib.suppress(OSError):  # hosts without swap accounting have no such file
                _write(f"{memory}/memory.memsw.limit_in_bytes", limits.memory_bytes)
            _write(f"{self._parents['pids']}/{name}/pids.max", limits.processes_max)
            return _GroupV1(name, self._parents, directories)
        except OSError as error:
            remove_directories(directories)
            raise BoxFailed(
                f"control group {name} could not be made ({error}); nothing of it is left"
            ) from error

    def kept(self, name: str) -> str:
        """Return its name: each hierarchy has one place for groups."""
        return name

    def find(self, prefix: str) -> set[str]:
        """Return the names of groups that begin so."""
        return {
            entry.name
            for parent in set(self._parents.values())
            for entry in os.scandir(parent)
            if entry.name.startswith(prefix)
        }


class _GroupV1:
    def __init__(self, name: str, parents: dict[str, str], directories: tuple[str, ...]) -> None:
        self.directories = directories
        self._files = [
            os.open(f"{parents[controller]}/{name}/{file}", os.O_RDONLY | os.O_CLOEXEC)
            for controller, file in (
                ("cpuacct", "cpuacct.usage"),
                ("memory", "memory.oom_control"),
                ("pids", "pids.events"),
            )
        ]
        self._peak: int | None = None
        with contextlib.suppress(OSError):
            peak = f"{parents['memory']}/{name}/memory.max_usage_in_bytes"
            self._peak = os.open(peak, os.O_RDWR | os.O_CLOEXEC)
            self._files.append(self._peak)

    def join_descriptors(self) -> list[int]:
        # By ``cgroup.procs`` the kernel moves all threads of the writer, and holds up every fork
        # and exit on the host for that: after idle time it waits 5 to 19 ms for leave to do so.
        return _open_joins(self.directories, "tasks")

    def counters(self) -> Counters:
        usage, control, events = (os.pread(file, 4096, 0) for file in self._files[:3])
        kills = _field(control, b"oom_kill")
        return Counters(
            int(usage) / 1e9,
            kills,
            _field(events, b"max"),
            self._read_peak(),
            kills,  # its count of the limit's failures stays 0 in kernels of today (6.18)
        )

    def _read_peak(self) -> int | None:
        return None if self._peak is None else int(os.pread(self._peak, 64, 0))

    def reset_peak(self) -> None:
        with contextlib.suppress(OSError):
            if self._peak is not None:
                os.pwrite(self._peak, b"0", 0)

    def close(self) -> None:
        self._peak = None
        while self._files:
            os.close(self._files.pop())


# --- version 2 -------------------------------------------------------------------------------


class TreeV2:
    """The single hierarchy; ``parent`` has memory, pids and cpu enabled for its children."""

    version = 2

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def directories(self, name: str) -> tuple[str, ...]:
        """Return its one directory."""
        return (str(Path(self._parent) / name),)

    def create(self, name: str, limits: Limits) -> Group:
        """Make the directory and set its limits."""
        directory = Path(self._parent) / name
        try:
            os.mkdir(directory)  # noqa: PTH102 - made for every box
            _write(f"{directory}/memory.max", limits.memory_bytes)
            with contextlib.suppress(OSError):  # absent without swap
                _write(f"{directory}/memory.swap.max", 0)
            with contextlib.suppress(OSError):  # kernels before 4.19
                _write(f"{directory}/memory.oom.group", 1)
            _write(f"{directory}/pids.max", limits.processes_max)
            return _GroupV2(directory)
        except OSError as error:
            remove_directories((str(directory),))
            raise BoxFailed(
                f"control group {name} could not be made ({error}); nothing of it is left"
            ) from error

    def find(self, prefix: str) -> set[str]:
        """Return the names of groups that begin so."""
        return {e.name for e in os.scandir(self._parent) if e.name.startswith(prefix)}

    def kept(self, name: str) -> str:
        """Return its path: a later life may be in another unit, or in one without delegation."""
        return str(Path(self._parent) / name)


class _GroupV2:
    def __init__(self, directory: Path) -> None:
        self.directories: tuple[str, ...] = (str(directory),)
        self._directory = directory
        self._files = [
            os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
            for name in ("cpu.stat", "memory.events", "pids.events")
        ]

    def join_descriptors(self) -> list[int]:
        return _open_joins(self.directories, "cgroup.procs")

    def counters(self) -> Counters:
        try:
            cpu, memory, pids = (os.pread(file, 4096, 0) for file in self._files)
        except OSError as error:
            raise BoxFailed(
                f"control group {self._directory.name} lost its controllers ({error}): nothing "
                "limits its box any more; what ran in it was ended"
            ) from error
        peak = None
        with contextlib.suppress(OSError, ValueError):
            peak = int((self._directory / "memory.peak").read_bytes())
        return Counters(
            _field(cpu, b"usage_usec") / 1e6,
            _field(memory, b"oom_kill"),
            _field(pids, b"max"),
            peak,
            _field(memory, b"oom"),
        )

    def reset_peak(self) -> None:
        """Nothing: a reset holds only for the descriptor that wrote it."""

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def directories_of(tree: Tree | None, kept: str) -> tuple[str, ...]:
    """Return where the group of a record lies; empty where it has none or cannot be reached."""
    if kept.startswith("/"):
        return (kept,)
    return tree.directories(kept) if tree is not None and kept else ()


# --- what both share -------------------------------------------------------------------------


class Found(NamedTuple):
    """Where this process may make groups."""

    tree: Tree | None
    note: str
    """Which version, or why there is none."""
    remedy: str = ""
    """What would give some, where there are none."""


def find_tree() -> Found:
    """Return where this process may make groups; it may be moved beneath its group for that."""
    mounts = _mounts()
    v1 = {c: _v1_parent(mounts[c], c) for c in _V1_CONTROLLERS if c in mounts}
    first = len(v1) == len(_V1_CONTROLLERS)
    remedy = _IN_CONTAINER if os.geteuid() == 0 else "run as root"
    if first and all(os.access(parent, os.W_OK) for parent in v1.values()):
        return Found(TreeV1(v1), "version 1")
    if first:
        return Found(None, "control groups (version 1) are not writable for this user", remedy)
    unified = mounts.get("unified")
    if unified is None:
        return Found(None, "no control group file system is mounted", remedy)
    try:
        parent = delegation.place(Path(unified), _own_group(), root=os.geteuid() == 0)
    except delegation.NotDelegated as error:
        return Found(None, f"control groups (version 2): {error}", error.remedy or remedy)
    where = "version 2" if str(parent) == unified else f"version 2, beneath {parent.name}"
    return Found(TreeV2(str(parent)), where)


def _own_group() -> str:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if line.startswith("0:"))


def _mounts() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup":
            found |= {c: target for c in _V1_CONTROLLERS if c in options.split(",")}
        elif kind == "cgroup2":
            found["unified"] = target
    return found


def _v1_parent(mount: str, controller: str) -> str:
    """Return the hierarchy's root, or our own group where it holds us to a memory limit."""
    if controller != "memory":
        return mount
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = Path(mount + path)
            with contextlib.suppress(OSError, ValueError):
                # Boxes must not escape a limit that the operator put on their worker.
                if int((own / "memory.limit_in_bytes").read_text()) < _UNLIMITED:
                    return str(own)
    return mount


async def kill_all(
    directories: tuple[str, ...], spared: Callable[[], frozenset[int]] = frozenset
) -> None:
    """Kill every process of the group until none is left; zombies and the spared do not count.

    Raises:
        BoxFailed: something survived (a process stuck in the kernel).
    """
    pause = _KILL_PAUSE_SECONDS
    for attempt in range(_KILL_ROUNDS_MAX):
        alive = live_pids(directories, spared())
        if not alive:
            return
        if spared() or not _killed_at_once(directories):
            frozen = attempt >= _FREEZE_AFTER and _freeze(directories, frozen=True)
            for pid in live_pids(directories, spared()) if frozen else alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if frozen:
                _freeze(directories, frozen=False)
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.02)
    raise BoxFailed(f"processes {live_pids(directories)} of {directories[0]} cannot be killed")


def _killed_at_once(directories: tuple[str, ...]) -> bool:
    """Kill all of a group, forks under way included, where the kernel can (version 2, 5.14)."""
    try:
        _write(f"{directories[0]}/cgroup.kill", 1)
    except OSError:
        return False
    return True


def live_pids(directories: tuple[str, ...], spared: frozenset[int] = frozenset()) -> list[int]:
    """Return the processes of a group that are not zombies, without the spared ones."""
    # Only one hierarchy is asked: a child joins the freezer first, so it holds all of them.
    return [pid for pid in _pids(directories[0]) if pid not in spared and not is_zombie(pid)]


def _pids(directory: str) -> list[int]:
    try:
        return [int(word) for word in _content(f"{directory}/cgroup.procs").split()]
    except OSError:
        return []


def is_zombie(pid: int) -> bool:
    """Whether a process is dead and only waits to be reaped (or is gone)."""
    try:
        status = _content(f"/proc/{pid}/stat")
    except OSError:
        return True
    return status.rpartition(b") ")[2][:1] in (b"Z", b"X")


def _freeze(directories: tuple[str, ...], *, frozen: bool) -> bool:
    directory = Path(directories[0])
    v1 = directory / "freezer.state"
    with contextlib.suppress(OSError):
        if v1.exists():
            v1.write_text("FROZEN" if frozen else "THAWED")
        else:
            (directory / "cgroup.freeze").write_text(str(int(frozen)))
        return True
    return False


async def remove(directories: tuple[str, ...]) -> None:
    """Remove an empty group; the kernel may need a moment after the last process."""
    for _ in range(_REMOVE_ROUNDS_MAX):
        if remove_directories(directories):
            return
        await asyncio.sleep(0.01)
    raise BoxFailed(f"control group {directories[0]} stays busy and could not be removed")


def remove_directories(directories: tuple[str, ...]) -> bool:
    """Try once to remove; return whether none is left."""
    gone = True
    for directory in directories:
        try:
            os.rmdir(directory)  # noqa: PTH106 - done for every box
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def _open_joins(directories: tuple[str, ...], file: str) -> list[int]:
    return [os.open(f"{d}/{file}", os.O_WRONLY | os.O_CLOEXEC) for d in directories]


def _content(path: str) -> bytes:
    # Read several times for every action; a file object costs more than what it reads.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(file, _READ_BYTES), b""))
    finally:
        os.close(file)


def _write(path: str, value: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, b"%d" % value)
    finally:
        os.close(file)


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
