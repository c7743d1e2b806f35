"""The tools a worker carries out, by ``Action.tool``: each is one short method.

They turn a request record into a result record and say what became of the environment. What a
program did is data (``RunResult``); what could not be carried out is raised, and becomes a typed
fault one level up. Nothing here runs a tool's code in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from stoker.errors import BoxFailed, ToolRefused, WorkerLost
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import CompletionStatus, EnvironmentState, Usage
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.tools import (
    CallRequest,
    CheckpointRequest,
    ExportRequest,
    OpenRequest,
    OpenResult,
    ReadRequest,
    RunRequest,
    RunResult,
    ScoreRequest,
    WriteRequest,
)
from stoker.sandbox.base import Box, BoxRun

from . import calls
from .attempt import Attempt, Done
from .boxes import Boxes
from .callrunner import BYTES_MAX as CALL_RESULT_BYTES_MAX
from .environments import Environments, HeldEnvironment
from .observation import decode
from .states import States

RUN_GRACE_SECONDS = 15.0
"""How much longer than its timeout a box may take to come back before it counts as broken."""
TRANSFER_BYTES_MAX = 64 * 1024 * 1024
"""Most bytes read or exported in one action."""

Tool = Callable[[Attempt, bytes], Awaitable[Done]]


class Tools:
    """Everything ``Action.tool`` can name."""

    def __init__(
        self,
        boxes: Boxes,
        environments: Environments,
        policies: Mapping[str, ExecutionPolicy],
        call_baseline: Baseline,
        states: States,
    ) -> None:
        self._boxes = boxes
        self._environments = environments
        self._policies = policies
        self._call_baseline = call_baseline
        self._states = states
        self._tools: dict[str, Tool] = {
            "environment.open": self._open,
            "environment.close": self._close,
            "box.run": self._run,
            "box.write_files": self._write_files,
            "box.read_file": self._read_file,
            "box.export": self._export,
            "box.checkpoint": self._checkpoint,
            "score": self._score,
            "call": self._call,
        }

    async def carry_out(self, attempt: Attempt, content: bytes) -> Done:
        """Carry out one action.

        **Cancellation:** its processes are dead when this returns; files of an environment stay,
        and it is marked as interrupted.

        Raises:
            ToolRefused: the request cannot be carried out as written.
            Infrastructure: box, backend or environment failed.
            TimeoutError: its time was up while no program ran.
        """
        tool = self._tools.get(attempt.action.tool)
        if tool is None:
            raise ToolRefused(
                f"action {attempt.action.action_id} asks for the tool {attempt.action.tool!r}; "
                f"this worker has {sorted(self._tools)}; not run"
            )
        return await tool(attempt, content)

    async def _open(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, OpenRequest, "environment.open")
        action = attempt.action
        if action.environment_id is None:
            raise ToolRefused(f"action {action.action_id} opens an environment without an id")
        self._environments.drop(action.environment_id)
        saved = request.checkpoint
        begins = None if saved is msgspec.UNSET else await self._states.found(saved)
        box = await self._made(attempt, request.baseline, request.policy, begins)
        try:
            async with asyncio.timeout(max(0.0, attempt.left_seconds)):
                if request.files:
                    await box.write_files(request.files)
        except BaseException:
            self._boxes.discard(box)
            raise
        attempt.ran()
        held = HeldEnvironment(action.environment_id, action.generation, box, attempt.fence)
        held.interrupted = begins is not None and begins.interrupted
        self._environments.hold(held)
        offer = (await self._boxes.backend(request.policy)).offer
        return Done(
            result=OpenResult(
                isolation=offer.isolation.value,
                rung=offer.rung.value,
                baseline_digest=box.baseline.digest,
            ),
            environment=EnvironmentState.CLEAN,
        )

    async def _close(self, attempt: Attempt, _content: bytes) -> Done:
        action = attempt.action
        if action.environment_id is not None:
            self._environments.drop(action.environment_id, up_to=action.generation)
        return Done()

    async def _run(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, RunRequest, "box.run")
        held = self._held(attempt)
        attempt.booted()
        told = held.interrupted
        async with self._using(held):
            ran = await self._in_box(held.box, request, attempt)
        if ran.box_lost:
            self._environments.drop(held.environment_id)
        held.interrupted = told or ran.result.timed_out or ran.result.limit is not None
        return Done(
            status=_status(ran.result),
            result=msgspec.structs.replace(ran.result, interrupted_before=told),
            environment=_state(ran),
            usage=ran.usage,
        )

    async def _write_files(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, WriteRequest, "box.write_files")
        held = self._held(attempt)
        attempt.booted()
        async with self._transferring(held, attempt):
            await held.box.write_files(request.files)
        return Done(environment=EnvironmentState.CLEAN)

    async def _read_file(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, ReadRequest, "box.read_file")
        held = self._held(attempt)
        attempt.booted()
        bytes_max = min(max(request.bytes_max, 0), TRANSFER_BYTES_MAX)
        async with self._transferring(held, attempt):
            read = await held.box.read_file(request.path, bytes_max=bytes_max)
        return Done(result=read, environment=EnvironmentState.CLEAN)

    async def _export(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, ExportRequest, "box.export")
        held = self._held(attempt)
        attempt.booted()
        bytes_max = min(max(request.bytes_max, 0), TRANSFER_BYTES_MAX)
        async with self._transferring(held, attempt):
            exported = await held.box.export(request.paths, bytes_max=bytes_max)
        return Done(result=exported, environment=EnvironmentState.CLEAN)

    async def _checkpoint(self, attempt: Attempt, content: bytes) -> Done:
        decode(content, CheckpointRequest, "box.checkpoint")
        held = self._held(attempt)
        attempt.booted()
        async with self._transferring(held, attempt):
            kept = await self._states.keep(held.box)
        saved = msgspec.structs.replace(kept, interrupted=held.interrupted)
        return Done(result=saved, environment=EnvironmentState.CLEAN)

    async def _score(self, attempt: Attempt, content: bytes) -> Done:
        """Grade a copy: the environment itself is only read, whatever the solution does."""
        request = decode(content, ScoreRequest, "score")
        held = self._held(attempt)
        async with self._transferring(held, attempt):
            copied = await held.box.export((".",), bytes_max=TRANSFER_BYTES_MAX)
        attempt.booted()
        left = attempt.left_seconds
        if left <= 0:
            raise TimeoutError
        async with asyncio.timeout(left + RUN_GRACE_SECONDS):
            verdict, usage = await self._boxes.judge(
                copied.files, request.tests, policy=held.box.policy, timeout_seconds=left
            )
        attempt.ran()
        return Done(result=verdict, environment=EnvironmentState.CLEAN, usage=usage)

    async def _call(self, attempt: Attempt, content: bytes) -> Done:
        request = decode(content, CallRequest, "call")
        policy = self._policy(attempt)
        isolation = (await self._boxes.backend(policy)).offer.isolation
        plan = calls.plan(
            request, attempt.action, attempt.attempt, policy=policy, isolation=isolation
        )
        box = await self._made(attempt, self._call_baseline, plan.policy)
        try:
            if plan.files:
                await box.write_files(plan.files)
            ran = await self._in_box(box, plan.run, attempt)
            if ran.box_lost:
                raise BoxFailed(
                    f"box {box.box_id} was lost while {plan.run.argv[0]!r} ran; it may have run in "
                    "part",
                    box=box.box_id,
                )
            answer = None
            if request.function is not None and _status(ran.result) is CompletionStatus.OK:
                answer = await box.read_file(calls.ANSWER, bytes_max=CALL_RESULT_BYTES_MAX)
        finally:
            self._boxes.discard(box)
        result = calls.result(request, ran.result, answer)
        return Done(
            status=_status(ran.result),
            result=result,
            usage=ran.usage,
            throttled_seconds=result.throttled_seconds,
        )

    def _policy(self, attempt: Attempt) -> ExecutionPolicy:
        """Return the policy of the action's class, which must be the one it was issued under."""
        action = attempt.action
        policy = self._policies.get(action.worker_class)
        if policy is None:
            raise ToolRefused(f"this worker has no class {action.worker_class!r}; not run")
        if action.policy_digest not in ("", policy.digest()):
            raise ToolRefused(
                f"action {action.action_id} was issued under execution policy "
                f"{action.policy_digest}, but class {action.worker_class!r} of this worker has "
                f"{policy.digest()}; not run; start the worker with the run's settings"
            )
        return policy

    def _held(self, attempt: Attempt) -> HeldEnvironment:
        action = attempt.action
        return self._environments.get(action.environment_id, action.generation)

    async def _made(
        self,
        attempt: Attempt,
        baseline: Baseline,
        policy: ExecutionPolicy,
        begins: Checkpoint | None = None,
    ) -> Box:
        try:
            async with asyncio.timeout(max(0.0, attempt.left_seconds)):
                box = await self._boxes.create(
                    baseline, policy, begins, worker_class=attempt.action.worker_class
                )
        except TimeoutError as error:
            raise BoxFailed(
                f"the box of action {attempt.action.action_id} did not stand within the "
                f"{attempt.limit_seconds:g} s that the action may take; nothing was run",
                action=attempt.action.action_id,
            ) from error
        attempt.booted()
        return box

    async def _in_box(self, box: Box, request: RunRequest, attempt: Attempt) -> BoxRun:
        """Run a program for what is left of the attempt; a box that never comes back is broken."""
        left = attempt.left_seconds
        if left <= 0:
            return BoxRun(result=RunResult(timed_out=True), usage=Usage())
        if not attempt.trusted():
            # Stopped or cut off while the box was made: somebody else may have the work by now.
            raise WorkerLost(
                f"worker {attempt.worker_id} was out of contact before action "
                f"{attempt.action.action_id} began; nothing was run",
                action=attempt.action.action_id,
            )
        attempt.effect_began = True
        try:
            async with asyncio.timeout(left + RUN_GRACE_SECONDS):
                ran = await box.run(request, timeout_seconds=left)
        except TimeoutError as error:
            raise BoxFailed(
                f"box {box.box_id} did not come back {RUN_GRACE_SECONDS:g} s after its timeout; "
                "it is being removed",
                box=box.box_id,
            ) from error
        attempt.ran()
        return ran

    @asynccontextmanager
    async def _using(self, held: HeldEnvironment) -> AsyncIterator[None]:
        """Mark the environment when its action is cut short; give it up when its box broke."""
        try:
            yield
        except asyncio.CancelledError:
            held.interrupted = True
            raise
        except BoxFailed:
            self._environments.drop(held.environment_id)
            raise

    @asynccontextmanager
    async def _transferring(self, held: HeldEnvironment, attempt: Attempt) -> AsyncIterator[None]:
        async with self._using(held):
            try:
                async with asyncio.timeout(max(0.0, attempt.left_seconds)):
                    yield
            except TimeoutError:
                held.interrupted = True
                raise
        attempt.ran()


def _status(result: RunResult) -> CompletionStatus:
    if result.timed_out:
        return CompletionStatus.TIMED_OUT
    return CompletionStatus.OK if result.limit is None else CompletionStatus.LIMIT


def _state(ran: BoxRun) -> EnvironmentState:
    if ran.box_lost:
        return EnvironmentState.LOST
    if ran.result.timed_out or ran.result.limit is not None:
        return EnvironmentState.INTERRUPTED
    return EnvironmentState.CLEAN
