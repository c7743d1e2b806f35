"""Boxes without coordinator or ledger: for anybody's queue, trainer or script.

    async with stoker.box(policy) as box:
        seen = await box.run(["python", "-c", "print(6 * 7)"], timeout="10s")

The same backends, limits, results and teardown as in a run. Open boxes of one event loop share what
is dear to make (the helper that starts processes, the canary's finding); ``boxes`` keeps that for
as long as it is open. Whoever opens boxes first sweeps what a dead process of this user left.
"""

import asyncio
import contextlib
import logging
import math
import os
import stat
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from stoker.errors import BoxFailed, ConfigInvalid, IsolationUnavailable, ToolRefused
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, credential_problem
from stoker.model.given import argv_of, contents_of, duration
from stoker.model.tools import (
    ExportResult,
    OpenResult,
    ReadResult,
    RunRequest,
    RunResult,
    Tests,
    Verdict,
)
from stoker.sandbox.base import Backend, Box, Branch
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.runtime import make_public
from stoker.sandbox.select import choose_backend
from stoker.seams.entropy import fresh_id

_ROOT_STATE = Path("/run/stoker/state")
_TRANSFER_BYTES_MAX = 64 * 1024 * 1024
_FILE_BYTES_MAX = 16 * 1024 * 1024
_BRANCHES_MAX = 1000
_PYTHON = f"python-{sys.version_info.major}.{sys.version_info.minor}"

_log = logging.getLogger("stoker.boxes")


class BoxResult(RunResult, frozen=True, kw_only=True):
    """What a program in a box did, and what it took."""

    usage: Usage = Usage()
    """CPU time, peak of memory and bytes of output of this action."""


class OpenBox:
    """A box that stands, as ``stoker.box`` gives it. Its programs take turns, its files need not.

    **Cancellation:** of any call: its processes are dead when it returns; files stay.
    """

    def __init__(
        self, box: Box, backend: Backend, opened: OpenResult, began: Branch | None = None
    ) -> None:
        self.opened = opened
        """Which isolation, rung and baseline it got."""
        self.began = began
        """What it was branched off; ``None`` for a box that was made by itself."""
        self._box = box
        self._backend = backend
        self._turn = asyncio.Lock()
        self._branches: list[OpenBox] = []

    @property
    def box_id(self) -> str:
        """Its name on this host."""
        return self._box.box_id

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | str = "30s",  # noqa: ASYNC109 - enforced by killing the box's processes
        stdin: bytes | str = b"",
        environment: Mapping[str, str] | None = None,
        directory: str = ".",
    ) -> BoxResult:
        """Run a program; nonzero, killed, over a limit and timed out are data, not exceptions.

        ``timeout`` is in seconds, or text such as ``"10s"``; ``directory`` is workspace-relative.

        Raises:
            ToolRefused: the call cannot be carried out as written; nothing was run.
            BoxFailed: it could not be started for a reason of ours, or its box was lost with it.
        """
        try:
            seconds = duration(timeout, "timeout")
            request = RunRequest(
                argv=argv_of(argv),
                stdin=stdin.encode() if isinstance(stdin, str) else bytes(stdin),
                environment=dict(environment or {}),
                directory=directory,
            )
        except (TypeError, ValueError) as error:
            raise ToolRefused(f"run: {error}; nothing was run") from error
        async with self._turn:
            ran = await self._box.run(request, timeout_seconds=seconds)
        if ran.box_lost:
            raise BoxFailed(
                f"box {self.box_id} was lost while {request.argv[0]!r} ran; its files are gone"
            )
        return BoxResult(**_fields(ran.result), usage=ran.usage)

    async def write_files(self, files: Mapping[str, bytes | str]) -> None:
        """Put files in the workspace, parents made; text is written as UTF-8.

        Raises:
            ToolRefused: a path leaves the workspace or meets a link, or the disk limit is reached.
        """
        contents = _contents(files)
        await self._box.write_files(contents)

    async def read_file(self, path: str, *, bytes_max: int = _FILE_BYTES_MAX) -> ReadResult:
        """Read one regular file of the workspace; a refusal is data (``refused``)."""
        return await self._box.read_file(path, bytes_max=bytes_max)

    async def export(self, *paths: str, bytes_max: int = _TRANSFER_BYTES_MAX) -> ExportResult:
        """Copy regular files out of the workspace: all of it when no path is named."""
        return await self._box.export(paths or (".",), bytes_max=bytes_max)

    async def score(self, tests: Tests, *, timeout: float | str = "30s") -> Verdict:  # noqa: ASYNC109 - see run
        """Grade a copy of the workspace: judge and answer in two boxes of their own.

        Raises:
            ToolRefused: the tests cannot be used.
            BoxFailed: an infrastructure fault; never a verdict.
        """
        try:
            seconds = duration(timeout, "timeout")
        except ValueError as error:
            raise ToolRefused(f"score: {error}; nothing was graded") from error
        if not isinstance(tests, Tests):
            raise ToolRefused(f"score takes stoker.Tests, not {tests!r:.100}; nothing was graded")
        copied = await self.export()
        verdict, _ = await self._backend.judge(
            fresh_id("box_"),
            copied.files,
            tests,
            policy=self._box.policy,
            timeout_seconds=seconds,
        )
        return verdict

    async def checkpoint(self, directory: Path | str) -> Checkpoint:
        """Keep what it holds as one file in ``directory``, named by its content; it goes on.

        ``stoker.box(policy, checkpoint=…)`` makes a box that begins there, on any host with the
        same baseline. The file is yours to keep or remove.

        Raises:
            BranchUnavailable: this kind of box has no checkpoints.
            ToolRefused: what it holds cannot be kept whole; nothing was written.
            BoxFailed: it could not be written; nothing of it is left.
        """
        async with self._turn:
            return await self._box.checkpoint(Path(directory))

    async def branch(self, count: int = 1) -> "tuple[OpenBox, ...]":
        """Make ``count`` boxes that begin with what it holds, each then on its own.

        They are removed with this one, or before by ``remove``.

        Raises:
            BranchUnavailable, ToolRefused: as for ``checkpoint``; none was made.
            BoxFailed: one could not be made; none is left.
        """
        if not isinstance(count, int) or not 1 <= count <= _BRANCHES_MAX:
            raise ToolRefused(f"branch takes a number from 1 to {_BRANCHES_MAX}, not {count!r:.50}")
        async with self._turn:
            began = await self._box.branch(count)
        made = tuple(OpenBox(one.box, self._backend, self.opened, one) for one in began)
        self._branches += made
        return made

    async def remove(self) -> None:
        """Remove it and its branches now; safe to repeat."""
        await asyncio.gather(*(one.remove() for one in self._branches), self._box.destroy())

    def __repr__(self) -> str:
        return f"OpenBox({self.box_id}, {self.opened.isolation})"


