"""One machine as a box, with what only machines have: branches and checkpoints of their memory."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import BoxFailed
from stoker.model.checkpoint import Checkpoint, StateKind
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.value import content_digest
from stoker.sandbox.base import Branch
from stoker.sandbox.branching import whole
from stoker.sandbox.smol.engine import EngineError
from stoker.sandbox.undoing import seen_out
from stoker.sandbox.vm.box import GuestBox
from stoker.sandbox.vm.link import GuestLink, GuestLost
from stoker.seams.entropy import fresh_id

if TYPE_CHECKING:
    from stoker.sandbox.smol.backend import SmolBackend

_READ_BYTES = 1 << 20


class SmolBox(GuestBox):
    """See ``base.Box``. Its state is the machine's memory and disk between two actions."""

    def __init__(
        self,
        backend: "SmolBackend",
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        link: GuestLink,
        remove: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(box_id, baseline, policy, link, remove)
        self._backend = backend
        self.began_from = baseline.digest
        """Digest of the state it began in."""
        self.generation = 0

    def began(self, digest: str, generation: int, *, interrupted: bool = False) -> "SmolBox":
        """Say which state it began in, where that is not its baseline's."""
        self.began_from, self.generation = digest, generation
        self._interrupted = interrupted
        return self

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Make ``count`` machines that go on from this one's memory and disk."""
        self._check()
        self._backend.check_kept("branches", self.policy)
        # Two states of memory are never equal, so there is no content to name: the name is made up.
        digest = content_digest(fresh_id("state_").encode())
        made: list[Branch] = []
        try:
            async with self.link.quiet():
                for _ in range(count):
                    child = await self._backend.branched(self, fresh_id("box_"))
                    child.began(digest, self.generation + 1, interrupted=self._interrupted)
                    made.append(Branch(child, digest, self.began_from, child.generation))
        except BaseException as error:
            ends = (branch.box.destroy() for branch in made)
            await seen_out(asyncio.gather(*ends, return_exceptions=True))
            if isinstance(error, GuestLost):
                raise self._lost(error) from error
            raise
        return tuple(made)

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Write memory and disk as one file named by its content; the machine pauses for it."""
        self._check()
        self._backend.check_kept("checkpoints", self.policy)
        fresh = directory / f".{fresh_id('new_')}.smolcheckpoint"
        try:
            async with self.link.quiet():
                name = self._backend.name_of(self.box_id)
                await wholly(self._backend.machines.checkpoint(name, fresh))
            digest, size = await whole(lambda: digest_of(fresh), lambda _: None)
            await asyncio.to_thread(fresh.replace, directory / digest)
        except GuestLost as lost:
            raise self._lost(lost) from lost
        except (EngineError, OSError) as error:
            raise BoxFailed(
                f"a checkpoint of box {self.box_id} could not be written to {directory} ({error}); "
                "nothing of it was kept"
            ) from error
        finally:
            fresh.unlink(missing_ok=True)
        return Checkpoint(
            digest=digest,
            parent=self.began_from,
            generation=self.generation,
            kind=StateKind.MEMORY,
            size_bytes=size,
            file=str(directory / digest),
        )

    def _lost(self, lost: GuestLost) -> BoxFailed:
        return BoxFailed(f"box {self.box_id} is lost: {lost}; nothing was made")


async def wholly(writing: Coroutine[Any, Any, None]) -> None:
    """Await ``writing``; when we are cancelled see its end first: else a file would come after."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await seen_out(task)
        task.cancelled() or task.exception()  # looked at: nobody waits for it any more
        raise


def digest_of(file: Path) -> tuple[str, int]:
    """Return the content address of a file, and its length; blocking."""
    digest = blake2b(digest_size=32)
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            digest.update(data)
        return digest.hexdigest(), os.fstat(opened.fileno()).st_size
