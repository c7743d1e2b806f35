"""Vacuuming what is emptied as fast as it fills, as often as it has filled.

Inputs, results and events live for one action; autovacuum looks once a minute, and by then they
have grown by a minute's load. A gateway asks for a vacuum after so many rows, over a connection of
its own, and does not wait for it. Tables that only grow are autovacuum's.
"""

import psycopg

from stoker.broker.postgres.connection import Db
from stoker.broker.store import StorageLost

SWEEP_ROWS = 4096
"""Actions that ended since the last vacuum was asked for."""
_VACUUM = b"""VACUUM (SKIP_LOCKED, TRUNCATE false)
    input, result, event, unfinished, heartbeat, counter, total, owner"""


class Sweeper:
    """One gateway's broom."""

    def __init__(self, db: Db) -> None:
        self._pgconn = db.pgconn
        self._db = db
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a vacuum has been asked for and has not ended."""
        return self._busy

    def fileno(self) -> int:
        """Return what becomes readable when a vacuum has ended."""
        return self._db.fileno()

    def sweep(self) -> None:
        """Ask for a vacuum unless one is running. Raises ``StorageLost``."""
        if self._busy:
            return
        try:
            self._pgconn.send_query(_VACUUM)
        except psycopg.OperationalError as error:
            raise StorageLost(" ".join(str(error).split())) from None
        self._busy = True

    def listen(self) -> None:
        """Take in what the server says of it; that it could not be done is told in its log."""
        try:
            self._pgconn.consume_input()
            while self._busy and not self._pgconn.is_busy():
                self._busy = self._pgconn.get_result() is not None
        except psycopg.OperationalError as error:
            raise StorageLost(" ".join(str(error).split())) from None

    def close(self) -> None:
        """Hang up."""
        self._db.close()
