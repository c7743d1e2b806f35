"""Where boxes' groups go in the single hierarchy of control groups (version 2).

There a group lies beneath the one that this process is in, so that a limit of ours holds our boxes
too, and only where that one was given to us: systemd takes controllers, and with them limits, away
from groups that it did not delegate, when it arranges its units anew (``daemon-reload``). Where
there is no delegation root makes groups at the top, beside the units, and an ordinary user none.

The kernel lets a group have processes or controllers for groups beneath it, not both. So all
processes of our group are first moved into one beneath it (``PROCESSES``), as engines of containers
do; whoever is there already makes groups beside it.
"""

import errno
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

PROCESSES = "stoker-processes"
"""The group that the processes of a delegated group are moved into."""
CONTROLLERS = ("memory", "pids")
"""What limits need; CPU time is counted without a controller."""
_DELEGATE = "systemd-run --user --scope -p Delegate=yes COMMAND, or run as root"
_DELEGATE_ROOT = "systemd-run --scope -p Delegate=yes COMMAND"
_MARKS = ("trusted.delegate", "user.delegate")
"""How systemd marks what it delegated; that of a user (as of 252) does not, and is asked."""
_ASK_SECONDS = 20.0
_UNITS = (".scope", ".service", ".slice")
_ROUNDS_MAX = 100


class NotDelegated(Exception):
    """There is no place for groups; says why, and what would give one where that is known."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


def place(mount: Path, own: str, *, root: bool) -> Path:
    """Return the group beneath which boxes' groups can be made, made ready for that.

    ``own``: the group of this process, as ``/proc/self/cgroup`` has it.

    Raises:
        NotDelegated: there is none; the processes may have been moved all the same.
    """
    here = mount / own.lstrip("/")
    if here.name == PROCESSES:
        here = here.parent
    reason = _not_ours(here, mount)
    if reason and root and here != mount:
        bound = _bound_above(here, mount)
        if bound is not None:
            raise NotDelegated(
                f"{bound.name} has a memory limit that boxes outside of it would escape, and its "
                "groups are systemd's",
                _DELEGATE_ROOT,
            )
        here, reason = mount, _not_ours(mount, mount)
    if reason:
        raise NotDelegated(reason, "" if root else _DELEGATE)
    try:
        _enable(here)
    except OSError as error:
        raise NotDelegated(
            f"controllers of {here.name or mount} cannot be enabled ({error.strerror})"
        ) from error
    return here


def _not_ours(here: Path, mount: Path) -> str:
    files = (here, here / "cgroup.procs", here / "cgroup.subtree_control")
    if not all(os.access(path, os.W_OK) for path in files):
        return "not writable for this user"
    missing = set(CONTROLLERS) - set((here / "cgroup.controllers").read_text().split())
    if missing:
        return f"{here.name or mount} has no controller {', '.join(sorted(missing))}"
    # A group that bears no unit's name was made by somebody else, for us or for a container.
    if here == mount or here.suffix not in _UNITS or any(_is_marked(here, m) for m in _MARKS):
        return ""
    if os.geteuid() != 0 and _is_said_to_be(here.name):
        return ""
    return f"systemd did not delegate {here.name}"


def _is_marked(group: Path, mark: str) -> bool:
    try:
        return os.getxattr(group, mark) == b"1"
    except OSError:
        return False


@cache
def _is_said_to_be(unit: str) -> bool:
    """Ask the systemd of this user whether it delegated one of its units."""
    systemctl = shutil.which("systemctl", path="/usr/bin:/bin")
    if systemctl is None:
        return False
    try:
        said = subprocess.run(  # noqa: S603 - a program of the system
            [systemctl, "--user", "show", "--property=Delegate", "--value", "--", unit],
            env={"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"},
            capture_output=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.stdout.strip() == b"yes"


def _bound_above(here: Path, mount: Path) -> Path | None:
    """Return the nearest group from ``here`` up that has a memory limit."""
    for group in (here, *here.parents):
        if group == mount:
            return None
        try:
            if (group / "memory.max").read_text().strip() != "max":
                return group
        except OSError:
            continue
    return None


def _enable(here: Path) -> None:
    control = here / "cgroup.subtree_control"
    for _ in range(_ROUNDS_MAX):
        missing = set(CONTROLLERS) - set(control.read_text().split())
        if not missing:
            return
        try:
            control.write_text(" ".join(f"+{name}" for name in sorted(missing)))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_processes(here)  # new ones come as long as one of them forks
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _move_processes(here: Path) -> None:
    leaf = here / PROCESSES
    leaf.mkdir(exist_ok=True)
    for pid in (here / "cgroup.procs").read_text().split():
        try:
            (leaf / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue  # it ended meanwhile
