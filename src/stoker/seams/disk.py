"""Names that survive a power cut: a directory is synced apart from the files in it."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Return once the names in ``directory`` are on disk."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_directories(directory: Path) -> list[Path]:
    """Make ``directory`` and what is missing above it; return what was made, outermost first.

    Raises:
        OSError: one cannot be made; those made so far are left.
    **Durability:** their names are on disk when this returns.
    """
    missing = [directory, *directory.parents]
    made: list[Path] = []
    for place in reversed([place for place in missing if not place.is_dir()]):
        try:
            place.mkdir()
        except FileExistsError:
            if not place.is_dir():
                raise
            continue  # somebody else has made it meanwhile
        made.append(place)
        sync_directory(place.parent)
    return made
