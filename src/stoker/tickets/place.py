"""What is found in a run's directory: its settings and its ledger."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from stoker.broker.base import Durability, Ledger
from stoker.broker.client import connect
from stoker.broker.limits import limits_of
from stoker.broker.network import remote_of
from stoker.config.tree import Settings
from stoker.errors import ConfigInvalid, RunNotFound


def settings_of(run_directory: Path) -> Settings:
    """Return the settings a run was made with.

    Raises:
        RunNotFound: no run lies there (yet).
        ConfigInvalid: its settings are of another version of Stoker.
    """
    file = run_directory / "settings.json"
    try:
        return Settings.model_validate_json(file.read_bytes())
    except OSError as error:
        raise RunNotFound(
            f"{run_directory} holds no run ({error.strerror}); nothing was started; give the "
            "directory that `stoker run` made"
        ) from error
    except ValidationError as error:
        raise ConfigInvalid(f"the settings {file} cannot be used: {error}") from error


@asynccontextmanager
async def open_ledger(run_directory: Path) -> AsyncIterator[Ledger]:
    """Yield the ledger of a run; its owner is started where none lives.

    Raises:
        RunNotFound: no run lies there (yet).
        LedgerUnavailable: it can be neither reached nor started.
    """
    settings = settings_of(run_directory)
    ledger = await connect(
        run_directory / "ledger",
        role="tickets",
        limits=limits_of(settings.ledger, settings.workers, settings.services),
        durability=Durability(settings.ledger.durability),
        idle_exit_seconds=settings.ledger.idle_exit,
        elsewhere=remote_of(settings.ledger),
    )
    try:
        yield ledger
    finally:
        await ledger.close()
