"""``stoker bench soak``: blows to every process of real runs for minutes, and a checker at the end.

Round by round one run is started under load and its coordinator, workers, ledger owner and program
hosts are killed or stopped and continued, at moments and in an order that the seed decides; then a
calm phase in which everything must finish. The checker reads the run as it lies on the disk: no
rollout lost, no effect counted twice at the tool, rewards from completed rollouts alone and the
right ones, journals that replay, no box left.
"""

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.broker.base import JournalRequest, RolloutsRequest
from stoker.broker.client import connect
from stoker.cli.bench_machine import machine
from stoker.cli.bench_processes import processes, send
from stoker.coordinator.record import RunDirectory
from stoker.errors import EnvironmentLost, StokerError
from stoker.model.events import Admitted, Delivered, Finished, decode_event
from stoker.model.ids import RunId
from stoker.model.outcome import OutcomeKind
from stoker.sandbox import leftovers
from stoker.sandbox.host import SandboxHost
from stoker.seams.clock import SystemClock
from stoker.testing.soak_program import score

_ROLLOUTS = 12
_STEPS = 8
_LEASE_SECONDS = 2.0
_HURT_SECONDS = 40.0
_CALM_SECONDS = 240.0
_PAUSE_SECONDS = (0.2, 2.5)
_STOP_SECONDS = (0.1, 3 * _LEASE_SECONDS)
_STOP_SHARE = 0.4
_ROLES = ("coordinator", "worker", "owner", "host", "everything")
_WEIGHTS = (3, 4, 3, 4, 1)
_TESTING = Path(stoker.__file__).parent / "testing"
_MODULES = {
    "worker": "stoker.worker.main",
    "owner": "stoker.broker.owner",
    "host": "stoker.rollout.host",
}
_OPEN = (OutcomeKind.COMPLETED, OutcomeKind.AMBIGUOUS)
"""What a blow may make of a rollout, beside a box that was lost more often than it is rebuilt;
anything else is a finding."""

_SETTINGS = """
[ledger]
lease = {lease}
idle_exit = 10.0
[sandbox]
accept_shared_kernel = true
[workers]
count = 2
idle_exit = 20.0
[workers.classes.fast]
isolation = "process"
trust = "trusted"
slots = 3
attempts = 40
[program]
hosts = 2
check_replays = 0.0
"""

Say = Callable[[str], object]


class Found(msgspec.Struct):
    """What all rounds came to."""

    rounds: int = 0
    blows: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    effects: int = 0
    lost: list[str] = []
    twice: list[str] = []
    wrong: list[str] = []
    leaked: int = 0

    def all(self) -> list[str]:
        """Return every finding."""
        boxes = [f"{self.leaked} boxes leaked"] if self.leaked else []
        return [*self.lost, *self.twice, *self.wrong, *boxes]


