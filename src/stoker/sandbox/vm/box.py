"""A box that is a virtual machine: its programs and files are the guest runner's business.

The machine is made and removed by its backend; here is what every such box does alike. A guest
that is gone, or cannot be believed, takes the box with it: its action is told as ``box_lost``, and
whatever is asked of it afterwards is ``BoxFailed``.
"""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from stoker.errors import BoxFailed, ToolRefused
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Limits
from stoker.model.tools import (
    ExportResult,
    LimitKind,
    ReadResult,
    RunRequest,
    RunResult,
    Stream,
)
from stoker.sandbox.base import BoxRun, Branch, not_offered
from stoker.sandbox.egress.gate import PORT, Carried, Egress, Gate, with_network
from stoker.sandbox.runtime import INSIDE
from stoker.sandbox.supervise import ending
from stoker.sandbox.vm.link import GuestLink, GuestLost, GuestRun, Order
from stoker.sandbox.vm.streams import Connect
from stoker.sandbox.words import base_environment, encoded, encoded_argv, inside_directory

_T = TypeVar("_T")
_DESCRIPTORS_MAX = 4096
_NOT_STARTED = 127
_PROGRAM_FAULTS = frozenset(
    {errno.E2BIG, errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR, errno.ELOOP}
)
"""Why a program was not reached that are its caller's doing."""


