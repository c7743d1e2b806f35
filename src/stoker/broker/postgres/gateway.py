"""A gateway process: ``python -m stoker.broker.postgres.gateway --directory D``.

Serves the directory's socket as an owner does (0002), with the ledger in a PostgreSQL database
that other gateways serve too; its address comes on standard input. It may be killed at will. When
the database goes away it hangs up on everybody without a reply, waits for it, and takes calls
again: clients connect again by themselves and repeat what was not answered.
"""

import argparse
import logging
import os
import select
import signal
import sys
from pathlib import Path

import msgspec
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from stoker.broker.base import Durability, LedgerLimits
from stoker.broker.exchange import Exchange
from stoker.broker.owner import collect_seldom, daemonize, keep_memory, publish
from stoker.broker.place import DATABASE_ADDRESS, check_directory, socket_path, take_lock
from stoker.broker.postgres.bell import Bell
from stoker.broker.postgres.connection import connect, migrate
from stoker.broker.postgres.promises import verify
from stoker.broker.postgres.service import GatewayService
from stoker.broker.postgres.store import PostgresStore
from stoker.broker.postgres.sweeper import Sweeper
from stoker.broker.postgres.time import ServerClock
from stoker.broker.server import Server
from stoker.broker.sockets import listen
from stoker.broker.spawn import Database
from stoker.broker.store import StorageConflict, StorageLost
from stoker.config.secret import Secret
from stoker.errors import LedgerUnavailable, StokerError
from stoker.seams.clock import SystemClock
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import arm

_AGAIN_SECONDS = 0.25
_log = logging.getLogger("stoker.ledger")


class Gateway:
    """One gateway, over all the connections to its database that it will need."""

    def __init__(
        self, database: Database, limits: LedgerLimits, durability: Durability, idle_exit: float
    ) -> None:
        self._database = database
        self._limits = limits
        self._durability = durability
        self._idle_exit = idle_exit
        self._server: Server | None = None
        self._stopping = False

    def check(self) -> None:
        """Look whether the database can hold the ledger; its schema is brought up to date."""
        db = connect(self._database.url, self._database.schema)
        try:
            verify(db, self._durability)
            migrate(db, self._database.schema)
        finally:
            db.close()

    def stop(self, *_: object) -> None:
        """End after the group that is being carried out."""
        self._stopping = True
        if self._server is not None:
            self._server.stop()

    def serve(self, socket_file: Path, directory: Path) -> None:
        """Serve until stopped or idle, through any number of database restarts."""
        with listen(socket_file) as listener:
            publish(directory, socket_file)
            machine = SystemClock()
            here = machine.monotonic()
            while not self._stopping:
                try:
                    service, clock, bell, sweeper = self._open()
                except (LedgerUnavailable, StorageLost, StorageConflict) as error:
                    if machine.monotonic() - here > self._idle_exit:
                        return  # whoever still needs it starts another
                    _log.warning("waiting for the database: %s", error)
                    select.select([], [], [], _AGAIN_SECONDS)
                    continue
                # The listening socket outlives this server: callers queue up in it meanwhile.
                server = self._server = Server(
                    Exchange(service), listener.dup(), clock, self._idle_exit
                )
                server.watch(bell.fileno(), bell.listen)
                server.watch(sweeper.fileno(), sweeper.listen)
                try:
                    if not self._stopping:
                        server.serve()
                    service.leave()
                except StorageLost as error:
                    _log.warning("the database went away, nobody was answered: %s", error)
                else:
                    return
                finally:
                    here = machine.monotonic()
                    self._server = None
                    server.close()
                    service.close()
                    bell.close()
                    sweeper.close()

    def _open(self) -> tuple[GatewayService, ServerClock, Bell, Sweeper]:
        database, clock = self._database, ServerClock()
        db = connect(database.url, database.schema)
        verify(db, self._durability)
        migrate(db, database.schema)
        store = PostgresStore(db, database.schema)
        service = GatewayService(store, self._limits, self._durability, clock)
        service.ask_time()
        service.open(clock.now(), boot_id="", lineage=fresh_id("lin_"))
        bell = Bell(connect(database.url, database.schema), store.key, service.wake)
        service.rings(bell.ring)
        sweeper = Sweeper(connect(database.url, database.schema))
        service.sweeps(sweeper.sweep)
        return service, clock, bell, sweeper


def main() -> int:
    """Serve the ledger until nobody needs this gateway; return the exit status."""
    parser = argparse.ArgumentParser(prog="stoker.broker.postgres.gateway")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--limits", default="{}")
    parser.add_argument("--durability", type=Durability, default=Durability.POWER_SAFE)
    parser.add_argument("--idle-exit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--foreground", action="store_true", help="do not become a daemon")
    arguments = parser.parse_args()
    arm(os.environ)
    directory: Path = arguments.directory.resolve()
    try:
        given = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str])
        database = Database(Secret(given["url"]), given["schema"])
        limits = msgspec.json.decode(arguments.limits, type=LedgerLimits)
        gateway = Gateway(database, limits, arguments.durability, arguments.idle_exit)
        check_directory(directory)
        socket_file = socket_path(directory, os.environ)
        _check(gateway, directory)
    except (StokerError, msgspec.MsgspecError, StorageLost) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not arguments.foreground and not daemonize(directory):
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    if take_lock(directory) is None:
        return 0  # somebody serves it already, which is all that was wanted
    _remember(database, directory)
    collect_seldom()
    keep_memory()
    signal.signal(signal.SIGTERM, gateway.stop)
    signal.signal(signal.SIGINT, gateway.stop)
    try:
        gateway.serve(socket_file, directory)
    except Exception:  # noqa: BLE001 - a named boundary: whatever it was, the next gateway begins anew
        _log.exception("the gateway ends without a reply")
        os._exit(1)
    socket_file.unlink(missing_ok=True)
    return 0


def _check(gateway: Gateway, directory: Path) -> None:
    """Refuse at once what can be refused; a database that was used here before may be away."""
    try:
        gateway.check()
    except LedgerUnavailable:
        if not (directory / DATABASE_ADDRESS).exists():
            raise


def _remember(database: Database, directory: Path) -> None:
    """Keep the address, without a password, for whoever starts a gateway here without settings."""
    parts = {k: v for k, v in conninfo_to_dict(database.url.reveal()).items() if k != "password"}
    kept = msgspec.json.encode((make_conninfo("", **parts), database.schema))
    file = directory / DATABASE_ADDRESS
    file.touch(mode=0o600)
    file.write_bytes(kept)


if __name__ == "__main__":
    sys.exit(main())
