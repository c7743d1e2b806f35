"""Finding a program by name before the box starts, where the answer cannot be another inside.

The reporter does not search. ``env`` does, inside, for the price of a program started in between;
so a plain name on the path every box has is looked up here: a box sees the system's directories as
the host has them. Anything in doubt (a script, a name that stands in ``/usr/local`` too, a file
that is not everybody's to run, a link that leads elsewhere) is left to ``env``.
"""

import os
import stat
from collections.abc import Mapping

from stoker.sandbox.runtime import INSIDE, RuntimeFiles

_BEFORE = ("/usr/local/sbin", "/usr/local/bin")
"""Directories that come first on the path: a name in one of these is not looked up here."""
_SYSTEM = ("/usr/sbin", "/usr/bin")
_TOP = "/usr"
_ELF = b"\x7fELF"
_EVERYBODY_RUNS = 0o005


def find(name: str, files: RuntimeFiles, *given: Mapping[str, str]) -> str | None:
    """Return the path at which a box has the program ``name``; ``None``: not said here."""
    if "/" in name or not name or any("PATH" in variables for variables in given):
        return None
    own = f"{files.python}/bin/{name}"
    if os.path.lexists(own):
        return f"{INSIDE}/bin/{name}" if _runs(own, str(files.python)) else None
    if any(os.path.lexists(f"{folder}/{name}") for folder in _BEFORE):
        return None
    for folder in _SYSTEM:
        path = f"{folder}/{name}"
        if os.path.lexists(path):
            return path if _runs(path, _TOP) else None
    return None


def _runs(path: str, top: str) -> bool:
    """Return whether everybody may run ``path``, and it is a binary beneath ``top``."""
    real = os.path.realpath(path)
    if not real.startswith((f"{top}/", f"{_TOP}/")):
        return False
    try:
        mode = os.stat(real).st_mode  # noqa: PTH116 - on the way of every action
        with open(real, "rb") as file:  # noqa: PTH123 - the same
            binary = file.read(len(_ELF)) == _ELF
    except OSError:
        return False
    return stat.S_ISREG(mode) and mode & _EVERYBODY_RUNS == _EVERYBODY_RUNS and binary
