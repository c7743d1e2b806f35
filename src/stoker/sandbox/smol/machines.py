"""The machines of one worker: made, branched, attached to and deleted, in the order they depend.

A branch shares the memory of what it was branched off, so that one outlives it: a machine whose box
is destroyed before its branches is deleted with the last of them. Machines are named after their
boxes; the engine knows them by these names only.
"""

import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stoker.sandbox.guest.place import Limits as GuestLimits
from stoker.sandbox.smol.engine import Engine, EngineError
from stoker.sandbox.smol.target import CloudTarget
from stoker.sandbox.smol.tree import ARCHIVE, START
from stoker.sandbox.vm.link import GuestLink
from stoker.seams.clock import SystemClock
from stoker.seams.entropy import fresh_id

BOX_LABEL, INCARNATION_LABEL = "stoker-box", "stoker-incarnation"
_BOOT_SECONDS = 300.0
_BRANCH_SECONDS = 180.0
_ATTACH_SECONDS = 60.0
_DELETE_SECONDS = 60.0
"""Deadlines that only a hang reaches; an emulated host takes 25 to 95 s to boot a machine."""
_ENTROPY_BYTES = 64
_clock = SystemClock()


class Machines:
    """What this worker's engine runs."""

    def __init__(self, home: Path, cloud: CloudTarget | None = None) -> None:
        self._home = home
        self._cloud = cloud
        self._engine: Engine | None = None
        self._ended: list[Engine] = []
        self._off: dict[str, str] = {}
        """Living machine → what it was branched off."""
        self._kept: set[str] = set()
        """Machines without a box that have branches."""

    @property
    def lost(self) -> bool:
        """Whether an engine, and all its machines, ended by itself; a cloud's outlive it."""
        return self._cloud is None and self._engine is not None and self._engine.dead

    @property
    def engine(self) -> Engine:
        """The living engine, started where there is none."""
        if self._engine is None or self._engine.dead:
            if self._cloud is None:
                # Machines ended with the engine before; their rows are deleted by ``sweep``.
                self._off.clear()
                self._kept.clear()
            if self._engine is not None:
                self._ended.append(self._engine)
            self._engine = Engine.start(self._home, self._cloud)
        return self._engine

    async def boot(
        self,
        name: str,
        labels: Mapping[str, str],
        memory_mb: int,
        archive: Path,
        *,
        cuda: bool = False,
    ) -> None:
        """Make a machine whose runner waits to be adopted; ``cuda``: with the host's device."""
        await self.engine.call(
            "create",
            seconds=2 * _BOOT_SECONDS,
            ready_seconds=_BOOT_SECONDS,
            name=name,
            labels=dict(labels),
            memory_mb=memory_mb,
            begin={"archive": str(archive), "place": ARCHIVE, "script": START},
            image=self._cloud.image if self._cloud is not None else None,
            cuda=cuda,
        )

    async def branch(
        self, source: str, name: str, *, frozen: bool = False, leaf: bool = False
    ) -> None:
        """Make a machine that goes on from where ``source`` is; ``frozen``: that one stays there.

        ``leaf``: it can have no branches, as the SDK wants it of machines with a device.
        """
        engine = self.engine
        self._off[name] = source  # until it is deleted: a call that failed may have made it
        await engine.call(
            "branch", seconds=_BRANCH_SECONDS, source=source, name=name, frozen=frozen, leaf=leaf
        )

    async def checkpoint(self, name: str, file: Path) -> None:
        """Write memory and disks of a machine to ``file``."""
        await self.engine.call("checkpoint", seconds=_BOOT_SECONDS, name=name, path=str(file))

    async def restore(self, name: str, file: Path) -> None:
        """Make a machine from a file of ``checkpoint``."""
        await self.engine.call("restore", seconds=_BOOT_SECONDS, name=name, path=str(file))

    async def adopted(self, name: str, host_name: str, limits: GuestLimits) -> GuestLink:
        """Return the link to the runner of ``name``, which is a box of its own now."""
        # Its own name: a machine that was branched or restored has the pipes of the one before.
        end = await self.engine.attach(name, fresh_id("answers_"), seconds=_ATTACH_SECONDS)
        link = GuestLink(end)
        try:
            await link.adopt(
                host_name,
                int(_clock.now().wall * 1e9),
                limits._asdict(),
                entropy=os.urandom(_ENTROPY_BYTES),
                seconds=_ATTACH_SECONDS,
            )
        except BaseException:
            link.close()
            raise
        return link

    async def delete(self, name: str) -> list[str]:
        """Delete a machine, or keep it until the last of its branches is gone; say what went.

        Raises:
            EngineError: one does not go. On this host the engine is ended, and so is every machine.
        """
        if name in self._off.values():
            self._kept.add(name)
            return []
        await self._deleted(name)
        source = self._off.pop(name, None)
        if source in self._kept and source not in self._off.values():
            self._kept.discard(source)
            return [name, *await self.delete(source)]
        return [name]

    async def purge(self, names: Iterable[str]) -> None:
        """Delete machines of dead workers, of which nobody knows which was branched off which.

        Raises:
            EngineError: none of those that are left can be deleted.
        """
        left = list(names)
        while left:
            refused: list[str] = []
            for name in left:
                try:
                    await self.engine.call("delete", seconds=_DELETE_SECONDS, name=name)
                except EngineError:
                    refused.append(name)
                    if len(refused) == len(left):
                        raise
            left = refused

    async def _deleted(self, name: str) -> None:
        if self._cloud is not None:  # it outlives whatever engine made it
            await self.engine.call("delete", seconds=_DELETE_SECONDS, name=name)
            return
        engine = self._engine
        if engine is None or engine.dead:
            return  # it ended with its engine; its row goes with the next sweep
        try:
            await engine.call("delete", seconds=_DELETE_SECONDS, name=name)
        except EngineError:
            engine.kill()
            raise

    async def rows(self) -> Mapping[str, int | None]:
        """Return all machines in this place, of whatever worker, and which process each was."""
        found: dict[str, int | None] = await self.engine.call("list", seconds=_ATTACH_SECONDS)
        return found

    async def probe(self) -> tuple[str, str]:
        """Ask the SDK whether machines could run: what is missing, or nothing."""
        said: Any = await self.engine.call("probe", seconds=_ATTACH_SECONDS)
        return (str(said[0]), str(said[1])) if said else ("", "")

    async def close(self) -> None:
        """End the engine and whatever still runs in it."""
        for engine in (*self._ended, self._engine):
            if engine is not None:
                await engine.close()


def machine_name(box_id: str, prefix: str = "stoker-") -> str:
    """Return the name of a box's machine: short, and of letters the SDK takes."""
    return prefix + blake2b(box_id.encode(), digest_size=8).hexdigest()
