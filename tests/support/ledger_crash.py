"""A store that can lose power: everything after the last synced commit is gone."""

import copy
from typing import Any

from stoker.broker.store_memory import MemoryStore

_TABLES = (
    "_meta",
    "_rows",
    "_by_rollout",
    "_queues",
    "_events",
    "_heads",
    "_entries",
    "_owners",
    "_workers",
    "_audit",
)


class PowerStore(MemoryStore):
    """A memory store with a disk that holds only what was synced."""

    def __init__(self) -> None:
        super().__init__()
        self._disk = self._snapshot()
        self.synced = True
        """Whether the disk holds everything."""

    def commit(self, *, sync: bool) -> None:
        super().commit(sync=sync)
        if sync:
            self._disk = self._snapshot()
        self.synced = sync

    def lose_power(self) -> None:
        """Forget every commit since the last sync."""
        for name, value in self._disk.items():
            setattr(self, name, _copied(value))
        self.synced = True

    def taken(self) -> dict[str, Any]:
        """Return a copy of the ledger, as a file of it is taken between two groups."""
        return self._snapshot()

    def put_back(self, copy: dict[str, Any]) -> None:
        """Become a copy, marked as one, on disk too."""
        self._disk = copy
        self.lose_power()
        meta = self.meta()
        assert meta is not None
        meta.copied = True
        self.put_meta(meta)
        self.commit(sync=True)

    def tables(self) -> dict[str, Any]:
        """Return every table by name."""
        return {name: getattr(self, name) for name in _TABLES}

    def disk(self) -> dict[str, Any]:
        """Return every table as power would leave it."""
        return self._disk

    def copy_tables_of(self, other: "PowerStore") -> None:
        """Become another store with the same content; what is on disk never changes in place."""
        for name, value in other.tables().items():
            setattr(self, name, _copied(value))
        self._undo = []

    def _snapshot(self) -> dict[str, Any]:
        return {name: _copied(getattr(self, name)) for name in _TABLES}


def _copied(value: Any) -> Any:
    """Copy two levels: tables and their lists; rows themselves never change."""
    fresh = copy.copy(value)
    if isinstance(fresh, dict):
        for key, inner in fresh.items():
            if isinstance(inner, list):
                fresh[key] = list(inner)
    return fresh
