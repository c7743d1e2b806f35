"""What baselines take on a machine's disk, and what of it goes when it is more than was allowed.

The least recently used go first. A root that a living box is made of is locked by it and stays, and
so does what is being built. A root that goes loses its name first, so a removal that is killed
half-way leaves nothing that looks whole; the next one ends it, and removes what a killed maker
left. Several may remove at once: each thing is removed under its lock.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.sandbox.removal import remove_tree
from stoker.sandbox.roots import ABOUT, DRAFT, Root

GONE = ".gone"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is kept."""

    kind: str
    """``root``: a root file system; ``packages``: Python packages; ``state``: what files and set-up
    lines made of a workspace."""
    name: str
    """Its file's, after its content."""
    made_of: str
    """What somebody knows it by who asked for it first: where an image or a directory lay, name,
    files and lines of a baseline. Empty: made before such was kept."""
    size_bytes: int
    used_at: float
    """When a box was last made of it, seconds since 1970."""
    in_use: bool
    """A living box is made of it, or it is being built."""


def kept(*, states: Path, roots: Path) -> list[Kept]:
    """Return what is kept, the least recently used first. Blocks for some milliseconds."""
    return sorted([*_roots(roots), *_states(states)], key=lambda one: one.used_at)


def prune(bytes_max: int, *, states: Path, roots: Path) -> list[Kept]:
    """Remove what has not been used for longest until the rest fits; return what went.

    Raises:
        OSError: something could not be removed; the next call goes on.
    """
    drafts = (*roots.glob(f"*{DRAFT}"), *states.glob(f"recipe-*{DRAFT}"))
    for left in (*roots.glob(f"*{GONE}"), *drafts):
        with _taken(left) as taken:
            if taken:  # nobody makes or removes it
                remove_tree(left)
    _remove_empty(states)
    found = kept(states=states, roots=roots)
    total = sum(one.size_bytes for one in found)
    removed = []
    for one in found:
        if total <= bytes_max:
            break
        if _remove(one, states=states, roots=roots):
            total -= one.size_bytes
            removed.append(one)
    return removed


def read_recipe(recipe: Path) -> tuple[str, str]:
    """Return the file of the state that a recipe names, and what it was made of, for people.

    Raises:
        FileNotFoundError: it is gone.
    """
    name, _, made_of = recipe.read_text(encoding="utf-8").partition("\n")
    return name, made_of


def _roots(directory: Path) -> Iterator[Kept]:
    for about in directory.glob(f"*/{ABOUT}"):
        if about.parent.suffix:  # a draft
            continue
        with contextlib.suppress(FileNotFoundError):
            root = msgspec.json.decode(about.read_bytes(), type=Root)
            yield Kept(
                kind=root.kind,
                name=about.parent.name,
                made_of=root.made_of,
                size_bytes=root.size_bytes,
                used_at=about.stat().st_mtime,
                in_use=_locked(about.parent),
            )


def _states(directory: Path) -> Iterator[Kept]:
    for recipe in directory.glob("recipe-*"):
        if recipe.suffix:
            continue
        with contextlib.suppress(FileNotFoundError):
            name, made_of = read_recipe(recipe)
            state = directory / name
            yield Kept(
                kind="state",
                name=recipe.name,
                made_of=made_of,
                size_bytes=state.stat().st_size,
                used_at=recipe.stat().st_mtime,
                in_use=_locked(recipe),
            )


def _remove_empty(states: Path) -> None:
    """Remove recipes whose state never came to its place: who built it was killed."""
    for recipe in states.glob("recipe-*"):
        if recipe.suffix:
            continue
        with _taken(recipe) as taken, contextlib.suppress(FileNotFoundError):
            if taken and not (states / read_recipe(recipe)[0]).is_file():
                recipe.unlink()


def _remove(one: Kept, *, states: Path, roots: Path) -> bool:
    target = (states if one.kind == "state" else roots) / one.name
    with _taken(target) as taken:
        if not taken:
            return False
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            if one.kind == "state":
                _remove_state(target)
            else:
                gone = target.with_suffix(GONE)
                target.rename(gone)
                remove_tree(gone)
    return True


def _remove_state(recipe: Path) -> None:
    name, _ = read_recipe(recipe)
    recipe.unlink()
    # Two recipes may have made the same; whoever reads it has it open.
    for other in recipe.parent.glob("recipe-*"):
        with contextlib.suppress(FileNotFoundError):
            if not other.suffix and read_recipe(other)[0] == name:
                return
    recipe.with_name(name).unlink(missing_ok=True)


def _locked(target: Path) -> bool:
    with _taken(target) as taken:
        return not taken


@contextlib.contextmanager
def _taken(target: Path) -> Iterator[bool]:
    """Hold the lock of ``target``, or say that somebody else does."""
    lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)
