"""Checkpoints of environments, on their way between a box and the run's artifact store."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.model.checkpoint import Checkpoint
from stoker.sandbox.base import Box
from stoker.sandbox.removal import remove_tree


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
            remove_tree(left)

    async def keep(self, box: Box) -> Checkpoint:
        """Return a checkpoint of ``box`` that any worker of the run can begin with.

        **Durability:** its content is on disk when this returns, and in the remote store.
        """
        with self._own() as drafts:
            saved = await box.checkpoint(drafts)
            if self._remote is not None:
                await asyncio.to_thread(self._remote.put, Path(saved.file), saved.digest)
            await asyncio.to_thread(self._store.adopt, Path(saved.file), saved.digest)
        return msgspec.structs.replace(saved, file="")

    async def found(self, saved: Checkpoint) -> Checkpoint:
        """Return ``saved`` with the file it lies in, fetched where only the remote store has it."""
        file = self._store.path(saved.digest)
        if self._remote is not None and not await asyncio.to_thread(file.exists):
            with self._own() as drafts:
                fetched = await asyncio.to_thread(self._remote.fetch, saved.digest, drafts)
                await asyncio.to_thread(self._store.adopt, fetched, saved.digest)
        return msgspec.structs.replace(saved, file=str(file))

    @contextlib.contextmanager
    def _own(self) -> Iterator[Path]:
        """Give a directory to one call: equal states have one name, and may come at once."""
        own = Path(tempfile.mkdtemp(dir=self._drafts))
        try:
            yield own
        finally:
            # A thread of a cancelled call may still write: the next incarnation removes it.
            with contextlib.suppress(OSError):
                remove_tree(own)