class Boxes:
    """A hold on this host for boxes, made by ``boxes``."""

    def __init__(self, host: SandboxHost) -> None:
        self._host = host
        self._backends: dict[tuple[object, ...], Backend] = {}
        self._choosing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def box(
        self,
        policy: ExecutionPolicy | None = None,
        *,
        baseline: Baseline | str = "python",
        files: Mapping[str, bytes | str] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> AsyncIterator[OpenBox]:
        """Make a box under ``policy`` with ``files`` in it; on leaving, nothing of it is left.

        It begins empty, or with what ``checkpoint`` holds.

        Raises:
            ConfigInvalid: policy or baseline cannot be used.
            IsolationUnavailable: this host cannot give the policy; nothing is weakened.
            ArtifactDamaged: the checkpoint's file is not what it was.
            BoxFailed: making it failed; nothing of it is left.
        """
        policy = _policy(policy)
        start = _baseline(baseline)
        contents = _contents(files or {})
        backend = await self._backend(policy)
        box_id = fresh_id("box_")
        if checkpoint is None:
            made = await backend.create(box_id, start, policy)
        else:
            made = await backend.restore(box_id, start, policy, checkpoint)
        held: list[OpenBox] = []
        try:
            offer = await backend.offer()
            if contents:
                await made.write_files(contents)
            opened = OpenResult(
                isolation=offer.isolation.value,
                rung=offer.rung.value,
                baseline_digest=made.baseline.digest,
            )
            held.append(OpenBox(made, backend, opened))
            yield held[0]
        finally:
            await _to_the_end(held[0].remove() if held else made.destroy())

    async def _backend(self, policy: ExecutionPolicy) -> Backend:
        """Return what gives ``policy``; what a host can give depends on three of its fields."""
        key = (policy.isolation, policy.trust, policy.accept_shared_kernel)
        async with self._choosing:
            if key not in self._backends:
                self._backends[key] = await choose_backend(policy, self._host)
            return self._backends[key]

    async def close(self) -> None:
        """Remove boxes that are still there."""
        for backend in self._backends.values():
            await backend.close()


@contextlib.asynccontextmanager
async def boxes(directory: Path | None = None) -> AsyncIterator[Boxes]:
    """Take hold of this host for many boxes: the helper and the canary are paid for once.

    ``directory`` is where boxes are written down (and, for an ordinary user, kept); by default one
    per user. Processes may share it; each sweeps what dead ones left there.

    Raises:
        IsolationUnavailable: a directory this needs cannot be used.

    **Cancellation:** every box is removed before it goes on.
    """
    state = await asyncio.to_thread(_state_directory, directory)
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(SandboxHost.open(state))
        ending = stack.pop_all()
        held = Boxes(host)
        try:
            try:
                await host.sweep()
            except BoxFailed as error:  # somebody else's; ours can be made all the same
                _log.warning("boxes of a dead process could not be removed: %s", error)
            yield held
        finally:
            await _to_the_end(_closed(held, ending))


@contextlib.asynccontextmanager
async def box(
    policy: ExecutionPolicy | None = None,
    *,
    baseline: Baseline | str = "python",
    files: Mapping[str, bytes | str] | None = None,
    checkpoint: Checkpoint | None = None,
) -> AsyncIterator[OpenBox]:
    """Make one box under ``policy`` with ``files`` in it; on leaving, nothing of it is left.

    It begins empty, or with what ``checkpoint`` holds. Boxes open at once in one event loop share
    what is dear to make. What a dead process of this user left is swept first.

    Raises:
        ConfigInvalid: policy or baseline cannot be used.
        IsolationUnavailable: this host cannot give the policy; nothing is weakened.
        ArtifactDamaged: the checkpoint's file is not what it was.
        BoxFailed: making it failed; nothing of it is left.

    **Cancellation:** its processes are killed and the box is removed before it goes on.
    """
    # Before anything is started: a refusal should cost nothing.
    policy, baseline = _policy(policy), _baseline(baseline)
    async with (
        _shared_boxes() as held,
        held.box(policy, baseline=baseline, files=files, checkpoint=checkpoint) as made,
    ):
        yield made


# --- what open boxes of one event loop share ------------------------------------------------------


class _Shared:
    def __init__(self) -> None:
        self.users = 0
        self.stack = contextlib.AsyncExitStack()
        self.opening = asyncio.ensure_future(self.stack.enter_async_context(boxes()))


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]" = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def _shared_boxes() -> AsyncIterator[Boxes]:
    loop = asyncio.get_running_loop()
    shared = _shared.get(loop)
    if shared is None:
        shared = _shared[loop] = _Shared()
    shared.users += 1
    try:
        yield await asyncio.shield(shared.opening)
    finally:
        shared.users -= 1
        if not shared.users:
            del _shared[loop]  # whoever comes while it closes begins anew
            await _to_the_end(_let_go(shared))


