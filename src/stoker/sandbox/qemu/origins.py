"""Which origins there are: made when they are first asked for, shared, and let go when unused.

An origin's memory stays while a box lives that was forked from it, whoever else lets go of it. So
those that boxes live of are kept: to drop one would free nothing. Of the others only a few are, the
least recently used go first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from stoker.errors import BoxFailed
from stoker.sandbox.qemu.origin import Origin

IDLE_MAX = 4
"""Each holds some 100 MiB, and the files that its boxes begin with."""


class Kind(NamedTuple):
    """What boxes have in common that are forked from one origin."""

    memory_bytes: int
    """Of the guest."""
    disk_bytes: int = 0
    files_max: int = 0
    """Limits of the file systems that are made already; 0: none is."""
    state: str = ""
    """Digest of what is in them."""


class Held:
    """An origin that is used; whoever took it gives it back once."""

    def __init__(self, making: "asyncio.Future[Origin]") -> None:
        self.making = making
        self.users = 0
        self.left = False
        """Its backend was closed: whoever uses it last closes it."""

    @property
    def origin(self) -> Origin:
        """What was made."""
        return self.making.result()

    @property
    def idle(self) -> bool:
        """Whether it was made and nobody uses it."""
        return not self.users and self.making.done() and not _failed(self.making)


class Origins:
    """Those of one backend."""

    def __init__(self) -> None:
        self._held: dict[Kind, Held] = {}
        """The least recently used first."""

    async def take(self, kind: Kind, make: Callable[[], Awaitable[Origin]]) -> Held:
        """Return the origin of ``kind``, to be given back; of all who ask at once one makes it.

        Raises:
            BoxFailed: it could not be made, or all were let go of meanwhile.
            ArtifactDamaged: what it was to be made with is damaged.

        **Cancellation:** the making goes on, and the next who asks finds it.
        """
        held = self._held.pop(kind, None)
        if held is None:
            held = Held(asyncio.ensure_future(make()))
            held.making.add_done_callback(partial(self._made, kind))
        self._held[kind] = held
        held.users += 1
        try:
            await asyncio.shield(held.making)
        except BaseException as error:
            self.give(held)
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and not task.cancelling():
                raise BoxFailed("boxes are being removed; none was made") from error
            raise
        return held

    def give(self, held: Held) -> None:
        """Use it no more."""
        held.users -= 1
        if held.left and not held.users:
            held.origin.close()
        for kind in [kind for kind, other in self._held.items() if other is held]:
            self._held[kind] = self._held.pop(kind)
        self._trim()

    def idle(self) -> list[Kind]:
        """Return those that nobody uses, the least recently used first."""
        return [kind for kind, held in self._held.items() if held.idle]

    def _made(self, kind: Kind, making: "asyncio.Future[Origin]") -> None:
        held = self._held.get(kind)
        if _failed(making) and held is not None and held.making is making:
            del self._held[kind]  # the next who asks tries again
        self._trim()

    def _trim(self) -> None:
        for kind in self.idle()[:-IDLE_MAX]:
            self._held.pop(kind).origin.close()

    async def close(self) -> None:
        """Let go of all of them: of one that is being forked as that is over."""
        held, self._held = list(self._held.values()), {}
        for one in held:
            one.making.cancel()
        await asyncio.gather(*(one.making for one in held), return_exceptions=True)
        for one in held:
            if _failed(one.making):
                continue
            one.left = True
            if not one.users:
                one.origin.close()


def _failed(making: "asyncio.Future[Origin]") -> bool:
    return making.cancelled() or making.exception() is not None
