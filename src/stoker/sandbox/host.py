"""What backends share on one host: maker, uid leases, runtime files, cgroups and box ledger.

Usable on its own, without coordinator or ledger of actions:

    async with SandboxHost.open(state_directory) as host:
        backend = await choose_backend(policy, host)
        box = await backend.create("box_1", Baseline(), policy)
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from stoker.errors import BoxFailed
from stoker.model.execution import Baseline
from stoker.sandbox import cgroups, kernel, runtime
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.egress.gate import Egress, EgressDecision
from stoker.sandbox.ledger import BoxLedger, BoxRecord
from stoker.sandbox.maker_client import MakerClient
from stoker.sandbox.marks import MACHINES, HeldMark, forget_dead, mark_of
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.smol.target import CloudTarget
from stoker.sandbox.uids import UidLeases, pids_of_uid

UID_BASE = 1_900_000_000
UID_COUNT = 65_536
ROOT_WORK = Path("/run/stoker/boxes")
_GROUP_PREFIX = "stoker"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_NAME_MAX = 80
_SWEEP_PAUSE_SECONDS = 0.02


class SandboxHost:
    """One worker's hold on this host; made by ``open``."""

    def __init__(
        self,
        state_directory: Path,
        uid_base: int,
        uid_count: int,
        runtime_files: runtime.RuntimeFiles,
        egress_told: Callable[[EgressDecision], None] | None = None,
    ) -> None:
        self.state_directory = state_directory
        self.root = os.geteuid() == 0
        self.runtime = runtime_files
        self.ledger = BoxLedger(state_directory)
        self.tree, self.tree_note, self.tree_remedy = cgroups.find_tree()
        self.uids = UidLeases(uid_base, uid_count) if self.root else None
        self.mark = mark_of(state_directory)
        self._held = HeldMark(state_directory) if self.root else None
        self.baselines = Baselines(runtime_files.baselines, runtime_files.roots)
        self.alive: set[str] = set()
        """Ids of boxes that exist."""
        self.egress = Egress(self, egress_told or (lambda _decision: None))
        self.cloud: CloudTarget | None = None
        self._makers: list[MakerClient] = []
        """The last one may live; those before it died and are reaped at the end."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        state_directory: Path,
        *,
        uid_base: int = UID_BASE,
        uid_count: int = UID_COUNT,
        runtime_directory: Path | None = None,
        egress_told: Callable[[EgressDecision], None] | None = None,
        baselines_max: int | None = None,
        cloud: CloudTarget | None = None,
    ) -> AsyncIterator["SandboxHost"]:
        """Take hold of the host; on leaving, the maker and all it runs are ended.

        Boxes that nobody destroyed are then removed. What cannot be removed, and what a killed
        process leaves, stays in the ledger and is swept by the next incarnation.
        ``egress_told`` hears of every request that a box made of the egress proxy.
        ``baselines_max``: bytes that baselines kept on this machine may take. ``cloud``: where
        Smol Machines are made, if not here.
        """
        files = await asyncio.to_thread(runtime.prepare, runtime_directory)
        host = cls(state_directory, uid_base, uid_count, files, egress_told)
        host.cloud = cloud
        if baselines_max is not None:
            host.baselines.allow(baselines_max)
        try:
            yield host
        finally:
            await host.close()

    def maker(self) -> MakerClient:
        """Return the living maker, starting one where there is none."""
        if not self._makers or self._makers[-1].dead:
            self._makers.append(MakerClient.start())
        return self._makers[-1]

    async def close(self) -> None:
        """End the maker, remove forgotten boxes, give uids back, let the incarnation end."""
        await self.egress.close()
        await self.baselines.close()
        for maker in self._makers:
            await maker.close()
        forgotten = [r for r in self.ledger.records() if r.incarnation == self.ledger.incarnation]
        # A failure here would hide the one that made somebody forget; the record stays.
        await asyncio.gather(*(self.remove(r) for r in forgotten), return_exceptions=True)
        if self.uids is not None:
            self.uids.close()
        if self._held is not None:
            self._held.close(everything_gone=not self.ledger.records())
        self.ledger.close()

    def group_name(self, box_id: str) -> str:
        """Return the name of a box's control group."""
        return f"{_GROUP_PREFIX}.{self.mark}.{box_id}"

    def group_of(self, box_id: str) -> str:
        """Return what a box's record says of its control group; empty where there are none."""
        return "" if self.tree is None else self.tree.kept(self.group_name(box_id))

    def work_directory(self, box_id: str, *, traversable: bool) -> Path:
        """Return where a box keeps its files: where a leased uid can come, or with the state."""
        if traversable:
            return ROOT_WORK / f"{self.mark}.{box_id}"
        return self.state_directory / "work" / box_id

    def baseline_digest(
        self, baseline: Baseline, *, build: str = "", root: str = "", packages: str = ""
    ) -> str:
        """Return the digest of ``baseline`` as it is on this host, and of what it is made of."""
        return runtime.baseline_digest(
            baseline, self.runtime, build=build, root=root, packages=packages
        )

    def record(self, box_id: str, kind: str) -> BoxRecord:
        """Return the beginning of a record.

        Raises:
            BoxFailed: the id cannot name a box, or one of this id exists.
        """
        if not box_id or len(box_id) > _NAME_MAX or not _NAME_CHARACTERS.issuperset(box_id):
            raise BoxFailed(f"{box_id!r} cannot name a box: letters, digits, '_', '.', '-' only")
        if box_id.startswith(".") or box_id in self.alive:
            raise BoxFailed(f"a box {box_id!r} exists already or its name begins with a dot")
        return BoxRecord(
            box_id=box_id,
            incarnation=self.ledger.incarnation,
            boot_id=self.ledger.boot_id,
            kind=kind,
        )

    async def remove(self, record: BoxRecord) -> None:
        """Remove everything a record names; safe to repeat, and after any half-made box.

        Raises:
            BoxFailed: something could not be removed; the record stays for the next sweep.
        """
        directories = cgroups.directories_of(self.tree, record.group)
        if directories:
            await cgroups.kill_all(directories)
        leased = [uid for uid in (record.uid, record.server_uid) if uid is not None]
        for uid in leased:
            if self.uids is not None and self.uids.try_hold(uid):
                await _kill_uid(uid)
        await asyncio.to_thread(_remove_files, record)
        if directories:
            await cgroups.remove(directories)
        for uid in leased:
            if self.uids is not None:
                self.uids.release(uid)
        self.ledger.strike(record.box_id)
        self.baselines.release(record.box_id)
        self.alive.discard(record.box_id)

    async def sweep(self) -> int:
        """Remove what dead incarnations of this state directory left; return how many boxes.

        One process sweeps at a time; another that asks meanwhile waits and finds it done.

        Raises:
            BoxFailed: some could not be removed; the others were.
        """
        while (lock := self.ledger.sweeping()) is None:
            await asyncio.sleep(_SWEEP_PAUSE_SECONDS)
        try:
            return await self._sweep()
        finally:
            os.close(lock)

    async def _sweep(self) -> int:
        abandoned = await asyncio.to_thread(self.ledger.abandoned)
        ends = await asyncio.gather(
            *(self.remove(record) for record in abandoned), return_exceptions=True
        )
        failed = [end for end in ends if isinstance(end, BaseException)]
        for orphan in self.ledger.orphans(self.state_directory / "work"):
            await asyncio.to_thread(remove_tree, orphan)
        await asyncio.to_thread(self.ledger.forget_dead)
        if self.root and self.tree is not None:  # else what bears a mark may be out of our sight
            await asyncio.to_thread(forget_dead, self._bears)
        if failed:
            raise BoxFailed(f"{len(failed)} abandoned boxes could not be removed: {failed[0]}")
        return len(abandoned)

    def _bears(self, mark: str) -> bool:
        """Whether files, machines or control groups of boxes bear this mark, alive or not."""
        assert self.tree is not None
        folders = ROOT_WORK.glob(f"{mark}.*")
        return (
            any(folders)
            or (MACHINES / mark).exists()
            or bool(self.tree.find(f"{_GROUP_PREFIX}.{mark}."))
        )

    def leaked(self) -> int:
        """Return how many things of this state directory belong to no living box: 0 is right."""
        known = {r.box_id for r in self.ledger.records()} - {
            r.box_id for r in self.ledger.abandoned()
        }
        prefix = f"{_GROUP_PREFIX}.{self.mark}."
        found = {r.box_id for r in self.ledger.abandoned()}
        if self.tree is not None:
            found |= {name.removeprefix(prefix) for name in self.tree.find(prefix)}
        for folder, start in ((ROOT_WORK, f"{self.mark}."), (self.state_directory / "work", "")):
            if folder.is_dir():
                found |= {
                    e.name.removeprefix(start) for e in folder.iterdir() if e.name.startswith(start)
                }
        return len(found - known)


def _remove_files(record: BoxRecord) -> None:
    for mount in reversed(record.mounts):
        if os.path.ismount(mount):
            kernel.unmount(mount)
    if record.directory:
        remove_tree(Path(record.directory))


async def _kill_uid(uid: int) -> None:
    """Kill whatever a leased uid still runs, in no group of ours."""
    for _ in range(500):
        alive = [pid for pid in pids_of_uid(uid) if not cgroups.is_zombie(pid)]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.005)
    raise BoxFailed(f"processes of uid {uid} cannot be killed")
