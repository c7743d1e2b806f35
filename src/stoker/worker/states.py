"""Checkpoints of environments, on their way between a box and the run's artifact store."""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.errors import StokerError
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


class Remote(Protocol):
    """A store that other machines reach too. Both calls block."""

    def put(self, file: Path, digest: str) -> None:
        """Keep ``file``; it is durable there when this returns."""
        ...

    def fetch(self, digest: str, drafts: Path) -> Path:
        """Return a file in ``drafts`` that holds ``digest``."""
        ...


class States:
    """Keeps and finds checkpoints."""

    def __init__(self, store: Store, drafts: Path, remote: Remote | None = None) -> None:
        """``drafts``: a directory of this worker alone, on the store's disk; it is emptied."""
        self._store = store
        self._remote = remote
        self._drafts = drafts
        drafts.mkdir(mode=0o700, exist_ok=True)
        for left in drafts.iterdir():  # of an incarnation that was killed
            left.unlink()

    async def keep(self, box: Box) -> Checkpoint:
        """Return a checkpoint of ``box`` that any worker of the run can begin with.

        **Durability:** its content is on disk when this returns, and in the remote store.
        """
        saved = await box.checkpoint(self._drafts)
        if self._remote is not None:
            try:
                await asyncio.to_thread(self._remote.put, Path(saved.file), saved.digest)
            except StokerError:
                await asyncio.to_thread(Path(saved.file).unlink, missing_ok=True)
                raise
        await asyncio.to_thread(self._store.adopt, Path(saved.file), saved.digest)
        return msgspec.structs.replace(saved, file="")

    async def found(self, saved: Checkpoint) -> Checkpoint:
        """Return ``saved`` with the file it lies in, fetched where only the remote store has it."""
        file = self._store.path(saved.digest)
        if self._remote is not None and not await asyncio.to_thread(file.exists):
            fetched = await asyncio.to_thread(self._remote.fetch, saved.digest, self._drafts)
            await asyncio.to_thread(self._store.adopt, fetched, saved.digest)
        return msgspec.structs.replace(saved, file=str(file))
