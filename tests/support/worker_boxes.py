"""Attempts, tools and executors over in-memory boxes, for tests of the worker room."""

import asyncio
import atexit
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from stoker.journal.artifacts import ArtifactStore
from stoker.model.action import Action, Effect
from stoker.model.completion import Completion
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.model.ids import (
    ActionId,
    CallPath,
    EnvironmentId,
    Fence,
    RolloutId,
    RunId,
    WorkerId,
    action_id,
)
from stoker.model.tools import OpenRequest, RunRequest
from stoker.model.value import INLINE_BYTES_MAX, Value, canonical_bytes, content_digest
from stoker.seams.clock import SystemClock
from stoker.testing.boxes import MemoryBackend
from stoker.worker.attempt import Attempt
from stoker.worker.boxes import Boxes, Chosen
from stoker.worker.environments import Environments
from stoker.worker.executor import Executor
from stoker.worker.states import States
from stoker.worker.tools import Tools

TRUSTED = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
RUN = RunId("run_test")
ROLLOUT = RolloutId("rol_test")
WORKER = WorkerId("wrk_test")

Record = TypeVar("Record")


def quiet_log() -> FilteringBoundLogger:
    """Return a logger that keeps nothing."""
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger("critical")
    )
    return log


def fresh_directory() -> Path:
    """Return a directory that goes with the process."""
    directory = Path(tempfile.mkdtemp(prefix="stoker-bench-"))
    atexit.register(shutil.rmtree, directory)
    return directory


class DictArtifacts:
    """An artifact store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, content: bytes) -> Value:
        digest = content_digest(content)
        if len(content) <= INLINE_BYTES_MAX:
            return Value(digest=digest, size_bytes=len(content), inline=content)
        self.kept[digest] = content
        return Value(digest=digest, size_bytes=len(content))

    def get(self, value: Value) -> bytes:
        return value.inline if value.inline is not None else self.kept[value.digest]


def make_action(tool: str, request: object, path: str = "0", **fields: Any) -> Action:
    """Return an action of the test rollout at ``path``."""
    content = request if isinstance(request, bytes) else canonical_bytes(request)
    rollout = fields.pop("rollout_id", ROLLOUT)
    return Action(
        **{
            "action_id": action_id(rollout, CallPath(path)),
            "run_id": RUN,
            "rollout_id": rollout,
            "path": CallPath(path),
            "step": 0,
            "worker_class": "fast",
            "tool": tool,
            "input": Value(digest=content_digest(content), size_bytes=len(content), inline=content),
            "timeout_seconds": 20.0,
            "deadline_seconds": 60.0,
            "effect": Effect.CONTAINED,
            **fields,
        }
    )


@dataclass
class Bench:
    """An executor over memory boxes, without a ledger."""

    backend: MemoryBackend = field(default_factory=MemoryBackend)
    policy: ExecutionPolicy = TRUSTED
    artifacts: DictArtifacts = field(default_factory=DictArtifacts)
    directory: Path = field(default_factory=fresh_directory)
    """Where checkpoints go."""

    def __post_init__(self) -> None:
        async def choose(policy: ExecutionPolicy) -> Chosen:
            return Chosen(self.backend, await self.backend.offer())

        self.boxes = Boxes(choose, quiet_log())
        self.environments = Environments(self.boxes)
        states = States(ArtifactStore(self.directory / "kept"), self.directory / "drafts")
        tools = Tools(self.boxes, self.environments, {"fast": self.policy}, Baseline(), states)
        self.executor = Executor(tools, self.environments, self.artifacts)

    async def do(
        self, action: Action, *, limit: float | None = None, trusted: bool = True
    ) -> Completion:
        """Execute ``action`` once."""
        return await self.executor.execute(
            Attempt(
                action=action,
                fence=Fence(7),
                attempt=1,
                worker_id=WORKER,
                queue_seconds=0.0,
                clock=SystemClock(),
                trusted=lambda: trusted,
                limit_seconds=action.timeout_seconds if limit is None else limit,
            )
        )

    async def open(
        self, name: str = "env_a", generation: int = 0, files: dict[str, bytes] | None = None
    ) -> Completion:
        """Open an environment."""
        request = OpenRequest(baseline=Baseline(), policy=self.policy, files=files or {})
        return await self.do(
            make_action(
                "environment.open",
                request,
                f"open-{name}-{generation}",
                environment_id=EnvironmentId(name),
                generation=generation,
            )
        )

    async def run(
        self, *argv: str, name: str = "env_a", generation: int = 0, limit: float | None = None
    ) -> Completion:
        """Run a program in an environment."""
        action = make_action(
            "box.run",
            RunRequest(argv=argv),
            f"run-{'-'.join(argv)}",
            environment_id=EnvironmentId(name),
            generation=generation,
        )
        return await self.do(action, limit=limit)

    def seen(self, completion: Completion, record: type[Record]) -> Record:
        """Return the decoded observation."""
        assert completion.observation is not None, completion
        content = self.artifacts.get(completion.observation)
        return msgspec.msgpack.decode(content, type=record)


def some_action_ids(count: int) -> list[ActionId]:
    """Return ids of distinct actions."""
    return [action_id(ROLLOUT, CallPath(str(number))) for number in range(count)]


async def settle(turns: int = 20) -> None:
    """Let everything that can move without time move."""
    for _ in range(turns):
        await asyncio.sleep(0)


def module_file(directory: Path, source: str, name: str = "tools_under_test.py") -> Path:
    """Write a Python file with tools."""
    path = directory / name
    path.write_text(source, encoding="utf-8")
    return path
