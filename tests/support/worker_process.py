"""Real worker processes against the real owner process, and a coordinator's hand over both."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from stoker.broker.base import (
    ActionsRequest,
    ActionView,
    Append,
    AppendBatch,
    Attach,
    Cancel,
    EventsRequest,
    LedgerEvent,
    LedgerEventKind,
    LedgerLimits,
)
from stoker.broker.client import connect
from stoker.journal.artifacts import ArtifactStore
from stoker.model.action import Action, Effect
from stoker.model.completion import Completion
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.model.ids import EnvironmentId, RolloutId, WorkerId
from stoker.model.tools import (
    CallRequest,
    CallResult,
    OpenRequest,
    RunRequest,
    RunResult,
    ScoreRequest,
    Verdict,
)
from stoker.model.tools import Tests as SolutionTests
from stoker.model.value import Value
from stoker.seams.locks import lock_is_held
from stoker.worker.figures import WorkerFigures
from support.worker_boxes import RUN, make_action, module_file

LEASE = 2.0
BOUND = 60.0
"""Generous: nothing here may depend on how fast the machine is."""

TOOLS = '''
import os, sys, time

def append(path, text="x"):
    """An effect that can be counted."""
    with open(path, "a") as file:
        file.write(f"{os.environ['STOKER_ACTION_KEY']} {os.environ['STOKER_ATTEMPT']} {text}\\n")
    return text

def slow_append(path, seconds):
    value = append(path, "begun")
    time.sleep(seconds)
    return value

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "spun"

def poison(pids):
    """Kill whoever runs us."""
    append(pids, "poison")
    import signal
    for pid in map(int, open(pids + ".workers").read().split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    time.sleep(60)

def big(megabytes):
    return "x" * (megabytes << 20)

def nan():
    return float("nan")

def unserialisable():
    return object()
'''


class Run:
    """A run directory with workers; ``async with`` it."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: dict[str, int] | None = None,
        lease: float = LEASE,
        idle_exit: float = 30.0,
        isolation: str = "process",
        ready: int = 0,
    ) -> None:
        self.directory = directory / "run"
        self.directory.mkdir()
        self.lease = lease
        self.tools = module_file(directory, TOOLS, "counting_tools.py")
        self.counted = directory / "counted.txt"
        self.policy = ExecutionPolicy(
            isolation=Isolation(isolation), trust=Trust.TRUSTED, warm=ready > 0
        )
        self.settings = self.directory / "settings.json"
        one = {"isolation": isolation, "trust": "trusted", "ready": ready, "warm": ready > 0}
        self.settings.write_bytes(
            msgspec.json.encode(
                {
                    "ledger": {"lease": lease, "idle_exit": 5.0, "durability": "process-safe"},
                    "workers": {
                        "idle_exit": idle_exit,
                        "classes": {
                            name: {**one, "slots": count}
                            for name, count in (slots or {"fast": 2}).items()
                        },
                        "environment_class": "fast",
                        "call_class": "fast",
                    },
                }
            )
        )
        self.artifacts = ArtifactStore(self.directory / "artifacts")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.events: list[LedgerEvent] = []
        self._after = 0
        self._seqs: dict[RolloutId, int] = {}

    async def __aenter__(self) -> Self:
        self.ledger = await connect(
            self.directory / "ledger",
            role="coordinator",
            limits=LedgerLimits(lease_seconds=self.lease, grace_seconds=self.lease),
            idle_exit_seconds=5.0,
        )
        attached = await self.ledger.attach(Attach(run_id=RUN, incarnation="crd_test"))
        self.fence = attached.fence
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        await self.ledger.close()

    # --- workers ---

    def start(
        self, name: str = "w0", fault: str = "", extra: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a worker process."""
        with (self.directory / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "stoker.worker.main",
                    "--run-directory", str(self.directory),
                    "--settings", str(self.settings),
                    "--name", name, *extra,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "STOKER_FAULT": fault},
            )  # fmt: skip
        self.processes.append(process)
        return process

    async def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process to end; return its status."""
        return await asyncio.wait_for(asyncio.to_thread(process.wait), BOUND)

    def figures(self, name: str = "w0") -> WorkerFigures | None:
        """Return what a worker last said of itself."""
        with suppress(FileNotFoundError):
            status = (self.directory / "workers" / name / "status.json").read_bytes()
            return msgspec.json.decode(status, type=WorkerFigures)
        return None

    async def working(self, process: subprocess.Popen[bytes], name: str = "w0") -> WorkerFigures:
        """Wait until a worker serves."""

        def serves() -> bool:
            assert process.poll() is None, (self.directory / f"{name}.out").read_text()
            now = self.figures(name)
            return now is not None and now.pid == process.pid and now.state == "working"

        await until(serves)
        figures = self.figures(name)
        assert figures is not None
        return figures

    def living(self, name: str = "w0") -> bool:
        """Return whether a worker of that name lives."""
        return lock_is_held(self.directory / "workers" / name / "lock")

    # --- actions ---

    def call(self, function: str, path: str = "", **fields: Any) -> Action:
        """Return a call of one of the counting tools."""
        arguments = fields.pop("arguments", {})
        request = CallRequest(module=str(self.tools), function=function, arguments=arguments)
        return make_action(
            "call", request, path or function, policy_digest=self.policy.digest(), **fields
        )

    def append(self, path: str = "", **fields: Any) -> Action:
        """Return a call whose effect is counted."""
        return self.call("append", path, arguments={"path": str(self.counted)}, **fields)

    def scoring(self, holder: WorkerId, tests: SolutionTests, path: str) -> Action:
        """Return the grading of the environment that ``holder`` holds."""
        return make_action(
            "score",
            ScoreRequest(tests=tests),
            path,
            environment_id=EnvironmentId("env_a"),
            holder=holder,
        )

    def program_call(self, *argv: str, path: str, **fields: Any) -> Action:
        """Return a call of a program; pure."""
        request = CallRequest(argv=argv)
        return make_action("call", request, path, effect=Effect.PURE, **fields)

    def opening(self, name: str = "env_a", **fields: Any) -> Action:
        """Return the opening of an environment."""
        return make_action(
            "environment.open",
            OpenRequest(baseline=Baseline(), policy=self.policy, files={"given": b"there\n"}),
            f"open-{name}",
            environment_id=EnvironmentId(name),
            **fields,
        )

    def running(self, holder: WorkerId, *argv: str, path: str, **fields: Any) -> Action:
        """Return a program to run in the environment that ``holder`` holds."""
        return make_action(
            "box.run",
            RunRequest(argv=argv),
            path,
            environment_id=EnvironmentId("env_a"),
            holder=holder,
            **fields,
        )

    async def submit(self, *actions: Action) -> None:
        """Submit actions, each in its rollout's journal."""
        for action in actions:
            seq = self._seqs.get(action.rollout_id, 0)
            self._seqs[action.rollout_id] = seq + 1
            one = Append(
                rollout_id=action.rollout_id, expected_seq=seq, events=(b"e",), submits=(action,)
            )
            await self.ledger.append(AppendBatch(run_id=RUN, fence=self.fence, appends=(one,)))

    async def cancel(self, *actions: Action) -> None:
        """Cancel actions."""
        ids = tuple(action.action_id for action in actions)
        await self.ledger.cancel(Cancel(run_id=RUN, fence=self.fence, action_ids=ids))

    async def completion(self, action: Action) -> Completion:
        """Wait for the terminal result of ``action``."""
        event = await self.event(
            lambda e: e.action_id == action.action_id and e.kind is LedgerEventKind.COMPLETED
        )
        assert event.completion is not None
        return event.completion

    async def event(self, wanted: Callable[[LedgerEvent], bool]) -> LedgerEvent:
        """Wait for an event of the ledger."""
        async with asyncio.timeout(BOUND):
            while True:
                for event in self.events:
                    if wanted(event):
                        return event
                request = EventsRequest(
                    run_id=RUN, fence=self.fence, after=self._after, wait_seconds=5.0
                )
                reply = await self.ledger.events(request)
                self.events += reply.events
                if reply.events:
                    self._after = reply.events[-1].event_id

    async def view(self, action: Action) -> ActionView:
        """Return the ledger's view of one action."""
        reply = await self.ledger.actions(ActionsRequest(action_ids=(action.action_id,)))
        return reply.actions[0]

    def tell_tools(self, pid: int) -> None:
        """Let the poison know whom to kill."""
        Path(f"{self.counted}.workers").write_text(str(pid), encoding="ascii")

    def count(self, action: Action | None = None) -> int:
        """Return how often the tool was seen to run (for ``action``)."""
        if not self.counted.exists():
            return 0
        lines = self.counted.read_text().splitlines()
        return sum(action is None or line.split()[0] == action.action_id for line in lines)

    def content(self, value: Value | None) -> bytes:
        """Return an observation's content."""
        assert value is not None, "no observation: look at the completion's fault"
        return self.artifacts.get(value)

    def called(self, completion: Completion) -> CallResult:
        """Return a call's result."""
        assert completion.fault is None, completion.fault
        return msgspec.msgpack.decode(self.content(completion.observation), type=CallResult)

    def verdict(self, completion: Completion) -> Verdict:
        """Return a score's verdict."""
        return msgspec.msgpack.decode(self.content(completion.observation), type=Verdict)

    def ran(self, completion: Completion) -> RunResult:
        """Return a program's result."""
        return msgspec.msgpack.decode(self.content(completion.observation), type=RunResult)


async def until(condition: Callable[[], bool], *, within: float = BOUND) -> None:
    """Wait for ``condition``."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.02)
