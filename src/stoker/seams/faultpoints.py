"""Named fault points: where a crash test ends the process, or makes the disk or a message fail.

``reach("ledger.commit.before")`` costs a dictionary look-up when nothing is armed. A process is
armed through ``STOKER_FAULT`` (``name=action[@n]``: at the n-th time the point is reached, from 1);
``ACTIONS`` says what can be done. Processes inherit the arming; with ``STOKER_FAULT_ONCE`` only the
one that removes that file acts, or, where it is a directory, the file of the point's name in it.
Every point is registered in ``POINTS`` with the actions that make sense there in ``TRIED``; the
crash floor fails when one is never reached. ``docs/reference/crash-points.md`` lists them.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

ACTIONS = {
    "kill": "the process ends with SIGKILL",
    "stop": "the process stops with SIGSTOP",
    "disk_full": "the write fails: no space left",
    "torn": "half of it is written, then the process ends with SIGKILL",
    "lost": "the message is lost with its connection",
}
POINTS: dict[str, str] = {}
"""Name → what is about to happen there. Filled by ``declare`` at import."""
TRIED: dict[str, tuple[str, ...]] = {}
"""Name → the actions that the crash floor tries there."""

_armed: dict[str, tuple[str, int]] = {}
_once: list[Path] = []
_tearing: list[str] = []
_reached: Counter[str] = Counter()


def declare(name: str, what: str, *tried: str) -> str:
    """Register a fault point and return its name; ``tried`` there is ``kill`` unless said."""
    assert name not in POINTS or POINTS[name] == what, f"fault point {name} declared twice"
    assert set(tried) <= ACTIONS.keys(), f"fault point {name} tries what is no action"
    POINTS[name] = what
    TRIED[name] = tried or ("kill",)
    return name


def arm(environ: Mapping[str, str]) -> None:
    """Arm the points that ``STOKER_FAULT`` names; called once when a process starts."""
    for part in filter(None, environ.get("STOKER_FAULT", "").split(",")):
        name, _, action = part.partition("=")
        action, _, nth = action.partition("@")
        _armed[name] = (action, int(nth or 1))
    if environ.get("STOKER_FAULT_ONCE"):
        _once.append(Path(environ["STOKER_FAULT_ONCE"]))


def reach(name: str) -> bool:
    """Do what the test armed at this point; nothing in ordinary operation.

    Returns whether the message that is about to be sent is to be lost.
    """
    action = _due(name)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "disk_full":
        raise OSError(errno.ENOSPC, f"no space left (fault point {name})")
    elif action == "torn":
        _tearing.append(name)
    return action == "lost"


def write(name: str, data: bytes, file: BinaryIO) -> None:
    """Write and flush ``data`` through a point that may tear it."""
    if tears(name):
        data = data[: len(data) // 2]
    file.write(data)
    file.flush()
    end(name)


def tears(name: str) -> bool:
    """Reach ``name``; return whether half of a write is to be made, and then ``end`` called."""
    reach(name)
    return _tearing == [name]


def end(name: str) -> None:
    """End the process after half of a write; nothing in ordinary operation."""
    if _tearing == [name]:
        os.kill(os.getpid(), signal.SIGKILL)


def _due(name: str) -> str:
    """Return the action that is to be taken now, if any."""
    if not _armed:
        return ""
    _reached[name] += 1
    action, nth = _armed.get(name, ("", 0))
    return action if _reached[name] == nth and _first(name) else ""


def _first(name: str) -> bool:
    """Whether no other process has acted: one alone can remove a file."""
    for token in _once:
        try:
            (token / name if token.is_dir() else token).unlink()
        except FileNotFoundError:
            return False
    return True
