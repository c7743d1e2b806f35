"""Runs attacks, each without its defence and in a box; *right*: it succeeds without, and only then.

As root it uses boxes of rung (a); an ordinary user's are of rung (b) or (c), where those aimed at a
uid of the box's own do not apply. The boxes that must hold may be containers; without its
defence an attack runs as ever.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable

import msgspec

from stoker.errors import StokerError
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Limits
from stoker.model.tools import RunRequest, Tests
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.select import choose_backend
from stoker.sandbox.starts import Prepared
from stoker.testing.attacks.attack import LOOSE, POSSIBLE, PRELUDE, TIGHT, Attack, Off
from stoker.testing.attacks.calls import CALLS
from stoker.testing.attacks.excess import EXCESS
from stoker.testing.attacks.forgery import CHECK, FORGERIES, VERDICT, Forgery
from stoker.testing.attacks.reach import REACH
from stoker.testing.attacks.world import NOBODY, World

ATTACKS: tuple[Attack, ...] = (*CALLS, *REACH, *EXCESS)
_JUDGE_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
_LONGER = 10


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one attack."""

    name: str
    case: str
    off: str
    """Which defence was off."""
    succeeds: bool
    """Without its defence it got what it wanted; else it proves nothing and is not counted."""
    held: bool
    """In a box it did not."""
    seen: str = ""
    """What it said in the box, where it should have been held and was not, or broke."""

    @property
    def right(self) -> bool:
        """It counts, and the box held."""
        return self.succeeds and self.held


class _Bare(NamespaceBackend):
    """A backend that starts a box's programs as root, for attacks that a uid stops."""

    as_root = False

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        prepared = super().prepare(box, request, channels)
        if self.as_root:
            prepared.order.identity, prepared.order.refuse_root = None, False
        return prepared


class Attackers:
    """The world, a host, and the boxes that are attacked in it.

    **Cancellation:** what runs is killed; nothing is left behind.
    """

    def __init__(
        self, world: World, host: SandboxHost, holding: LocalBackend, *, warm: bool
    ) -> None:
        self._world = world
        self._host = host
        self._holding = holding
        """What makes the boxes that must hold."""
        self._warm = warm

    @classmethod
    @contextlib.asynccontextmanager
    async def ready(
        cls, *, warm: bool = False, isolation: Isolation = Isolation.NAMESPACE
    ) -> AsyncIterator["Attackers"]:
        """Set everything up; on leaving, all of it is gone.

        ``warm``: the boxes that must hold have an interpreter waiting in them; ``isolation``: of
        which kind they are, namespaces or containers.

        Raises:
            IsolationUnavailable: this host has no such boxes.
        """
        with tempfile.TemporaryDirectory(prefix="stoker-attacks-") as place, World(place) as world:
            async with SandboxHost.open(world.state) as host:
                holding: LocalBackend = NamespaceBackend(host)
                if isolation is not Isolation.NAMESPACE:
                    asked = ExecutionPolicy(isolation=isolation, accept_shared_kernel=True)
                    chosen = await choose_backend(asked, host)
                    assert isinstance(chosen, LocalBackend), "of namespaces or containers"
                    holding = chosen
                yield cls(world, host, holding, warm=warm)

    def all(self) -> list[Attack | Forgery]:
        """Return the attacks that apply to this user's boxes."""
        root = os.geteuid() == 0
        return [*(one for one in ATTACKS if root or one.off is not Off.UID), *FORGERIES]

    async def outcome(self, attack: Attack | Forgery) -> Outcome:
        """Run one attack without its defence and in a box."""
        if isinstance(attack, Forgery):
            return await self._forged(attack)
        try:
            succeeds = await self._without(attack)
            held, seen = await self._within(attack)
        except (StokerError, OSError, subprocess.SubprocessError) as error:
            succeeds, held, seen = True, False, str(error)
        return Outcome(
            name=attack.name,
            case=attack.case,
            off=attack.off,
            succeeds=succeeds,
            held=held,
            seen=seen,
        )

    async def _without(self, attack: Attack) -> bool:
        if attack.off is Off.EVERYTHING:
            return await asyncio.to_thread(_as_plain_child, self._world, attack)
        wide = attack.off is Off.LIMITS
        async with self._box(LOOSE if wide else attack.limits, attack.off) as box:
            seconds = attack.timeout_seconds * (_LONGER if wide else 1)
            return POSSIBLE in (await _ran(box, self._world, attack, seconds))[0]

    async def _within(self, attack: Attack) -> tuple[bool, str]:
        world = self._world
        async with self._box(attack.limits, None) as box:
            out, text = await _ran(box, world, attack, attack.timeout_seconds)
            held = not world.survivors() if attack.leaves else POSSIBLE not in out.split()
        world.kill_survivors()
        return held, "" if held else text[-500:]

    @contextlib.asynccontextmanager
    async def _box(self, limits: Limits, off: Off | None) -> AsyncIterator[LocalBox]:
        backend = self._holding if off is None else self._weakened(off)
        policy = ExecutionPolicy(
            accept_shared_kernel=True, limits=limits, warm=self._warm and off is None
        )
        try:
            box = await backend.create("box_attacked", Baseline(), policy)
            if off is Off.UID:
                (box.directory / "workspace").chmod(0o777)
            yield box
        finally:
            await backend.close()

    def _weakened(self, off: Off) -> NamespaceBackend:
        backend = _Bare(self._host)
        defences = backend.defences
        defences.seccomp = defences.disable_user_namespaces = off is not Off.FILTER
        defences.network_namespace = off is not Off.NETWORK
        defences.proc_masks = off not in (Off.MASKS, Off.UID)
        backend.as_root = off is Off.UID
        return backend

    async def _forged(self, forgery: Forgery) -> Outcome:
        succeeds = await asyncio.to_thread(_naively_passed, self._world, forgery)
        seen = ""
        try:
            verdict, _ = await self._holding.judge(
                "box_judge",
                {"solution.py": forgery.answer.encode()},
                Tests(source=CHECK, entry_point="total"),
                policy=ExecutionPolicy(accept_shared_kernel=True, limits=TIGHT),
                timeout_seconds=_JUDGE_SECONDS,
            )
            held = not verdict.passed
        except StokerError as error:
            held, seen = False, str(error)
        return Outcome(
            name=forgery.name, case="A28", off="judge", succeeds=succeeds, held=held, seen=seen
        )


