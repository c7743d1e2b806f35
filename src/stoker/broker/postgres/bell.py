"""Waking the polls that wait at other gateways: one notification a group, after its commit.

It has a connection of its own and does not wait for the disk: a ``NOTIFY`` inside the group would
hold a lock of the whole server until the group is synced. A wake-up that is lost with its gateway
is made up for by every gateway's own look, once a second.
"""

from collections.abc import Callable

import psycopg

from stoker.broker.postgres.connection import Db
from stoker.broker.store import StorageLost


class Bell:
    """One gateway's ear and voice."""

    def __init__(self, db: Db, key: int, heard: Callable[[], None]) -> None:
        self._db = db
        self._channel = f"stoker_{key & 0xFFFFFFFF:08x}"
        self._heard = heard
        db.execute("SET synchronous_commit = off")
        db.execute(f"LISTEN {self._channel}".encode())

    def fileno(self) -> int:
        """Return what becomes readable when another gateway rings."""
        return self._db.fileno()

    def ring(self) -> None:
        """Wake the polls at all other gateways."""
        try:
            self._db.execute(f"NOTIFY {self._channel}".encode())
            self._take()
        except psycopg.OperationalError as error:
            raise StorageLost(" ".join(str(error).split())) from None

    def listen(self) -> None:
        """Take in what others rang."""
        try:
            self._db.pgconn.consume_input()
            self._take()
        except psycopg.OperationalError as error:
            raise StorageLost(" ".join(str(error).split())) from None

    def _take(self) -> None:
        own = self._db.info.backend_pid
        others = False
        while (note := self._db.pgconn.notifies()) is not None:
            others |= note.be_pid != own
        if others:
            self._heard()

    def close(self) -> None:
        """Hang up."""
        self._db.close()
