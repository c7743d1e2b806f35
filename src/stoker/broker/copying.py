"""A consistent copy of a ledger's database, whether somebody owns it or not; it changes nothing.

From a living owner by ``CopyRequest``, a few pages between two groups of its work. Without an owner
the files are copied under the directory's lock, so that none starts meanwhile. A copy is marked:
whoever opens it first renews its lineage, since nobody can know what the original did afterwards.
"""

import os
import shutil
from contextlib import closing
from pathlib import Path

import apsw
import msgspec

from stoker.broker.client import LedgerClient
from stoker.broker.operating import CopyRequest
from stoker.broker.place import DATABASE, DATABASE_ADDRESS, take_lock
from stoker.broker.schema import check_version
from stoker.broker.store_sqlite_files import read_meta
from stoker.errors import RunDirectoryUnusable

_LOG = DATABASE + "-wal"


class CopyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy says of its original."""

    lineage: str
    epoch: int
    size_bytes: int


async def copy_database(directory: Path, target: Path) -> None:
    """Copy the database of ``directory`` into the new file ``target``, as one file without a log.

    Raises:
        RunDirectoryUnusable: there is no ledger in ``directory``.
        LedgerTooNew: a newer Stoker made it.
        LedgerUnavailable: its owner lives and does not answer.
        LedgerRefused: ``target`` cannot be written.
    **Cancellation:** a part of ``target`` is left behind. **Durability:** none; see ``mark``.
    """
    database = directory / DATABASE
    if (directory / DATABASE_ADDRESS).exists():
        raise RunDirectoryUnusable(
            f"the ledger of {directory} lies in PostgreSQL; nothing was copied; use pg_dump or "
            "pg_basebackup"
        )
    if not database.exists():
        raise RunDirectoryUnusable(f"there is no ledger in {directory}; nothing was copied")
    check_version(database)
    lock = take_lock(directory)
    if lock is None:
        await _from_owner(directory, target)
        return
    try:
        shutil.copyfile(database, target)
        if (directory / _LOG).exists():
            shutil.copyfile(directory / _LOG, f"{target}-wal")
    finally:
        os.close(lock)
    _settle(target)


async def _from_owner(directory: Path, target: Path) -> None:
    request = CopyRequest(path=os.path.abspath(target))  # noqa: PTH100, ASYNC240 - looks at no disk
    client = LedgerClient((directory,), "cli", None)
    try:
        remaining = 1
        while remaining:
            remaining = (await client.copy_some(request)).remaining
    finally:
        await client.close()
    _settle(target)


def _settle(target: Path) -> None:
    """Fold the log into the file; one that is damaged is left as it is, for ``check`` to tell."""
    try:
        with closing(apsw.Connection(str(target))) as db:
            db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
            db.execute("PRAGMA journal_mode = DELETE").fetchall()
    except apsw.Error:
        return


def mark(target: Path) -> CopyFacts:
    """Mark a copy as one, so that it is never taken for its original.

    **Durability:** the file is on disk when this returns.
    """
    with closing(apsw.Connection(str(target))) as db:
        meta = read_meta(db)
        meta.copied = True
        db.execute("UPDATE meta SET record = ?", (msgspec.msgpack.encode(meta),))
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return CopyFacts(lineage=meta.lineage, epoch=meta.epoch, size_bytes=target.stat().st_size)