class GuestBox:
    """One guest as a box; see ``base.Box`` for what it promises."""

    def __init__(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        link: GuestLink,
        remove: Callable[[], Awaitable[None]],
        egress: Egress | None = None,
    ) -> None:
        self.box_id = box_id
        self.baseline = baseline
        self.policy = policy
        self.link = link
        self._remove = remove
        self._egress = egress
        self._interrupted = False
        self._removal: asyncio.Future[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether its guest ended by itself."""
        return self.link.lost is not None

    async def run(self, request: RunRequest, *, timeout_seconds: float) -> BoxRun:
        """Run a program to its end, its limits or its timeout."""
        return await self.run_with(request, timeout_seconds=timeout_seconds)

    async def run_with(
        self, request: RunRequest, *, timeout_seconds: float, channels: Sequence[int] = ()
    ) -> BoxRun:
        """Like ``run``; ``channels`` become descriptors 3, 4 … of the program, closed here."""
        gate = None
        try:
            self._check()
            if self._egress is not None and self.policy.network:
                gate = await self._egress.open(self.box_id, self.policy, handed=True)
            order = self._order(request, timeout_seconds, gate)
        except BaseException:
            for channel in channels:
                os.close(channel)
            if gate is not None:
                await _closed(gate)
            raise
        if gate is None:
            return await self._run(request, order, channels)
        try:
            run = await self._run(request, order, channels, gate.connect)
        finally:
            carried = await _closed(gate)
        return run if run.box_lost else with_network(run, carried)

    async def _run(
        self,
        request: RunRequest,
        order: Order,
        channels: Sequence[int],
        connect: Connect | None = None,
    ) -> BoxRun:
        try:
            ran = await self.link.run(order, request.stdin, channels, connect)
        except GuestLost as lost:
            if self._removal is not None:
                raise BoxFailed(f"box {self.box_id} was removed while its action ran") from lost
            out, err = (Stream(kept=kept, total_bytes=len(kept)) for kept in lost.kept)
            result = RunResult(stdout=out, stderr=err, interrupted_before=self._interrupted)
            usage = Usage(output_bytes=out.total_bytes + err.total_bytes)
            return BoxRun(result=result, usage=usage, box_lost=True)
        return self._finished(request, ran)

    def _order(self, request: RunRequest, timeout_seconds: float, gate: Gate | None) -> Order:
        if not request.argv:
            raise ToolRefused("argv is empty; nothing was run")
        if gate is not None:
            request = gate.told(request)
        encoded_argv(request.argv)
        variables = {
            **base_environment(INSIDE, home="/workspace", temporary="/tmp"),  # noqa: S108 - a path inside
            "USER": "agent",
            **self.baseline.environment,
            **request.environment,
        }
        encoded(variables)
        limits = self.policy.limits
        return Order(
            argv=request.argv,
            environment=variables,
            directory=inside_directory(request.directory),
            rlimits=_rlimits(limits),
            timeout_seconds=timeout_seconds,
            cpu_seconds=limits.cpu_seconds,
            output_bytes=limits.output_bytes,
            door=PORT if gate is not None else 0,
            authorities=gate.authorities if gate is not None else (),
        )

    def _finished(self, request: RunRequest, ran: GuestRun) -> BoxRun:
        ended = ran.ended
        code, number = ending(ended.status, wrapped=False)
        stderr = Stream(kept=ran.stderr, total_bytes=ended.stderr)
        if ended.error:
            if ended.errno not in _PROGRAM_FAULTS:
                raise BoxFailed(
                    f"box {self.box_id} could not start {request.argv[0]!r}: {ended.error}; "
                    "nothing was run"
                )
            text = f"stoker: cannot start {request.argv[0]!r}: {ended.error}\n".encode()
            code, number, stderr = _NOT_STARTED, None, Stream(kept=text, total_bytes=len(text))
        limit = LimitKind(ended.reason) if ended.reason in set(LimitKind) else None
        result = RunResult(
            exit_code=code,
            signal=number,
            stdout=Stream(kept=ran.stdout, total_bytes=ended.stdout),
            stderr=stderr,
            timed_out=ended.reason == "timeout",
            limit=limit,
            interrupted_before=self._interrupted,
        )
        self._interrupted = self._interrupted or ended.stopped or limit is not None
        usage = Usage(
            cpu_seconds=ended.cpu_seconds,
            memory_peak_bytes=ended.memory_peak_bytes,
            output_bytes=ended.stdout + ended.stderr,
        )
        return BoxRun(result=result, usage=usage)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write regular files beneath the workspace."""
        self._check()
        total = sum(len(content) for content in files.values())
        if total > self.policy.limits.disk_bytes:
            raise ToolRefused(
                f"{total} bytes of files are over the disk limit of {self.policy.limits.disk_bytes}"
            )
        for path, content in files.items():
            refused = await self._told(self.link.write(path, content))
            if refused is not None:
                raise ToolRefused(f"file {path!r} was not written: {refused}")

    async def read_file(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one regular file beneath the workspace."""
        self._check()
        return await self._told(self.link.read(path, bytes_max=bytes_max))

    async def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Copy regular files out."""
        self._check()
        return await self._told(self.link.export(paths, bytes_max=bytes_max))

    async def _told(self, work: Awaitable[_T]) -> _T:
        try:
            return await work
        except GuestLost as lost:
            raise BoxFailed(f"box {self.box_id} is lost: {lost}; its files are gone") from lost

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Refuse: guests have no checkpoints yet."""
        del directory
        raise not_offered("checkpoint", self.policy.isolation)

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Refuse: guests have no branches yet."""
        del count
        raise not_offered("branch", self.policy.isolation)

    def _check(self) -> None:
        if self._removal is not None:
            raise BoxFailed(f"box {self.box_id} is being removed; nothing was done")
        if self.link.lost is not None:
            raise BoxFailed(f"box {self.box_id} is lost: {self.link.lost}; nothing was done")

    async def destroy(self) -> None:
        """End the guest and remove what it had; shared by everybody who asks."""
        if self._removal is None:
            self._removal = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removal)


async def _closed(gate: Gate) -> Carried | None:
    os.close(gate.channel)
    return await gate.close()


def _rlimits(limits: Limits) -> dict[str, tuple[int, int]]:
    cpu = int(limits.cpu_seconds) + 1
    return {
        "core": (0, 0),
        "file": (limits.disk_bytes, limits.disk_bytes),
        "files": (_DESCRIPTORS_MAX, _DESCRIPTORS_MAX),
        "cpu": (cpu, cpu + 1),  # the hard limit kills what ignores SIGXCPU
    }
