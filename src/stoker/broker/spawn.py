"""Starting an owner process. The one place of this room that starts a process."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.broker.base import Durability, LedgerLimits
from stoker.broker.place import SOCKET_PATH, owner_pid
from stoker.errors import LedgerUnavailable

_START_SECONDS = 20.0


class OwnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an owner is started; one that already lives keeps its own."""

    limits: LedgerLimits = LedgerLimits()
    durability: Durability = Durability.POWER_SAFE
    idle_exit_seconds: float = 60.0


def spawn_owner(
    directory: Path, settings: OwnerSettings, environ: Mapping[str, str] | None = None
) -> None:
    """Start an owner of ``directory`` unless one lives; it is a daemon, not our child.

    Blocks while the interpreter starts. ``environ``: instead of ours, for crash tests.

    Raises:
        LedgerUnavailable: the process could not be started; says what it said.
    """
    if owner_pid(directory) is not None:
        return
    command = [
        sys.executable,
        "-m",
        "stoker.broker.owner",
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
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LedgerUnavailable(f"no owner could be started for {directory}: {error}") from error
    if started.returncode:
        said = started.stderr.decode(errors="replace").strip()
        raise LedgerUnavailable(
            f"the owner of {directory} ended at once (status {started.returncode}): {said}"
        )


def published_socket(directory: Path) -> Path | None:
    """Return the socket that the last owner published, or ``None``."""
    try:
        return Path((directory / SOCKET_PATH).read_bytes().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return None