async def _let_go(shared: _Shared) -> None:
    await asyncio.wait([shared.opening])
    if not shared.opening.cancelled():
        shared.opening.exception()  # whoever was cancelled meanwhile did not look at it
    await shared.stack.aclose()


async def _closed(held: Boxes, ending: contextlib.AsyncExitStack) -> None:
    try:
        await held.close()
    finally:
        await ending.aclose()


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish ``work`` even if we are cancelled meanwhile, however often; that follows it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


# --- what the caller gave -------------------------------------------------------------------------


def _state_directory(directory: Path | None) -> Path:
    """Return a directory of ours that nobody else can enter."""
    uid = os.geteuid()
    own = _ROOT_STATE if uid == 0 else Path(f"/var/tmp/stoker-boxes-{uid}")  # noqa: S108 - checked for its owner below
    state = directory or own
    try:
        make_public(state.parent)
        state.mkdir(mode=0o700, exist_ok=True)
        status = state.lstat()
    except OSError as error:
        raise IsolationUnavailable(
            f"the directory of boxes {state} cannot be made ({error.strerror}); name another one"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise IsolationUnavailable(
            f"the directory of boxes {state} is not a directory that only this user can change; "
            "remove it or name another one"
        )
    return state


def _policy(policy: ExecutionPolicy | None) -> ExecutionPolicy:
    if policy is None:
        return ExecutionPolicy()
    if not isinstance(policy, ExecutionPolicy):
        raise ConfigInvalid(f"policy takes a stoker.ExecutionPolicy, not {policy!r:.100}")
    try:
        # Words for enumerations are taken, and every field has the type it says.
        checked = msgspec.convert(msgspec.to_builtins(policy), ExecutionPolicy)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigInvalid(f"the execution policy cannot be used: {error}") from error
    for name in checked.limits.__struct_fields__:
        value = getattr(checked.limits, name)
        if not math.isfinite(value) or value <= 0:
            raise ConfigInvalid(f"limits.{name} is {value}; it must be a finite number above 0")
    if problem := credential_problem(checked.network, checked.credentials):
        raise ConfigInvalid(f"the execution policy cannot be used: {problem}")
    if checked.cuda is not msgspec.UNSET and checked.isolation is not Isolation.MICROVM:
        raise ConfigInvalid('cuda needs isolation = "microvm": no other box reaches the device')
    return checked


def _baseline(baseline: Baseline | str) -> Baseline:
    found = Baseline(name=baseline) if isinstance(baseline, str) else baseline
    if not isinstance(found, Baseline):
        raise ConfigInvalid(f"baseline takes a name or a stoker.Baseline, not {baseline!r:.100}")
    if found.build is not msgspec.UNSET:
        return found
    if found.name not in ("python", _PYTHON):
        raise ConfigInvalid(
            f'there is no baseline {found.name!r}; this host has "python" (which is {_PYTHON})'
        )
    return msgspec.structs.replace(found, name="python")


def _contents(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    try:
        return contents_of(files)
    except (AttributeError, ValueError) as error:
        raise ToolRefused(f"{error}; nothing was written") from error


def _fields(result: RunResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}
