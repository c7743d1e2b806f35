"""The owner process of one ledger: ``python -m stoker.broker.owner --directory D``.

One process owns the database (``flock``), outlives the coordinator, and is started by whoever
needs it; a second one ends quietly. It becomes a daemon with its own session and a log file, and
ends when nobody has been connected for a while. After a failed commit or sync it ends without a
reply: the next owner reads what is really on the disk.
"""

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from stoker.broker.base import Durability, LedgerLimits
from stoker.broker.exchange import Exchange
from stoker.broker.place import (
    DATABASE,
    LOG,
    SOCKET_PATH,
    check_directory,
    socket_path,
    take_lock,
)
from stoker.broker.schema import check_version
from stoker.broker.server import Server
from stoker.broker.service import LedgerService
from stoker.broker.sockets import listen
from stoker.broker.store_sqlite import SqliteStore
from stoker.errors import ConfigInvalid, StokerError
from stoker.seams.clock import SystemClock, boot_id
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import arm, declare, reach, write

OPEN_BEFORE = declare(
    "ledger.open.before",
    "an owner holds the lock and has not opened the file",
    "kill",
    "disk_full",
)
CLOSE_BEFORE = declare("ledger.close.before", "an owner nobody needs is about to close the file")
OPEN_AFTER = declare("ledger.open.after", "the new epoch is durable; nobody can connect yet")
PUBLISH = declare(
    "ledger.publish", "where the owner listens is written", "kill", "torn", "disk_full"
)

_COLLECTED_AFTER = (50_000, 20, 100)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 * 1024 * 1024
_log = logging.getLogger("stoker.ledger")


def main() -> int:
    """Own the ledger until nobody needs it; return the exit status."""
    parser = argparse.ArgumentParser(prog="stoker.broker.owner")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--limits", default="{}")
    parser.add_argument("--durability", type=Durability, default=Durability.POWER_SAFE)
    parser.add_argument("--idle-exit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--foreground", action="store_true", help="do not become a daemon")
    arguments = parser.parse_args()
    arm(os.environ)
    directory: Path = arguments.directory.resolve()
    try:
        limits = msgspec.json.decode(arguments.limits, type=LedgerLimits)
        if arguments.durability is Durability.REPLICATED:
            raise ConfigInvalid("one file on one machine is not replicated; use ledger.url")
        check_directory(directory)
        check_version(directory / DATABASE)
        socket_file = socket_path(directory, os.environ)
    except (StokerError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not arguments.foreground and not daemonize(directory):
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    lock = take_lock(directory)
    if lock is None:
        return 0  # somebody owns it already, which is all that was wanted
    service = LedgerService(_open(directory), limits, arguments.durability)
    service.open(SystemClock().now(), boot_id=boot_id(), lineage=fresh_id("lin_"))
    reach(OPEN_AFTER)
    return _serve(service, directory, socket_file, arguments.idle_exit)


def _open(directory: Path) -> SqliteStore:
    reach(OPEN_BEFORE)
    return SqliteStore(directory / DATABASE)


def daemonize(directory: Path) -> bool:
    """Return ``True`` in a child with its own session and a log file, ``False`` in the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return False
    os.setsid()
    os.chdir(directory)
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    return True


def _serve(service: LedgerService, directory: Path, socket_file: Path, idle_exit: float) -> int:
    listener = listen(socket_file)
    server = Server(Exchange(service), listener, SystemClock(), idle_exit)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, lambda *_: server.stop())
    publish(directory, socket_file)
    collect_seldom()
    keep_memory()
    _log.info("ledger %s open, %s", directory, service.durability)
    try:
        server.serve()
    except Exception:  # noqa: BLE001 - a named boundary: whatever it was, the next owner must reopen
        _log.exception("the ledger ends without a reply; the next owner reopens it")
        os._exit(1)  # nothing may be flushed or checkpointed after a failed sync
    socket_file.unlink(missing_ok=True)
    server.close()
    reach(CLOSE_BEFORE)
    service.close()
    _log.info("ledger %s closed", directory)
    return 0


def collect_seldom() -> None:
    """Look for reference cycles seldom: a ledger's records have none, and it keeps thousands."""
    gc.freeze()
    gc.set_threshold(*_COLLECTED_AFTER)


def keep_memory() -> None:
    """Keep up to ``_KEPT_BYTES`` of freed memory: the next group needs the same buffers.

    A group of 128 actions has frames of 200 KiB, which glibc would give back to the kernel and
    fault in again page by page: a tenth of the owner's CPU time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library keeps to its own ways
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def publish(directory: Path, socket_file: Path) -> None:
    """Say in the ledger's directory where its socket is."""
    fresh = directory / f"{SOCKET_PATH}.new"
    with fresh.open("wb") as file:
        write(PUBLISH, os.fsencode(socket_file), file)
    fresh.replace(directory / SOCKET_PATH)


if __name__ == "__main__":
    sys.exit(main())
