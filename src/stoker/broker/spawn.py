"""Starting an owner process, and making keys. The one place of this room that starts a process."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.broker.base import Durability, LedgerLimits
from stoker.broker.place import DATABASE_ADDRESS, SOCKET_PATH, owner_pid
from stoker.config.secret import Secret
from stoker.errors import ConfigInvalid, LedgerUnavailable

_START_SECONDS = 20.0
_REFUSED = 2
"""Exit status of a gateway whose database cannot hold the ledger; it has said why."""
_MAKE_KEY = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
    *("-nodes", "-days", "36500", "-subj", "/CN=stoker-ledger"),
)


class Database(msgspec.Struct, frozen=True):
    """A PostgreSQL database that a gateway serves."""

    url: Secret
    schema: str

    def hand_over(self) -> bytes:
        """Return it as a gateway reads it: from its standard input, which nobody else sees."""
        return msgspec.json.encode({"url": self.url.reveal(), "schema": self.schema})


class OwnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an owner is started; one that already lives keeps its own."""

    limits: LedgerLimits = LedgerLimits()
    durability: Durability = Durability.POWER_SAFE
    idle_exit_seconds: float = 60.0
    database: Database | None = None
    """Serve this database instead of a file of our own."""


def spawn_owner(
    directory: Path, settings: OwnerSettings, environ: Mapping[str, str] | None = None
) -> None:
    """Start an owner of ``directory`` unless one lives; it is a daemon, not our child.

    Blocks while the interpreter starts. ``environ``: instead of ours, for crash tests.

    Raises:
        ConfigInvalid: its database cannot hold the ledger.
        LedgerUnavailable: the process could not be started; says what it said.
    """
    if owner_pid(directory) is not None:
        return
    if settings.database and importlib.util.find_spec("psycopg") is None:
        raise ConfigInvalid(
            "ledger.url names a PostgreSQL database, and psycopg is not installed; nothing was "
            "started; pip install 'stoker[postgres]'"
        )
    command = [
        sys.executable,
        "-m",
        "stoker.broker.postgres.gateway" if settings.database else "stoker.broker.owner",
        "--directory",
        str(directory),
        "--limits",
        msgspec.json.encode(settings.limits).decode(),
        "--durability",
        settings.durability.value,
        "--idle-exit",
        str(settings.idle_exit_seconds),
    ]
    try:
        started = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            input=settings.database.hand_over() if settings.database else b"",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LedgerUnavailable(f"no owner could be started for {directory}: {error}") from error
    if started.returncode < 0:
        return  # somebody killed it as it started: whoever needs an owner looks again
    if started.returncode:
        said = started.stderr.decode(errors="replace").strip()
        if settings.database and started.returncode == _REFUSED:
            raise ConfigInvalid(said)
        raise LedgerUnavailable(
            f"the owner of {directory} ended at once (status {started.returncode}): {said}"
        )


def known_database(directory: Path) -> Database | None:
    """Return the database that a gateway served for this directory before, without a password."""
    try:
        known = (directory / DATABASE_ADDRESS).read_bytes()
    except FileNotFoundError:
        return None
    url, schema = msgspec.json.decode(known, type=tuple[str, str])
    return Database(Secret(url), schema)


def published_socket(directory: Path) -> Path | None:
    """Return the socket that the last owner published, or ``None``."""
    try:
        return Path((directory / SOCKET_PATH).read_bytes().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return None


def make_key(file: Path) -> None:
    """Write a new gateway key, readable by its owner alone; an existing file is left alone.

    Raises:
        ConfigInvalid: there is one already, or no ``openssl`` to make it with.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigInvalid(f"{file} was not written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as made:
        try:
            done = subprocess.run(  # noqa: S603 - fixed words
                [*_MAKE_KEY, "-keyout", "-", "-out", "-"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            file.unlink()
            raise ConfigInvalid(
                f"openssl could not make a gateway key ({error}); nothing was written; install "
                "openssl, or make the key on a machine that has it and copy it"
            ) from None
        made.write(done.stdout)