def measure(*, minutes: float, seed: int, say: Say) -> dict[str, Any]:
    """Soak for ``minutes`` and return the bench document (DESIGN §9)."""
    found = Found()
    clock = SystemClock()
    end = clock.monotonic() + minutes * 60
    while not found.rounds or clock.monotonic() < end:
        chance = random.Random(f"{seed} {found.rounds}")  # noqa: S311 - a plan that can be repeated
        say(f"bench soak: seed {seed}, round {found.rounds + 1} …")
        hurt = min(_HURT_SECONDS, max(5.0, end - clock.monotonic()))
        place = Path(tempfile.mkdtemp(prefix="stoker-soak-"))
        before = len(found.all())
        try:
            asyncio.run(Round(place, chance, found, say).run(hurt))
        except StokerError as error:
            found.wrong.append(f"the checker cannot read the run: {error}")
        if len(found.all()) > before:
            say(f"bench soak: round {found.rounds + 1} found something; kept: {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
        found.rounds += 1
    return {
        "bench": "soak",
        "machine": machine(),
        "figures": {
            "kills": _figure(found.blows.total(), None, found.rounds),
            "lost": _figure(len(found.lost), 0, found.rounds),
            "applied_twice": _figure(len(found.twice), 0, found.rounds),
            "wrong": _figure(len(found.wrong), 0, found.rounds),
            "leaked": _figure(found.leaked, 0, found.rounds),
        },
        "seed": seed,
        "blows": dict(found.blows),
        "outcomes": dict(found.outcomes),
        "effects": found.effects,
        "findings": found.all(),
    }


class Round:
    """One run that is hurt, and the check of what it left."""

    def __init__(self, place: Path, chance: random.Random, found: Found, say: Say) -> None:
        self._place = place
        self._chance = chance
        self._found = found
        self._say = say
        self._clock = SystemClock()
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._stopped: set[int] = set()

    async def run(self, hurt_seconds: float) -> None:
        """Hurt, let finish, check; leaves no process behind."""
        self._write()
        self._start()
        try:
            await self._hurt(hurt_seconds)
            if await self._finished():
                await self._check()
        finally:
            await self._end()
        self._found.leaked += await self._left()

    async def _left(self) -> int:
        """Return how many boxes of this run are on the machine after its end."""
        with tempfile.TemporaryDirectory(prefix="stoker-soak-look-") as state:
            async with SandboxHost.open(Path(state)) as host:
                mine = str(self._place)
                left = [one for one in leftovers.find(host) if one.state_directory.startswith(mine)]
        return sum(len(one.boxes) for one in left)

    # --- the run -----------------------------------------------------------------------------

    def _write(self) -> None:
        lines = [
            {"task_id": f"{number:03}", "data": self._data(number)} for number in range(_ROLLOUTS)
        ]
        tasks = b"\n".join(msgspec.json.encode(line) for line in lines)
        (self._place / "tasks.jsonl").write_bytes(tasks)
        (self._place / "stoker.toml").write_text(_SETTINGS.format(lease=_LEASE_SECONDS))

    def _data(self, number: int) -> dict[str, Any]:
        return {"log": str(self._place / "tools.log"), "number": number, "steps": _STEPS}

    def _command(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "stoker.cli.main",
            *words,
            "--runs",
            str(self._place / "runs"),
        ]

    def _start(self) -> None:
        self._starts += 1
        command = self._command("run", str(_TESTING / "soak_program.py"), "--json")
        command += ["--tasks", str(self._place / "tasks.jsonl")]
        command += ["--model", f"scripted:{_TESTING / 'step_model.py'}"]
        command += ["--config", str(self._place / "stoker.toml")]
        run = self._run()
        if run is not None:
            command += ["--resume", run.path.name]
        out = (self._place / f"coordinator-{self._starts}.out").open("wb")
        err = (self._place / f"coordinator-{self._starts}.err").open("wb")
        with out, err:
            self._coordinator = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _run(self) -> RunDirectory | None:
        records = sorted((self._place / "runs").glob("run_*/run.json"))
        return RunDirectory(records[0].parent) if records else None

    def _said(self) -> str:
        return (self._place / f"coordinator-{self._starts}.err").read_text(errors="replace")

    # --- blows -------------------------------------------------------------------------------

    async def _hurt(self, seconds: float) -> None:
        end = self._clock.monotonic() + seconds
        while self._clock.monotonic() < end:
            await asyncio.sleep(self._chance.uniform(*_PAUSE_SECONDS))
            if not self._revived():
                return
            await self._strike()

    def _revived(self) -> bool:
        """Resume a coordinator that has died; ``False`` when the run has finished."""
        assert self._coordinator is not None
        status = self._coordinator.poll()
        if status is None:
            return True
        if status == 0:
            return False
        if status != -signal.SIGKILL:
            self._found.wrong.append(f"a coordinator ended with {status}: {self._said()[-400:]}")
        self._start()
        return True

    async def _strike(self) -> None:
        [role] = self._chance.choices(_ROLES, _WEIGHTS)
        stops = role != "everything" and self._chance.random() < _STOP_SHARE
        held = self._chance.uniform(*_STOP_SECONDS)
        which = self._chance.random()
        living = self._living(role)
        if not living:
            return
        hit = living if role == "everything" else [living[int(which * len(living))]]
        self._found.blows[f"{role} {'stopped' if stops else 'killed'}"] += 1
        for pid in hit:
            send(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if stops:
            self._stopped.update(hit)
            await asyncio.sleep(held)
            self._continue()
        elif role in {"coordinator", "everything"}:
            assert self._coordinator is not None
            await asyncio.to_thread(self._coordinator.wait)

    def _continue(self) -> None:
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped.clear()

    def _living(self, role: str) -> list[int]:
        """Return the processes of this run that play ``role``."""
        assert self._coordinator is not None
        mine = [self._coordinator.pid] if self._coordinator.poll() is None else []
        if role == "coordinator":
            return mine
        if role == "host":
            return processes(_MODULES["host"], f"--parent {self._coordinator.pid} ")
        if role == "everything":
            return mine + [pid for one in ("worker", "owner") for pid in self._living(one)]
        return processes(_MODULES[role], str(self._place))

    # --- the end -----------------------------------------------------------------------------

    async def _finished(self) -> bool:
        """Wait, in calm, until the run has finished; one that does not is lost."""
        end = self._clock.monotonic() + _CALM_SECONDS
        while self._revived():
            if self._clock.monotonic() > end:
                self._found.lost.append(f"the run hangs: {self._said()[-1000:]}")
                return False
            await asyncio.sleep(0.1)
        return True

    async def _end(self) -> None:
        self._continue()
        pids = self._living("everything")
        for pid in pids:
            send(pid, signal.SIGTERM)
        for _ in range(100):
            pids = self._living("everything")
            if not pids:
                break
            await asyncio.sleep(0.1)
        for pid in pids:
            send(pid, signal.SIGKILL)

    async def _check(self) -> None:
        report = msgspec.json.decode((self._place / f"coordinator-{self._starts}.out").read_bytes())
        self._found.leaked += report["snapshot"]["boxes_leaked"]
        run = self._run()
        assert run is not None, "a finished run has a record"
        lines = (self._place / "tools.log").read_text().splitlines()
        counted = Counter((key, effect) for key, _, effect in map(str.split, lines))
        self._found.effects += len(lines)
        for (key, effect), count in counted.items():
            if effect == "external" and count > 1:
                self._found.twice.append(f"external {key} happened {count} times")
        before = self._found.outcomes[OutcomeKind.COMPLETED]
        await self._check_journals(run)
        completed = self._found.outcomes[OutcomeKind.COMPLETED] - before
        sent = sum(effect == "external" for _, effect in counted)
        if sent < completed:
            self._found.lost.append(f"{completed} rollouts completed with {sent} external effects")
        command = self._command("replay", run.path.name, "--json")
        replayed = await asyncio.to_thread(_ended, command)
        if replayed.returncode:
            said = (replayed.stdout + replayed.stderr).decode(errors="replace")
            self._found.wrong.append(f"a journal does not replay: {said[-600:]}")

    async def _check_journals(self, run: RunDirectory) -> None:
        run_id = RunId(run.path.name)
        ledger = await connect(run.ledger, role="bench", idle_exit_seconds=10.0)
        try:
            listed = await ledger.rollouts(RolloutsRequest(run_id=run_id))
            if len(listed.rollouts) != _ROLLOUTS:
                self._found.lost.append(f"{len(listed.rollouts)} rollouts of {_ROLLOUTS}")
            for summary in listed.rollouts:
                request = JournalRequest(run_id=run_id, rollout_id=summary.rollout_id)
                reply = await ledger.journal(request)
                self._check_journal(str(summary.rollout_id), reply.events)
        finally:
            await ledger.close()

    def _check_journal(self, rollout: str, entries: tuple[bytes, ...]) -> None:
        events = [decode_event(entry) for entry in entries]
        finished = [event for event in events if isinstance(event, Finished)]
        if len(finished) != 1:
            self._found.lost.append(f"{rollout} has {len(finished)} outcomes")
            return
        outcome = finished[0].outcome
        self._found.outcomes[str(outcome.kind)] += 1
        delivered = Counter(event.path for event in events if isinstance(event, Delivered))
        again = [path for path, count in delivered.items() if count > 1]
        if again:
            self._found.twice.append(f"{rollout} was given {again} more than once")
        assert isinstance(events[0], Admitted), "a journal begins with its admission"
        number = events[0].task.data["number"]
        completed = outcome.kind is OutcomeKind.COMPLETED
        if completed != (outcome.reward is not None):
            self._found.wrong.append(f"{rollout}: {outcome.kind} with reward {outcome.reward}")
        if completed and outcome.reward != score(number):
            self._found.wrong.append(f"{rollout}: scored {outcome.reward}, not {score(number)}")
        lost = outcome.fault is not None and outcome.fault.code == EnvironmentLost.code
        if outcome.kind not in _OPEN and not lost:
            self._found.wrong.append(f"{rollout} ended as {outcome.kind}: {outcome.fault}")


def _ended(command: list[str]) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - our own command


def _figure(value: int, target: int | None, runs: int) -> dict[str, Any]:
    return {"value": value, "unit": "count", "target": target, "against": "", "runs": runs}
