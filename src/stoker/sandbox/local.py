"""What all backends on the host's kernel share: making a box, running in it, taking it down.

A backend says which parts a box gets (``Parts``) and how an action is started (``prepare``); the
order of making, supervising and removing is the same for all and lives here.
"""

import asyncio
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from stoker.errors import BoxFailed, ToolRefused
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Limits, Rung
from stoker.model.tools import (
    ExportResult,
    ReadResult,
    RunRequest,
    Stream,
    Tests,
    Verdict,
)
from stoker.sandbox import branching, kernel
from stoker.sandbox.base import BoxOffer, BoxRun, Branch
from stoker.sandbox.branching import Beginning, begin_in
from stoker.sandbox.cgroups import Group
from stoker.sandbox.egress.gate import Gate, with_network
from stoker.sandbox.entries import FOLDERS
from stoker.sandbox.files import WorkspaceFiles
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.judge import judge_in
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.runtime import make_public
from stoker.sandbox.starts import Prepared, Unstarted, as_reported, unstarted
from stoker.sandbox.states import Packed
from stoker.sandbox.supervise import Ended, Starter, Watcher, Work, supervise
from stoker.sandbox.undoing import seen_out, to_its_end
from stoker.sandbox.warm import WarmServer
from stoker.sandbox.watchers import at_most, cpu_of, disk_watcher, mounts_full, tree_watcher

_DESCRIPTORS_MAX = 4096
_NOT_STARTED = 127
_AGAIN_SECONDS = 0.05
"""Pause before an action that never began is started once more."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts a box of this rung is made of."""

    rung: Rung
    leased_uid: bool
    sized_mounts: bool
    group: bool
    launcher_uid: bool = False
    """A second uid, under which its launcher runs."""


