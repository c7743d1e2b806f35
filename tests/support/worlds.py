"""Backends whose boxes are guests, each opened once for a module of tests."""

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import IsolationUnavailable
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits
from stoker.model.tools import RunRequest, RunResult
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import parts
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.smol.backend import SmolBackend
from stoker.sandbox.vm.box import GuestBox
from support import needs, sandbox

LIMITS = Limits(
    cpu_seconds=100, memory_bytes=96 * MEBIBYTE, processes_max=32, disk_bytes=8 * MEBIBYTE,
    files_max=300, output_bytes=64 * 1024,
)  # fmt: skip
RIG = os.environ.get("STOKER_RIG") == "smol"
"""Whether this is the emulated host of ``make rig-smol``: nothing may be skipped there."""
PATIENCE = 400.0 if RIG else 90.0
"""Seconds: only reached when something hangs."""

GuestBackend = QemuBackend | SmolBackend


def qemu_missing() -> str:
    try:
        parts.find()
    except IsolationUnavailable as error:
        return str(error)
    return ""


def _smol_missing() -> str:
    if RIG:
        return ""
    if importlib.util.find_spec("smol") is None:
        return f"smolmachines is not installed; {needs.SMOL}"
    return "" if parts.has_kvm() else f"/dev/kvm cannot be opened by every user; {needs.SMOL}"


QEMU = pytest.param(
    Isolation.QEMU,
    id="qemu",
    marks=[
        sandbox.needs_root,
        pytest.mark.root,
        pytest.mark.skipif(bool(qemu_missing()), reason=f"guests of QEMU: {qemu_missing()}"),
    ],
)
MICROVM = pytest.param(
    Isolation.MICROVM,
    id="microvm",
    marks=[
        sandbox.needs_root,
        pytest.mark.root,
        pytest.mark.skipif(bool(_smol_missing()), reason=f"Smol Machines: {_smol_missing()}"),
    ],
)


class World:
    """A backend, in an event loop that outlives each test."""

    def __init__(self, runner: asyncio.Runner, backend: GuestBackend, kind: Isolation) -> None:
        self.backend = backend
        self.policy = ExecutionPolicy(isolation=kind, limits=LIMITS)
        self._runner = runner
        self._count = 0

    def do(self, body: Callable[[], Awaitable[sandbox.T]]) -> sandbox.T:
        async def bounded() -> sandbox.T:
            async with asyncio.timeout(2 * PATIENCE):
                return await body()

        return self._runner.run(bounded())

    @contextlib.asynccontextmanager
    async def box(self, **limits: float) -> AsyncIterator[GuestBox]:
        policy = msgspec.structs.replace(
            self.policy, limits=msgspec.structs.replace(LIMITS, **limits)
        )
        self._count += 1
        box = await self.backend.create(f"box_{self._count}", Baseline(), policy)
        try:
            yield box
        finally:
            await box.destroy()

    def ran(self, *argv: str, stdin: bytes = b"", **limits: float) -> RunResult:
        """Run a program in a fresh box."""

        async def body() -> RunResult:
            async with self.box(**limits) as box:
                return await result_of(box, *argv, stdin=stdin)

        return self.do(body)


async def result_of(
    box: GuestBox, *argv: str, stdin: bytes = b"", seconds: float = PATIENCE
) -> RunResult:
    request = RunRequest(argv=argv, stdin=stdin)
    return (await box.run(request, timeout_seconds=seconds)).result


def memories_of(world: World) -> list[int]:
    """Return descriptors of the memories that boxes are forked from."""
    assert isinstance(world.backend, QemuBackend)
    return [held.origin.memory for held in world.backend.origins._held.values()]


def backend_of(host: SandboxHost, kind: Isolation) -> GuestBackend:
    return QemuBackend(host) if kind is Isolation.QEMU else SmolBackend(host)


def opened(kind: Isolation, state: Path) -> Iterator[World]:
    """Give a world; afterwards nothing of it may be left."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def begun() -> GuestBackend:
            backend = backend_of(await stack.enter_async_context(SandboxHost.open(state)), kind)
            stack.push_async_callback(backend.close)
            return backend

        made = World(runner, runner.run(begun()), kind)
        yield made
        host = made.backend.host

        async def left() -> tuple[int, int]:
            await made.backend.close()
            return host.leaked(), len(host.ledger.records())

        assert runner.run(left()) == (0, 0), "boxes left something behind"
        runner.run(stack.aclose())
