"""A real process whose disk is recorded: ``-m support.disk_recorder TRACE ROOT BREAK MODULE …``.

``BREAK`` names a fault that a check of the recording must find, or ``none``:
``no_sync`` never syncs the log; ``late_sync`` syncs it after the replies; ``epoch`` opens without
syncing the new epoch; ``no_file_sync`` and ``no_directory_sync`` leave those out of our own files.
"""

import os
import runpy
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from stoker.broker import store_sqlite
from stoker.broker.store_sqlite import SqliteStore
from support.disk_trace import Trace, replace, watch

CHECKPOINT_PAGES = 24
"""Small, so that the log starts over many times within a few cycles."""


def main() -> None:
    path, root, fault, module = sys.argv[1:5]
    store_sqlite._CHECKPOINT_PAGES = CHECKPOINT_PAGES
    watch(Trace(Path(path), Path(root).resolve()))
    FAULTS[fault]()
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _no_sync() -> None:
    replace(os, "fdatasync", lambda _: None)


def _late_sync() -> None:
    begin, commit = SqliteStore.begin, SqliteStore.commit
    owed: list[bool] = []

    def late(self: SqliteStore, *, sync: bool) -> None:
        commit(self, sync=False)
        if sync:
            owed.append(True)

    def pay(self: SqliteStore) -> None:
        if owed:
            os.fdatasync(self._wal)
            owed.clear()
        begin(self)

    replace(SqliteStore, "commit", late)
    replace(SqliteStore, "begin", pay)


def _epoch() -> None:
    commit = SqliteStore.commit

    def opening(self: SqliteStore, *, sync: bool) -> None:
        commit(self, sync=sync and self.commits > 0)

    replace(SqliteStore, "commit", opening)


def _unsynced(is_kind: Callable[[int], bool]) -> Callable[[], None]:
    def apply() -> None:
        fsync = os.fsync
        replace(os, "fsync", lambda fd: None if is_kind(os.fstat(fd).st_mode) else fsync(fd))

    return apply


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "no_sync": _no_sync,
    "late_sync": _late_sync,
    "epoch": _epoch,
    "no_file_sync": _unsynced(stat.S_ISREG),
    "no_directory_sync": _unsynced(stat.S_ISDIR),
}

if __name__ == "__main__":
    main()
