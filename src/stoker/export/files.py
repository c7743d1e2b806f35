"""The file an export is written to: there whole, or as it was before.

What is written goes to a draft beside the target and takes its name only when all of it is on
disk. A target that cannot be written is found before anything is read.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stoker.errors import BadInput
from stoker.seams.disk import sync_directory
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

EXPORT_SYNC = declare("export.sync", "an export is written and about to be synced", "disk_full")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes ``target`` when the block ends; an error leaves ``target`` alone.

    Raises:
        BadInput: ``target`` cannot be written; nothing was.
        OSError: the disk is full or gone; the draft was removed.

    **Durability:** the file and its name are on disk when the block has ended.
    """
    place = _place(target)
    draft = place.parent / f".{fresh_id('new_')}"
    try:
        file = draft.open("xb")
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    try:
        with file:
            yield file
            reach(EXPORT_SYNC)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
        sync_directory(place.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; nothing was written", str(target)) from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _place(target: Path) -> Path:
    """Return where the file really lies: a link keeps being one.

    Anything but a plain file is refused: taking the place of ``/dev/null`` would break the host.
    """
    try:
        place = target.resolve()
        mode = place.stat().st_mode
    except FileNotFoundError:
        return place
    except (OSError, RuntimeError) as error:
        raise _unwritable(target, str(getattr(error, "strerror", None) or error)) from error
    if stat.S_ISDIR(mode):
        raise _unwritable(target, "it is a directory")
    if not stat.S_ISREG(mode):
        raise _unwritable(target, "it is no plain file")
    if not os.access(place, os.W_OK):
        raise _unwritable(target, "it is write-protected")
    return place


def _unwritable(target: Path, why: str) -> BadInput:
    return BadInput(
        f"{target} cannot be written ({why}); nothing was exported; choose another --out FILE"
    )
