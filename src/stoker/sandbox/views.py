"""What a box sees of files that are not its own: the host's system directories, or a root's.

The host's: ``/usr`` and what leads into it, our ``/etc``, the interpreter with a baseline's
packages. A root's: everything at its top but what every box has of its own (``/proc``, ``/dev``,
``/sys``, ``/tmp``, the workspace); where its image names a working directory, the workspace is seen
there too. Our scripts are in both.
All of it read-only.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stoker.errors import ToolRefused
from stoker.sandbox.roots import OWN, WORKSPACE, Root, plain
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS, RuntimeFiles, inside_packages

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ROOT_SCRIPTS = "/.stoker"
_ENV = ("usr/bin/env", "bin/env")


class View(NamedTuple):
    """One such view."""

    links: Sequence[tuple[str, str]]
    """Name and target of symbolic links at the top."""
    binds: Sequence[tuple[str, str]]
    """Path on the host and in the box."""
    scripts: str
    """Where our scripts are in the box."""
    env: str
    """The program that finds others on the path; empty: there is none."""
    workspaces: tuple[str, ...] = (WORKSPACE,)
    """Where the workspace is seen; programs start in the last."""


@cache
def host_view(*, python: Path, scripts: Path, etc: Path, packages: str = "") -> View:
    """Return the view of the host's files, and of ``packages`` where the interpreter looks."""
    links = [
        (f"/{name}", os.readlink(f"/{name}"))  # noqa: PTH115 - plain strings
        for name in SYSTEM
        if Path(f"/{name}").is_symlink()
    ]
    own = [(str(etc), "/etc"), (str(python), INSIDE), (str(scripts), INSIDE_SCRIPTS)]
    own += [(packages, inside_packages())] if packages else []
    shown = [(path, path) for path in system_directories()]
    return View(links, [*shown, *own], INSIDE_SCRIPTS, "/usr/bin/env")


def system_directories() -> list[str]:
    """Return the host's system directories, where they are no links into ``/usr``."""
    found = [Path(f"/{name}") for name in SYSTEM]
    return ["/usr", *(str(path) for path in found if path.is_dir() and not path.is_symlink())]


def root_view(files: RuntimeFiles, root: Root) -> View:
    """Return the view of a root file system of its own."""
    return _root_view(tree=root.tree, directory=root.directory, scripts=str(files.scripts))


@cache
def _root_view(*, tree: str, directory: str, scripts: str) -> View:
    links, binds = [], []
    with os.scandir(tree) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name in OWN or not plain(entry.name):
                continue
            if entry.is_symlink():
                target = os.readlink(entry.path)  # noqa: PTH115 - as above
                links += [(f"/{entry.name}", target)] if plain(target) else []
            else:
                binds.append((entry.path, f"/{entry.name}"))
    env = next((f"/{name}" for name in _ENV if os.path.lexists(f"{tree}/{name}")), "")
    places = (WORKSPACE, directory) if directory and directory != WORKSPACE else (WORKSPACE,)
    return View(links, [*binds, (scripts, _ROOT_SCRIPTS)], _ROOT_SCRIPTS, env, places)


def through_env(view: View, argv: Sequence[str]) -> list[str]:
    """Return the path of the program and its arguments, found on the path inside.

    Raises:
        ToolRefused: nothing inside could find it.
    """
    if view.env:
        return [view.env, "env", "--", *argv]
    if "/" in argv[0]:
        return [argv[0], *argv]
    raise ToolRefused(
        f"the image of this box has no env to find {argv[0]!r}; name the program by its path; "
        "nothing was run"
    )
