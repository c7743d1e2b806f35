"""Named fault points: where a crash test ends the process, or makes the disk fail.

``reach("ledger.commit.before")`` costs a dictionary look-up when nothing is armed. A process is
armed through ``STOKER_FAULT`` (``name=action[@n]``: at the n-th time the point is reached, from 1):
``kill`` ends it with SIGKILL, ``stop`` stops it with SIGSTOP, ``disk_full`` raises ENOSPC.
Processes inherit the arming; with ``STOKER_FAULT_ONCE`` only the one that removes that file acts.
Every point is registered in ``POINTS``; the crash floor fails when one is never reached.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

POINTS: dict[str, str] = {}
"""Name → what is about to happen there. Filled by ``declare`` at import."""

_armed: dict[str, tuple[str, int]] = {}
_once: list[Path] = []
_reached: Counter[str] = Counter()


def declare(name: str, what: str) -> str:
    """Register a fault point and return its name."""
    assert name not in POINTS or POINTS[name] == what, f"fault point {name} declared twice"
    POINTS[name] = what
    return name


def arm(environ: Mapping[str, str]) -> None:
    """Arm the points that ``STOKER_FAULT`` names; called once when a process starts."""
    for part in filter(None, environ.get("STOKER_FAULT", "").split(",")):
        name, _, action = part.partition("=")
        action, _, nth = action.partition("@")
        _armed[name] = (action, int(nth or 1))
    if environ.get("STOKER_FAULT_ONCE"):
        _once.append(Path(environ["STOKER_FAULT_ONCE"]))


def reach(name: str) -> None:
    """Do what the test armed at this point; nothing in ordinary operation."""
    if not _armed:
        return
    _reached[name] += 1
    action, nth = _armed.get(name, ("", 0))
    if _reached[name] != nth or not _first():
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "disk_full":
        raise OSError(errno.ENOSPC, f"no space left (fault point {name})")


def _first() -> bool:
    """Whether no other process has acted: one alone can remove a file."""
    for token in _once:
        try:
            token.unlink()
        except FileNotFoundError:
            return False
    return True
