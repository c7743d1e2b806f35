"""The file of a ledger as a whole: copied while it is open, rewritten without its unused pages.

Both outside of transactions, on the owner's one connection. What that connection commits between
two steps of a copy reaches the copied pages too (SQLite's backup interface), so that a copy never
begins again and is the ledger as of its last step.
"""

import os
from pathlib import Path
from typing import Any

import apsw
import msgspec

from stoker.broker.store import Meta
from stoker.errors import LedgerRefused
from stoker.seams.faultpoints import declare, reach

COPY_STEP = declare(
    "maintain.copy", "some pages of a living ledger are about to be copied", "kill", "disk_full"
)
COMPACT = declare("maintain.compact", "the file is about to be rewritten", "kill", "disk_full")


class FileCopy:
    """One copy in progress."""

    def __init__(self, source: apsw.Connection, path: str) -> None:
        """Begin.

        Raises:
            LedgerRefused: ``path`` cannot be written.
        """
        self.path = path
        if not os.path.isabs(path) or Path(path).exists():  # noqa: PTH117 - as it was sent
            raise LedgerRefused(
                f"{path} is no absolute path of a new file; nothing was copied; choose another one"
            )
        try:
            self._target = apsw.Connection(path)
            self._target.execute("PRAGMA synchronous = OFF")  # whoever asked syncs the whole file
            self._backup = self._target.backup("main", source, "main")
        except apsw.Error as error:
            raise LedgerRefused(
                f"{path} cannot be written ({error}); nothing was copied"
            ) from error

    def step(self, pages: int) -> tuple[int, int]:
        """Copy some more; return pages that remain, and all.

        Raises:
            LedgerRefused: the target's disk is full or failed; the copy is given up.
        """
        try:
            reach(COPY_STEP)
            self._backup.step(pages)
        except (apsw.Error, OSError) as error:
            self.close()
            raise LedgerRefused(f"{self.path} cannot be written ({error}); give it up") from error
        remaining, total = self._backup.remaining, self._backup.page_count
        if self._backup.done:
            self.close()
            return 0, total
        return max(1, remaining), total

    def close(self) -> None:
        """Let go of the target, complete or not."""
        self._backup.close(True)
        self._target.close(True)


def compact(db: apsw.Connection, path: Path) -> tuple[int, int]:
    """Rewrite the file without unused pages; return bytes of file and log before and after.

    One transaction of SQLite's: a kill at any moment leaves the old content or the new.
    """
    before = _bytes(path)
    reach(COMPACT)
    db.execute("PRAGMA temp_store = FILE")  # a large ledger must not be rebuilt in memory
    try:
        db.execute("VACUUM")
    finally:
        db.execute("PRAGMA temp_store = MEMORY")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return before, _bytes(path)


def read_meta(db: apsw.Connection) -> Meta:
    """Return a ledger's own record out of its file."""
    stored: Any = db.execute("SELECT record FROM meta").fetchall()[0][0]
    return msgspec.msgpack.decode(stored, type=Meta)


def _bytes(path: Path) -> int:
    log = Path(f"{path}-wal")
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)
