"""The ``microvm`` backend: Smol Machines, each box a branch of a machine that was booted once.

The SDK makes, branches and deletes machines; what a box promises beyond that (limits, exact bytes,
an end of every process) comes from our runner in the machine (``guest``), as with ``qemu``. It is
offered only after a machine was booted, branched and asked here, within a deadline: the SDK's own
answer is yes on hosts where every machine hangs.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.errors import ArtifactDamaged, BoxFailed, IsolationUnavailable
from stoker.model.checkpoint import Checkpoint, StateKind
from stoker.model.completion import Usage
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits, Rung
from stoker.model.tools import RunRequest, Tests, Verdict
from stoker.sandbox import marks
from stoker.sandbox.base import BoxOffer, Strength, not_offered
from stoker.sandbox.guest.place import Limits as GuestLimits
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.judge import judge_in
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS
from stoker.sandbox.smol import cuda, tree
from stoker.sandbox.smol.box import SmolBox, digest_of
from stoker.sandbox.smol.engine import EngineError
from stoker.sandbox.smol.machines import BOX_LABEL, INCARNATION_LABEL, Machines, machine_name
from stoker.sandbox.smol.target import place_of
from stoker.sandbox.undoing import to_its_end
from stoker.sandbox.vm import guests
from stoker.sandbox.vm.link import GuestLink, GuestLost
from stoker.seams.entropy import fresh_id

_GUEST_MEBIBYTES = 256
"""What the kernel, its agent, the runner and the page cache take beside the box."""
_SIZE_STEP_MEBIBYTES = 256
_CANARY_SECONDS = 60.0
_FRAMEWORK_SECONDS = 300.0
_CANARY = (
    "import os; print(os.uname().nodename, os.getuid(), "
    "set(os.listdir('/sys/class/net')) - {'lo', 'dummy0'} or 'alone')"
)
"""The second device is one the machine's kernel makes by itself; it leads nowhere."""
_MISSING = "the SDK of Smol Machines is not installed"
_REMEDY = 'pip install "stoker[microvm]"'


