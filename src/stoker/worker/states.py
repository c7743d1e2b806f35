"""Checkpoints of environments, on their way between a box and the run's artifact store."""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.model.checkpoint import Checkpoint
from stoker.sandbox.base import Box


class Store(Protocol):
    """The part of the artifact store that holds whole files. Both calls block."""

    def adopt(self, file: Path, digest: str) -> None:
        """Take over ``file``; it is durable when this returns."""
        ...

    def path(self, digest: str) -> Path:
        """Return where it lies."""
        ...


class States:
    """Keeps and finds checkpoints."""

    def __init__(self, store: Store, drafts: Path) -> None:
        """``drafts``: a directory of this worker alone, on the store's disk; it is emptied."""
        self._store = store
        self._drafts = drafts
        drafts.mkdir(mode=0o700, exist_ok=True)
        for left in drafts.iterdir():  # of an incarnation that was killed
            left.unlink()

    async def keep(self, box: Box) -> Checkpoint:
        """Return a checkpoint of ``box`` that any worker of the run can begin with.

        **Durability:** its content is on disk when this returns.
        """
        saved = await box.checkpoint(self._drafts)
        await asyncio.to_thread(self._store.adopt, Path(saved.file), saved.digest)
        return msgspec.structs.replace(saved, file="")

    def found(self, saved: Checkpoint) -> Checkpoint:
        """Return ``saved`` with the file it lies in."""
        return msgspec.structs.replace(saved, file=str(self._store.path(saved.digest)))
