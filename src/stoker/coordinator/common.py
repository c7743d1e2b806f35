"""A ledger that several runs share, with its artifacts and its workers.

``DIR/`` looks like a run directory without a run: ``ledger/``, ``artifacts/``, ``workers/``,
``logs/``, ``settings.json`` of its workers. A run that joins has links in place of its own three,
so that everything that reads a run finds them. Each coordinator holds ``DIR/coordinator.lock``
together with the others, which keeps the workers alive; the last to leave ends workers and owner.

Workers serve every run, so all runs must ask the same of their classes: the first one's settings
hold, and a run that asks for others is refused.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.config.tree import Settings
from stoker.coordinator.record import RunDirectory, changed_settings, write_atomically
from stoker.errors import ConfigInvalid, RunChanged
from stoker.seams.locks import make_sole, take_lock, wait_for_lock

_LINKS = ("ledger", "artifacts", "workers")
_PLACEMENT = ("count", "reserve_cores", "reserve_memory", "idle_exit")
_LOOK_SECONDS = 0.02


class CommonLedger:
    """One run's part in a shared ledger; of a run with its own ledger it is nothing at all."""

    def __init__(self, place: RunDirectory | None) -> None:
        self.place = place
        """Where the shared parts lie, or ``None``."""
        self._lock: int | None = None
        self._last: bool | None = None

    @classmethod
    def of(cls, run: RunDirectory, settings: Settings, *, fresh: bool) -> "CommonLedger":
        """Return what ``run`` shares, linked to it where it is ``fresh``.

        Raises:
            RunChanged: the run was made with another ledger.
            RunDirectoryUnusable: the place cannot be written.
        """
        named = settings.ledger.directory
        wanted = Path(named).resolve() if named else None
        if fresh and wanted is not None:
            RunDirectory(wanted).create()
            run.path.mkdir(parents=True, exist_ok=True)
            for name in _LINKS:
                with suppress(FileExistsError):  # another coordinator of this run was first
                    (run.path / name).symlink_to(wanted / name)
        linked = run.ledger.resolve().parent if run.ledger.is_symlink() else None
        if wanted not in (None, linked):
            has = f"shares {linked}" if linked else "has a ledger of its own"
            raise RunChanged(
                f"run {run.path.name} {has}, not {wanted}; nothing was changed; leave "
                "ledger.directory out, or name the one it was made with"
            )
        return cls(RunDirectory(linked) if linked else None)

    async def join(self, settings: Settings) -> None:
        """Become one of the coordinators of the ledger; waits while the last one tidies up.

        Raises:
            ConfigInvalid: its workers were made with other settings.
        """
        if self.place is None:
            return
        while self._lock is None:
            self._lock = take_lock(self.place.path / "coordinator.lock", shared=True)
            if self._lock is None:
                await asyncio.sleep(_LOOK_SECONDS)
        self._agree(self.place, settings)

    def _agree(self, place: RunDirectory, settings: Settings) -> None:
        turn = wait_for_lock(place.path / "settings.lock")
        try:
            if not place.settings.exists():
                write_atomically(place.settings, settings.model_dump_json(indent=1).encode())
            held = _asked(msgspec.json.decode(place.settings.read_bytes()))
        finally:
            os.close(turn)
        changes = changed_settings(held, _asked(settings.model_dump(mode="json")))
        if changes:
            raise ConfigInvalid(
                f"the workers of {place.path} serve every run on it and were made with other "
                f"settings: {'; '.join(changes)}; nothing was started; ask for the same, or use "
                "another ledger"
            )

    def leave(self) -> bool:
        """Stop being one of them; whether nobody else is. Asked again, the answer is the same."""
        if self._last is None:
            self._last = self._lock is None or make_sole(self._lock)
        return self._last

    def close(self) -> None:
        """Let others join again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _asked(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what all runs must ask alike, of a tree of settings."""
    workers = {key: value for key, value in tree["workers"].items() if key not in _PLACEMENT}
    ledger = {key: value for key, value in tree["ledger"].items() if key != "directory"}
    return {"workers": workers, "sandbox": tree["sandbox"], "ledger": ledger}
