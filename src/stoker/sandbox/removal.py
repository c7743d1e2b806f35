"""Removing a tree that a box made: any depth, any names, no recursion, never through a link.

The tree is flattened while it is removed: a directory found inside another is first moved to the
top, so that nothing is ever deeper than two levels and two descriptors are enough (``rmtree``
recurses, and fails on 6,000 levels). The caller has killed whoever could interfere.
"""

import contextlib
import errno
import os
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_ALL = 0o700


def remove_tree(path: Path) -> int:
    """Remove ``path`` and everything beneath; return how many entries went. Absent is fine."""
    try:
        top = os.open(path, _OPEN)
    except FileNotFoundError:
        return 0
    except NotADirectoryError:
        path.unlink(missing_ok=True)
        return 1
    except PermissionError:
        path.chmod(_OWNER_ALL)
        top = os.open(path, _OPEN)
    try:
        removed = _empty(top)
    finally:
        os.close(top)
    path.rmdir()
    return removed + 1


def _empty(top: int) -> int:
    moved = 0
    mark = os.urandom(8).hex().encode()  # no name the box could have made beforehand
    os.fchmod(top, _OWNER_ALL)
    directories, removed = _clear(top)
    while directories:
        name = directories.pop()
        child = _open_child(top, name)
        try:
            inner, count = _clear(child)
            removed += count
            for inside in inner:
                _unlock(child, inside)
                flat = b".removing-%s-%d" % (mark, moved)
                moved += 1
                os.rename(inside, flat, src_dir_fd=child, dst_dir_fd=top)
                directories.append(flat)
        finally:
            os.close(child)
        os.rmdir(name, dir_fd=top)
        removed += 1
    return removed


def _clear(directory: int) -> tuple[list[bytes], int]:
    """Unlink everything in ``directory`` that is no directory; return the names that are."""
    directories = []
    removed = 0
    with os.scandir(directory) as entries:
        names = [(os.fsencode(e.name), e.is_dir(follow_symlinks=False)) for e in entries]
    for name, is_directory in names:
        if is_directory:
            directories.append(name)
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
            removed += 1
    return directories, removed


def _open_child(top: int, name: bytes) -> int:
    try:
        child = os.open(name, _OPEN, dir_fd=top)
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
        _unlock(top, name)
        child = os.open(name, _OPEN, dir_fd=top)
    os.fchmod(child, _OWNER_ALL)
    return child


def _unlock(directory: int, name: bytes) -> None:
    """Make a directory ours to change; its kind was checked without following links."""
    os.chmod(name, _OWNER_ALL, dir_fd=directory)