class LocalBox:
    """A box on this host's kernel; see ``base.Box`` for what it promises."""

    lost = False  # its processes are begun anew for each action

    def __init__(
        self,
        backend: "LocalBackend",
        record: BoxRecord,
        baseline: Baseline,
        policy: ExecutionPolicy,
    ) -> None:
        self.box_id = record.box_id
        self.baseline = baseline
        self.policy = policy
        self.record = record
        self.directory = Path(record.directory)
        self.began_from = baseline.digest
        """Digest of the state it began from."""
        self.generation = 0
        """Branches and restorations between it and a box made from its baseline."""
        self.interrupted = False
        """A program was cut short here, or where it was branched off."""
        self.group: Group | None = None
        self.server: WarmServer | None = None
        """Its warm server, once there is one."""
        self.backend = backend
        self._files: WorkspaceFiles | None = None
        self._action: asyncio.Future[Ended] | None = None
        self._removal: asyncio.Future[None] | None = None

    def build(self, begins: Beginning | None) -> None:
        """Write it down, then make its parts; blocking, for a millisecond and a state's copy."""
        record, limits = self.record, self.policy.limits
        self.backend.host.ledger.write(record)
        if record.group and self.backend.host.tree is not None:
            self.group = self.backend.host.tree.create(record.group, limits)
        directory = record.directory
        make_public(self.directory.parent)
        os.mkdir(directory)  # noqa: PTH102 - as text: done for every box, as what follows
        os.chmod(directory, 0o700 if record.uid is None else 0o711)  # noqa: PTH101 - as above
        for folder in FOLDERS:
            os.mkdir(f"{directory}/{folder}", mode=0o700)  # noqa: PTH102 - as above
        for mount in record.mounts:
            kernel.mount_tmpfs(
                mount,
                f"size={limits.disk_bytes},nr_inodes={limits.files_max},"
                f"uid={record.uid},gid={record.uid},mode=0700",
            )
        if begins is not None:
            begin_in(self, begins)
        self._files = WorkspaceFiles(f"{directory}/workspace", record.uid)

    async def run(self, request: RunRequest, *, timeout_seconds: float) -> BoxRun:
        """Run a program to its end, its limits or its timeout."""
        return await self.run_with(request, timeout_seconds=timeout_seconds)

    async def run_with(
        self, request: RunRequest, *, timeout_seconds: float, channels: Sequence[int] = ()
    ) -> BoxRun:
        """Like ``run``; ``channels`` become descriptors 3, 4 … of the program and are closed here.

        They stay the caller's until this is awaited. An action that certainly never began, for a
        shortage that may pass, is started once more; one with channels has spent them.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        run = await self._once(request, timeout_seconds, channels)
        if isinstance(run, Unstarted) and run.passing and not channels:
            await asyncio.sleep(_AGAIN_SECONDS)
            run = await self._once(request, max(0.0, end - loop.time()), ())
        if isinstance(run, Unstarted):
            raise BoxFailed(run.sentence(self.box_id, request.argv[0]))
        return run

    async def _once(
        self, request: RunRequest, timeout_seconds: float, channels: Sequence[int]
    ) -> BoxRun | Unstarted:
        opened = list(channels)
        prepared = gate = None
        try:
            if self._removal is not None:
                raise BoxFailed(f"box {self.box_id} is being removed; nothing was run")
            if not request.argv:
                raise ToolRefused("argv is empty; nothing was run")
            gate = await self.backend.gate(self)
            if gate is not None:
                channels = [*channels, gate.channel]
                opened.append(gate.channel)
            prepared = await self._prepared(request, len(opened), gate)
            opened += prepared.opened
            limits = self.policy.limits
            if self.group is not None:
                self.group.reset_peak()
            pid: list[int] = []
            work = Work(
                order=prepared.order,
                stdin=request.stdin,
                limits=limits,
                timeout_seconds=timeout_seconds,
                group=self.group,
                passed=[*prepared.mounts, *channels, *prepared.passed],
                watchers=self.backend.watchers(self, pid),
                cpu_seconds=cpu_of(pid),
                joins=prepared.server is None,
                spared=self.server.own_pids if self.server else frozenset,
                wrapped=prepared.began is not None,
                started=lambda: _close_all(opened),
            )
            ended = await self._supervised(prepared.server or self.backend.host.maker(), work)
            if prepared.server is not None:
                prepared.server.arm()
            run = self._finished(request, ended, prepared)
            if gate is not None and isinstance(run, BoxRun):
                run = with_network(run, await gate.close())
            return run
        finally:
            _close_all(opened)
            if gate is not None:
                await gate.close()
            if prepared is not None:
                _close_all([d for d in (prepared.status, prepared.reported) if d >= 0])

    async def _prepared(self, request: RunRequest, channels: int, gate: Gate | None) -> Prepared:
        """Say how ``request`` is started; the last of its channels is that of ``gate``."""
        prepared = await self.backend.warm_start(self, request, channels, gate)
        if prepared is not None:
            return prepared
        if gate is not None:
            at, paths = CHANNEL_FIRST + channels - 1, self.backend.inside_paths()
            request = gate.through(request, self.baseline.environment, paths, at)
        return self.backend.prepare(self, request, channels)

    async def _supervised(self, starter: Starter, work: Work) -> Ended:
        """Run the action as a task of its own, so that ``destroy`` can end it from elsewhere."""
        self._action = asyncio.ensure_future(supervise(starter, work))
        # Whoever was cancelled does not look at it; that is no forgotten error.
        self._action.add_done_callback(lambda a: a.cancelled() or a.exception())
        try:
            return await asyncio.shield(self._action)
        except asyncio.CancelledError:
            self._action.cancel()
            await seen_out(self._action)
            current = asyncio.current_task()
            if current is not None and not current.cancelling():
                raise BoxFailed(f"box {self.box_id} was removed while its action ran") from None
            raise

    def _finished(
        self, request: RunRequest, ended: Ended, prepared: Prepared
    ) -> BoxRun | Unstarted:
        result = ended.result
        gone = prepared.server is not None and prepared.server.dead
        if gone and not ended.stopped and result.limit is None:
            raise BoxFailed(
                f"the server of box {self.box_id} ended while {request.argv[0]!r} ran; "
                "the program may have run in part"
            )
        problem = unstarted(ended, prepared.began)
        if problem is not None and not problem.program_missing:
            return problem
        if problem is not None:
            text = f"stoker: cannot start {request.argv[0]!r}: {problem.text}\n".encode()
            result = msgspec.structs.replace(
                result,
                exit_code=_NOT_STARTED,
                signal=None,
                stderr=Stream(kept=text, total_bytes=len(text)),
            )
        if prepared.reported >= 0 and problem is None and not ended.stopped:
            result = as_reported(prepared.reported, result, self.box_id)
        result = msgspec.structs.replace(result, interrupted_before=self.interrupted)
        self.interrupted = self.interrupted or ended.stopped or result.limit is not None
        return BoxRun(result=result, usage=ended.usage)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write regular files beneath the workspace."""
        workspace = self._workspace()
        await asyncio.to_thread(workspace.write, files, bytes_max=self.policy.limits.disk_bytes)

    async def read_file(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one regular file beneath the workspace."""
        return await asyncio.to_thread(self._workspace().read, path, bytes_max=bytes_max)

    async def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Copy regular files out."""
        return await asyncio.to_thread(self._workspace().export, paths, bytes_max=bytes_max)

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Write its state as one file named by its digest."""
        self._at_rest()
        return await branching.checkpoint_of(self, directory)

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Make boxes that begin in its state."""
        self._at_rest()
        return await branching.branches_of(self, count)

    async def packed(self, into: BinaryIO) -> Packed:
        """Write its state to ``into``; see ``branching.Keeps``."""
        return await branching.packed_by_host(self, into)

    @property
    def leaving(self) -> bool:
        """Whether it is being removed, or was."""
        return self._removal is not None

    def _at_rest(self) -> None:
        if self._action is not None and not self._action.done():
            raise ToolRefused(
                f"box {self.box_id} runs an action; its state is taken between actions; "
                "nothing was done"
            )
        self._workspace()

    def _workspace(self) -> WorkspaceFiles:
        if self._files is None or self._removal is not None:
            raise BoxFailed(f"box {self.box_id} is being removed; its files were not touched")
        return self._files

    async def destroy(self) -> None:
        """Kill, unmount, remove; shared by everybody who asks, and never stopped half-way."""
        if self._removal is None:
            self._removal = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        if self._action is not None and not self._action.done():
            self._action.cancel()
            await asyncio.wait([self._action])
        if self.server is not None:
            await self.server.close()
        if self._files is not None:
            self._files.close()
        if self.group is not None:
            self.group.close()
        await self.backend.host.remove(self.record)
        self.backend.boxes.pop(self.box_id, None)


class LocalBackend(ABC):
    """A backend on this host's kernel."""

    box_type: type[LocalBox] = LocalBox
    shared_kernel = True
    """Whether its boxes share the host's kernel."""
    rooted = False
    """Whether they can have a root file system of their own."""

    def __init__(self, host: SandboxHost, parts: Parts) -> None:
        self.host = host
        self.parts = parts
        self.boxes: dict[str, LocalBox] = {}
        self.spool = host.state_directory
        """Where large states lie, nameless, while they are copied."""

    @property
    def kind(self) -> str:
        """What tells its boxes from others."""
        return self.parts.rung

    @abstractmethod
    async def offer(self) -> BoxOffer:
        """Run the canary and say what can be given."""

    @abstractmethod
    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        """Say how ``request`` is started; ``channels`` descriptors follow as 3, 4 …."""

    async def warm_start(
        self, _box: LocalBox, _request: RunRequest, _channels: int, _gate: Gate | None
    ) -> Prepared | None:
        """Say how the box's warm server starts ``request``; ``None``: it is started afresh.

        The last of its channels is that of ``gate``, if it has one.
        """
        return None

    @abstractmethod
    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse a policy this backend cannot give (``IsolationUnavailable``)."""

    async def gate(self, box: LocalBox) -> Gate | None:
        """Open the way out of one action; ``None`` where there is none, or no need of one.

        Raises:
            BoxFailed: the egress proxy cannot be started.
        """
        del box
        return None

    def watchers(self, box: LocalBox, pid: list[int]) -> list[Watcher]:
        """Return the limits that are watched from outside."""
        limits = box.policy.limits
        if self.parts.sized_mounts:
            return [lambda: mounts_full(box.record.mounts)]
        watched = [disk_watcher(str(box.directory), limits)]
        if box.group is None:
            watched.append(tree_watcher(pid, limits))
        return watched

    def rlimits(self, limits: Limits) -> dict[int, tuple[int, int]]:
        """Return the kernel's per-process limits that back the counted ones up."""
        cpu = int(limits.cpu_seconds) + 1
        chosen = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: limits.disk_bytes,
            resource.RLIMIT_NOFILE: _DESCRIPTORS_MAX,
        }
        if not self.parts.group:
            chosen[resource.RLIMIT_AS] = 2 * limits.memory_bytes
        bounded = {r: at_most(r, value) for r, value in chosen.items()}
        # The hard limit kills what ignores SIGXCPU.
        bounded[resource.RLIMIT_CPU] = (cpu, cpu + 1)
        return bounded

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> LocalBox:
        """Make a box; see ``base.Backend``."""
        self.check(policy)
        built = await self.host.baselines.built(self, box_id, baseline, policy)
        if built is None:
            return await self.make(box_id, baseline, policy)
        return await branching.begun(self, box_id, baseline, policy, built)

    async def make(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        *,
        begins: Beginning | None = None,
    ) -> LocalBox:
        """Make a box, empty or in the state it ``begins`` in."""
        self.check(policy)
        record = self.host.record(box_id, self.parts.rung)
        self.host.alive.add(box_id)
        try:
            record = self._leased(self._planned(record), policy)
            if record.uid is not None and self.host.uids is not None:
                # Done while the box is made, in a thread; it is no part of making the next one.
                asyncio.get_running_loop().call_soon(self.host.uids.look_ahead)
            pinned = await self.host.baselines.pinned(self, box_id, baseline, policy)
            box = self.box_type(self, record, pinned, policy)
            self.boxes[box_id] = box
            await branching.whole(lambda: box.build(begins), lambda _: None)
        except BaseException as error:
            await self._undo(record)
            if isinstance(error, OSError):
                raise BoxFailed(
                    f"box {box_id} could not be made ({error}); nothing of it is left"
                ) from error
            raise
        return box

    async def restore(
        self, box_id: str, baseline: Baseline, policy: ExecutionPolicy, checkpoint: Checkpoint
    ) -> LocalBox:
        """Make a box that begins in a saved state."""
        return await branching.restored(self, box_id, baseline, policy, checkpoint)

    def _leased(self, record: BoxRecord, policy: ExecutionPolicy) -> BoxRecord:
        leases = self.host.uids if self.parts.leased_uid else None
        if leases is None:
            return record
        uid = leases.lease()
        try:
            second = policy.warm or self.parts.launcher_uid
            server_uid = leases.lease() if second else None
        except BaseException:
            leases.release(uid)  # no record names it yet
            raise
        return msgspec.structs.replace(record, uid=uid, server_uid=server_uid)

    def _planned(self, record: BoxRecord) -> BoxRecord:
        host, parts = self.host, self.parts
        directory = host.work_directory(record.box_id, traversable=parts.leased_uid)
        return msgspec.structs.replace(
            record,
            group=host.group_of(record.box_id) if parts.group else "",
            mounts=tuple(str(directory / f) for f in FOLDERS) if parts.sized_mounts else (),
            directory=str(directory),
        )

    async def _undo(self, record: BoxRecord) -> None:
        box = self.boxes.get(record.box_id)
        await to_its_end(box.destroy() if box else self.host.remove(record))

    async def judge(
        self,
        box_id: str,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Grade ``files``: judge and solution in two boxes of their own (``judge``)."""
        return await judge_in(
            self, box_id, files, tests, policy=policy, timeout_seconds=timeout_seconds
        )

    @abstractmethod
    def inside_paths(self) -> tuple[str, str]:
        """Return interpreter and script directory as a box of this backend sees them."""

    async def sweep(self) -> int:
        """Remove what dead incarnations left."""
        return await self.host.sweep()

    async def close(self) -> None:
        """Destroy every box.

        Raises:
            BoxFailed: some could not be removed; the others were.
        """
        ends = await asyncio.gather(
            *(box.destroy() for box in list(self.boxes.values())), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


CHANNEL_FIRST = 3
