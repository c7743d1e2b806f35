"""The schema of a ledger's file: numbered migrations in ``sql/NNNN_name.sql``.

``PRAGMA user_version`` numbers a file. Opening an older one applies what is missing, all of it in
one transaction; a newer one is refused with the version of Stoker that it needs, untouched.
Invariants: a migration that has been released is never edited; after one the header of the file
itself holds its number, so that whoever may not open the database can read it.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import apsw

import stoker
from stoker.errors import LedgerTooNew

_HEADER_BYTES = 100
_USER_VERSION = slice(60, 64)
_MAGIC = b"SQLite format 3\0"
_NUMBERS_FROM = 2
"""Files before had no number of their own."""


class Migration(NamedTuple):
    """One step from the version before to ``version``."""

    version: int
    sql: str


def migrations() -> tuple[Migration, ...]:
    """Return every step, from an empty file on."""
    found = [
        Migration(int(entry.name[:4]), entry.read_text("utf-8"))
        for entry in (files("stoker.broker") / "sql").iterdir()
        if entry.name[:4].isdigit()
    ]
    found.sort()
    assert [one.version for one in found] == list(range(1, len(found) + 1)), "a number is missing"
    return tuple(found)


def migrate(db: apsw.Connection, path: Path, steps: Sequence[Migration] | None = None) -> int:
    """Bring the open file to the newest of ``steps``; return the version it had.

    Raises:
        LedgerTooNew: the file is newer; nothing was changed.
    **Durability:** what was migrated is on disk when this returns.
    """
    chosen = migrations() if steps is None else steps
    newest = chosen[-1].version
    had = _version(db)
    if had > newest:
        raise _too_new(path, had, newest, _wanted(db))
    if had == newest:
        return had
    db.execute("BEGIN IMMEDIATE")
    try:
        for step in (step for step in chosen if step.version > had):
            db.execute(step.sql)
            if step.version >= _NUMBERS_FROM:
                applied = (step.version, stoker.__version__)
                db.execute("INSERT INTO migration VALUES (?, ?)", applied)
        db.execute(f"PRAGMA user_version = {newest}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return had


def check_version(path: Path) -> None:
    """Return when this Stoker can open the database ``path``, or there is none yet.

    Only looks at the file's header, so it may be asked while another process owns the file.

    Raises:
        LedgerTooNew: a newer Stoker made it; nothing was changed.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return
    newest = migrations()[-1].version
    found = int.from_bytes(header[_USER_VERSION], "big") if header.startswith(_MAGIC) else 0
    if found > newest:
        raise _too_new(path, found, newest, _asked(path))


def _version(db: apsw.Connection) -> int:
    [(numbered,)] = db.execute("PRAGMA user_version").fetchall()
    if numbered:
        return int(numbered)
    named = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchall()
    return 1 if named else 0


def _wanted(db: apsw.Connection) -> str:
    found = db.execute("SELECT stoker FROM migration ORDER BY version DESC LIMIT 1").fetchall()
    return str(found[0][0]) if found else ""


def _asked(path: Path) -> str:
    """Return which Stoker wrote ``path``, or nothing where its owner lets nobody look."""
    try:
        db = apsw.Connection(f"{path.absolute().as_uri()}?immutable=1", flags=_LOOKING)
        try:
            return _wanted(db)
        finally:
            db.close()
    except apsw.Error:
        return ""


_LOOKING = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI


def _too_new(path: Path, found: int, newest: int, wanted: str) -> LedgerTooNew:
    needs = f"stoker {wanted} or newer" if wanted else "the newer stoker that made it"
    return LedgerTooNew(
        f"the ledger {path} has schema version {found} and this is stoker {stoker.__version__}, "
        f"which reads up to {newest}; nothing was changed; open it with {needs}"
    )