async def _ran(box: LocalBox, world: World, attack: Attack, seconds: float) -> tuple[bytes, str]:
    argv = ("python", "-c", PRELUDE + attack.program, json.dumps(world.places))
    result = (await box.run(RunRequest(argv=argv), timeout_seconds=seconds)).result
    return result.stdout.kept[-4096:], result.text


def _as_plain_child(world: World, attack: Attack) -> bool:
    root = os.geteuid() == 0
    argv = [world.python, "-c", PRELUDE + attack.program, json.dumps(world.places)]
    done = subprocess.run(  # noqa: S603 - our own programs
        argv,
        user=NOBODY if root else None,
        group=NOBODY if root else None,
        extra_groups=[] if root else None,
        env={"PATH": "/usr/bin:/bin", "SECRET": str(world.places["secret"])},
        cwd=world.directory,
        pass_fds=(int(world.places["descriptor"]),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if attack.leaves else subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if not attack.leaves:
        return POSSIBLE in done.stdout.split()
    try:
        return bool(world.survivors())
    finally:
        world.kill_survivors()


def _naively_passed(world: World, forgery: Forgery) -> bool:
    """Judge as most harnesses do; the wrong answers here must fool it."""
    told, tell = os.pipe()
    try:
        source = f"{forgery.answer}\n{CHECK}\ncheck(total)\n"
        done = subprocess.run(  # noqa: S603 - our own programs
            [world.python, "-c", source],
            cwd=world.directory,
            pass_fds=(tell,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        os.set_blocking(told, False)
        try:
            word = os.read(told, 4096)
        except BlockingIOError:
            word = b""
    finally:
        os.close(told)
        os.close(tell)
    return done.returncode == 0 or b"1 passed" in done.stdout or VERDICT in word


def counted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those that succeed without their defence."""
    return [one for one in outcomes if one.succeeds]