class SmolBackend:
    """Boxes that are machines of Smol Machines, on this host."""

    def __init__(self, host: SandboxHost) -> None:
        self.host = host
        self.boxes: dict[str, SmolBox] = {}
        self.rung = Rung.SMOL
        self.machines = Machines(_home(host), host.cloud)
        self._prefix = (
            "stoker-" if host.cloud is None else f"stoker-{place_of(host.state_directory)}-"
        )
        """Of the names of our machines: on this host no others are in their place."""
        self._origins: dict[_Kind, asyncio.Task[str]] = {}
        self._found: set[str] = set()
        """Origins with a device that their framework has found."""
        self._spent: list[str] = []
        """Origins that no box is branched off any more, to be deleted at the end."""
        self._records: dict[str, BoxRecord] = {}
        """By machine, until it is gone: one that is kept for its branches outlives its box."""
        self._offer: BoxOffer | None = None
        self._trying = asyncio.Lock()

    accelerated = True
    """Whether guests run by KVM: the SDK has no other way."""

    async def offer(self) -> BoxOffer:
        """Boot, branch and ask a machine once; later calls return what came of it."""
        async with self._trying:
            if self._offer is None:
                missing, remedy = await self._tried()
                self._offer = BoxOffer(
                    isolation=Isolation.MICROVM,
                    rung=self.rung,
                    available=not missing,
                    shared_kernel=False,
                    strengths=() if missing else _strengths(),
                    missing=missing,
                    remedy=remedy,
                )
        return self._offer

    async def _tried(self) -> tuple[str, str]:
        if not installed():
            return _MISSING, _REMEDY
        cloud = self.host.cloud
        if cloud is not None and (problem := cloud.problem()):
            return problem, "set sandbox.smol.key_file to a file this worker may read"
        try:
            code, reason = await self.machines.probe()
        except (EngineError, OSError) as error:
            if cloud is not None:
                return f"{cloud.url} does not serve: {error}", "see sandbox.smol.url and key_file"
            return f"the SDK of Smol Machines does not answer: {error}", "please report this host"
        if code:
            return f"{reason} ({code})", "use a host with /dev/kvm"
        missing = await self._canary()
        remedy = 'use isolation = "qemu", or a host whose KVM runs guests'
        return missing, remedy if missing else ""

    async def _canary(self) -> str:
        limits = Limits(memory_bytes=128 * MEBIBYTE, disk_bytes=16 * MEBIBYTE)
        policy = ExecutionPolicy(isolation=Isolation.MICROVM, limits=limits)
        return await guests.canary(self, policy, _CANARY, "1000 alone", seconds=_CANARY_SECONDS)

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse what these machines do not have."""
        out = ("a way out to the network", policy.network)
        guests.refuse_beyond(Isolation.MICROVM, ("mounts", policy.mounts), out)
        if policy.cuda is not msgspec.UNSET:
            here = self.host.cloud is None
            if missing := cuda.driver_missing() if here else "machines of a cloud have no device":
                raise IsolationUnavailable(
                    f"microvm boxes with cuda = {policy.cuda!r} cannot be had: {missing}; "
                    f"{cuda.REMEDY}"
                )

    def check_kept(self, what: str, policy: ExecutionPolicy) -> None:
        """Refuse what machines of a cloud were never seen to do, and those with a device cannot.

        Raises:
            BranchUnavailable: it is such a machine.
        """
        if self.host.cloud is not None:
            raise not_offered(what, "microvm (of a cloud)")
        if policy.cuda is not msgspec.UNSET:
            raise not_offered(what, "microvm (with cuda)")

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> SmolBox:
        """Branch a machine off the one of its size; see ``base.Backend``."""
        self.check(policy)
        pinned = guests.pinned(self.host, Isolation.MICROVM, baseline)
        kind = _kind(policy)
        origin = await self.origin_of(kind)
        made = partial(self._off_origin, origin, self.name_of(box_id), leaf=bool(kind.cuda))
        if kind.cuda and origin not in self._found:
            await self._finds(kind.cuda, pinned, policy, origin)
        return await self._made(box_id, pinned, policy, made)

    async def _finds(
        self, name: str, pinned: Baseline, policy: ExecutionPolicy, origin: str
    ) -> None:
        """Have the framework look for the device, in a box off ``origin``."""
        box_id = fresh_id("canary_")
        made = partial(self._off_origin, origin, self.name_of(box_id), leaf=True)
        box = await self._made(box_id, pinned, policy, made)
        try:
            request = RunRequest(argv=("python", "-c", cuda.trial(name)))
            ran = await box.run(request, timeout_seconds=_FRAMEWORK_SECONDS)
        finally:
            await box.destroy()
        if ran.result.text.strip() != "found":
            raise IsolationUnavailable(
                f"microvm boxes with cuda = {name!r} cannot be had: {name} finds no device in one: "
                f"{ran.result.text.strip()[-300:] or 'it ended without a word'}; {cuda.REMEDY}"
            )
        self._found.add(origin)

    async def _off_origin(self, origin: str, name: str, *, leaf: bool = False) -> None:
        try:
            await self.machines.branch(self.name_of(origin), name, frozen=True, leaf=leaf)
        except EngineError:
            # It may be the origin that is no more: the next box has a new one.
            for kind, task in list(self._origins.items()):
                if _done(task) == origin:
                    del self._origins[kind]
                    self._spent.append(origin)
            raise

    async def branched(self, box: SmolBox, box_id: str) -> SmolBox:
        """Branch a machine off that of ``box``."""
        made = partial(self.machines.branch, self.name_of(box.box_id), self.name_of(box_id))
        return await self._made(box_id, box.baseline, box.policy, made)

    async def restore(
        self, box_id: str, baseline: Baseline, policy: ExecutionPolicy, checkpoint: Checkpoint
    ) -> SmolBox:
        """Make a machine from a checkpoint of one; see ``base.Backend``."""
        self.check(policy)
        self.check_kept("restoring", policy)
        if checkpoint.kind is not StateKind.MEMORY:
            raise not_offered(f"restoring checkpoints of {checkpoint.kind}", "microvm")
        pinned = guests.pinned(self.host, Isolation.MICROVM, baseline)
        file = Path(checkpoint.file)
        try:
            digest, _ = await asyncio.to_thread(digest_of, file)
        except OSError as error:
            digest = f"unreadable ({error.strerror})"
        if digest != checkpoint.digest:
            raise ArtifactDamaged(
                f"the checkpoint {checkpoint.digest} in {checkpoint.file!r} is {digest}; "
                "nothing was made",
                digest=checkpoint.digest,
            )
        made = partial(self.machines.restore, self.name_of(box_id), file)
        box = await self._made(box_id, pinned, policy, made)
        return box.began(checkpoint.digest, checkpoint.generation + 1)

    async def _made(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        make: Callable[[], Awaitable[None]],
    ) -> SmolBox:
        record = self.host.record(box_id, self.rung)
        self.host.alive.add(box_id)
        name = self.name_of(box_id)
        self._records[name] = record
        try:
            self.host.ledger.write(record)
            await make()
            link = await self.machines.adopted(
                name, guests.host_name(box_id), _guest(policy.limits)
            )
        except BaseException as error:
            await self._undone(box_id, None)
            if isinstance(error, OSError | GuestLost | EngineError):
                raise BoxFailed(
                    f"box {box_id} could not be made ({error}); nothing of it is left"
                ) from error
            raise
        removal = partial(self._undone, box_id, link)
        box = self.boxes[box_id] = SmolBox(self, box_id, baseline, policy, link, removal)
        return box

    async def origin_of(self, kind: "_Kind") -> str:
        """Return what boxes of this kind are branched off, booted where it is not yet."""
        if self.machines.lost:  # what was booted ended with its engine; what is booting notices
            self._origins = {k: t for k, t in self._origins.items() if not t.done()}
        task = self._origins.get(kind)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._origins[kind] = asyncio.ensure_future(self._booted(kind))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        try:
            return await asyncio.shield(task)
        except (EngineError, OSError) as error:
            raise BoxFailed(f"a machine could not be booted ({error}); nothing was made") from error

    async def _booted(self, kind: "_Kind") -> str:
        archive = await asyncio.to_thread(
            tree.prepare, self.host.runtime.python.parent, self.host.runtime
        )
        origin = fresh_id("origin_")
        labels = {BOX_LABEL: origin, INCARNATION_LABEL: self.host.ledger.incarnation}
        self.host.ledger.write(self.host.record(origin, self.rung))
        try:
            await self.machines.boot(
                self.name_of(origin), labels, kind.megabytes, archive, cuda=bool(kind.cuda)
            )
        except BaseException:
            with contextlib.suppress(BoxFailed):  # the record stays, and the next sweep tries again
                await self._deleted(origin)
                self.host.ledger.strike(origin)
            raise
        return origin

    def name_of(self, box_id: str) -> str:
        """Return the name of a box's machine."""
        return machine_name(box_id, self._prefix)

    async def _undone(self, box_id: str, link: GuestLink | None) -> None:
        async def remove() -> None:
            if link is not None:
                link.close()
            gone = await self._deleted(box_id)
            # One that is kept stays written down: else another worker's sweep would delete it.
            for record in [self._records.pop(one) for one in gone if one in self._records]:
                await self.host.remove(record)
            self.boxes.pop(box_id, None)

        await to_its_end(remove())

    async def _deleted(self, box_id: str) -> list[str]:
        name = self.name_of(box_id)
        try:
            return await self.machines.delete(name)
        except EngineError as error:
            if self.host.cloud is None:
                return [name]  # the engine was ended, and every machine with it
            raise BoxFailed(
                f"the machine {name} of {box_id} could not be deleted at {self.host.cloud.url} "
                f"({error}); the next sweep of this state directory tries it again"
            ) from error

    async def judge(
        self,
        box_id: str,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Grade ``files``: judge and solution in two machines of their own (``judge``)."""
        return await judge_in(
            self, box_id, files, tests, policy=policy, timeout_seconds=timeout_seconds
        )

    def inside_paths(self) -> tuple[str, str]:
        """Return the fixed paths every machine has."""
        return f"{INSIDE}/bin/python", INSIDE_SCRIPTS

    async def sweep(self) -> int:
        """Delete what dead incarnations left: rows of machines that ended with their engines."""
        try:
            if installed() and (self.host.cloud is not None or _home(self.host).exists()):
                await self._reconcile()
        finally:  # rows are known by the records of the living: these may go before them
            swept = await self.host.sweep()
        return swept

    async def _reconcile(self) -> None:
        try:
            # Before the records: a machine that another worker makes meanwhile is written down.
            rows = await self.machines.rows()
            living = self._living()
            ours = (name for name in rows if name.startswith(self._prefix))
            await self.machines.purge(name for name in ours if name not in living)
        except (EngineError, OSError) as error:
            raise BoxFailed(f"machines of dead workers could not be deleted: {error}") from error

    def _living(self) -> set[str]:
        """Return the names of machines whose worker lives."""
        abandoned = {r.box_id for r in self.host.ledger.abandoned()}
        records = self.host.ledger.records()
        return {self.name_of(r.box_id) for r in records if r.box_id not in abandoned}

    async def close(self) -> None:
        """Destroy every box, and what they were branched off.

        Raises:
            BoxFailed: some could not be removed; the others were.
        """
        ends: list[object] = await asyncio.gather(
            *(box.destroy() for box in list(self.boxes.values())), return_exceptions=True
        )
        tasks, self._origins = list(self._origins.values()), {}
        for task in tasks:
            task.cancel()
        for origin in [*self._spent, *await asyncio.gather(*tasks, return_exceptions=True)]:
            if isinstance(origin, str):
                try:
                    await self._deleted(origin)
                    self.host.ledger.strike(origin)
                except BoxFailed as error:
                    ends.append(error)
        await self.machines.close()
        while self._records:  # of machines that were kept when their engine ended
            await self.host.remove(self._records.popitem()[1])
        for end in ends:
            if isinstance(end, BaseException):
                raise end


class _Kind(NamedTuple):
    """What boxes have in common that are branched off one machine."""

    megabytes: int
    cuda: str = ""


def _kind(policy: ExecutionPolicy) -> _Kind:
    limits = policy.limits
    needed = (limits.memory_bytes + limits.disk_bytes) // MEBIBYTE + _GUEST_MEBIBYTES
    size = -(-needed // _SIZE_STEP_MEBIBYTES) * _SIZE_STEP_MEBIBYTES
    return _Kind(size, policy.cuda or "")


def _done(task: "asyncio.Task[str]") -> str | None:
    """Return the origin it booted, where it has."""
    booted = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if booted else None


def installed() -> bool:
    """Whether the SDK can be imported by the engine."""
    return importlib.util.find_spec("smol") is not None


def _home(host: SandboxHost) -> Path:
    if host.root and host.cloud is None:
        return marks.MACHINES / host.mark
    if host.cloud is not None:
        return host.state_directory / "smol"
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home: paths of sockets may be too long there
        return host.state_directory / "smol"
    return home / ".cache" / "stoker" / "smol" / host.mark


def _guest(limits: Limits) -> GuestLimits:
    return GuestLimits(
        memory_bytes=limits.memory_bytes,
        processes_max=limits.processes_max,
        disk_bytes=limits.disk_bytes,
        files_max=limits.files_max,
    )


def _strengths() -> tuple[Strength, ...]:
    how = {
        "memory": "the machine's control group, and the size of its memory",
        "cpu": "the machine's control group",
        "processes": "the machine's control group",
        "disk": "sized tmpfs of the machine",
        "wall": "the runner, and the end of the machine past it",
        "output": "the runner, and the host's own count",
        "network": "the machine has no device for it",
        "kernel settings": "the machine's kernel, and not root in it",
        "host environment": "nothing of the host is in the machine",
        "nothing survives": "the machine's control group, and its end",
    }
    return tuple(Strength(limit=limit, level="enforced", how=way) for limit, way in how.items())
