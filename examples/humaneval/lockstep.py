"""The baseline: the same work as a synchronous batch loop does it, measured by the same meters.

A batch of rollouts marches in step: all are sampled, all run their tools, and only when the last
tool has come back is the batch sampled again. Device, boxes, slots, waits and policy are those of
the Stoker run; it pays for no ledger and no coordinator, and nothing of it survives a crash.

*Idle while ready* counts the time in which a rollout whose tools are done could have been sampled,
the device had room, and the barrier held it.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from program import QUEUE, RUN_TESTS, code_of

from stoker.config.tree import Settings
from stoker.coordinator.lane import Lane
from stoker.coordinator.lane_figures import LaneFigures, LaneMeter, LaneState
from stoker.coordinator.request import Observer
from stoker.coordinator.view import ClassView, LaneView, RunSnapshot
from stoker.inference.open import open_model
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.generation import GenerateRequest, Generation, Message, Role, Sampling
from stoker.model.ids import RolloutId
from stoker.model.outcome import OutcomeKind
from stoker.model.tools import RunRequest, Tests
from stoker.sandbox.base import Backend, Box
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend
from stoker.seams.clock import SystemClock
from stoker.worker.process import NICENESS

_CLASSES = ("tests", "waits")
_LOOK_SECONDS = 0.25
_RUN_SECONDS = 20.0
_GRADE_SECONDS = 30.0
_TOKENS_MAX = 16_384


@dataclass
class Rollout:
    """One rollout of the batch loop."""

    task: dict[str, Any]
    box: Box
    messages: list[Message] = field(default_factory=list)
    steps: int = 0
    done: bool = False
    passed: bool = False

    def __post_init__(self) -> None:
        self.messages.append(Message(role=Role.USER, content=self.task["data"]["prompt"]))
        self.waits = iter(self.task["data"]["waits"])


async def run_lockstep(
    tasks: list[dict[str, Any]],
    *,
    settings: Settings,
    model: str,
    directory: Path,
    batch: int,
    observer: Observer,
) -> RunSnapshot:
    """Work on every task, ``batch`` at a time; return what was measured."""
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(SandboxHost.open(directory))
        loop = await _Loop.open(stack, host, settings, model)
        telling = asyncio.create_task(_tell(loop, len(tasks), observer))
        stack.callback(telling.cancel)
        for start in range(0, len(tasks), batch):
            await loop.batch(tasks[start : start + batch])
        figures, seconds = loop.lane.figures(), loop.lane.totals().seconds
        telling.cancel()
        await loop.close()
        snapshot = loop.snapshot(figures, seconds, len(tasks), leaked=host.leaked())
        observer(snapshot)
        return snapshot


class _Loop:
    """The batch loop and what it works with."""

    def __init__(self, lane: Lane, tests: Backend, waits: Backend, settings: Settings) -> None:
        self.lane = lane
        self._tests, self._waits = tests, waits
        self._settings = settings
        classes = settings.workers.classes
        self._slots = {name: asyncio.Semaphore(classes[name].slots or 1) for name in _CLASSES}
        self._baseline = Baseline(
            name="python", environment=settings.sandbox.baselines["python"].environment
        )
        self._barrier = LaneMeter(SystemClock())
        self._held = 0
        self._boxes = 0
        self.active = self.finished = self.solved = 0
        self._waiting: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self.offers: dict[str, str] = {}

    @classmethod
    async def open(
        cls, stack: AsyncExitStack, host: SandboxHost, settings: Settings, model: str
    ) -> "_Loop":
        """Choose the same backends a worker would, then start the clock."""
        backends: dict[str, Backend] = {}
        offers: dict[str, str] = {}
        for name in _CLASSES:
            backend = await choose_backend(_policy(settings, name), host)
            stack.push_async_callback(backend.close)
            offer = await backend.offer()
            rung = "" if offer.rung.value == offer.isolation.value else f" (rung {offer.rung})"
            backends[name], offers[name] = backend, f"{offer.isolation}{rung}"
        # A worker's boxes stand back where cores are short: so do these.
        os.setpriority(os.PRIO_PROCESS, host.maker().pid, NICENESS)
        opened = open_model(model, base=Path.cwd())
        stack.push_async_callback(opened.close)
        lane = Lane(opened, settings.lane, SystemClock())
        loop = cls(lane, backends["tests"], backends["waits"], settings)
        loop.offers = offers
        return loop

    async def batch(self, tasks: list[dict[str, Any]]) -> None:
        """Carry one batch from its first turn to its last grade, in step."""
        self.active = len(tasks)
        rollouts = await asyncio.gather(*(self._opened(task) for task in tasks))
        while going := [rollout for rollout in rollouts if not rollout.done]:
            turns = await asyncio.gather(*(self._sampled(rollout) for rollout in going))
            await self._to_barrier(
                self._tools(rollout, turn) for rollout, turn in zip(going, turns, strict=True)
            )
        await asyncio.gather(*(self._graded(rollout) for rollout in rollouts))
        self.active = 0

    async def close(self) -> None:
        """Wait until every box is gone."""
        await self._tests.close()
        await self._waits.close()

    async def _opened(self, task: dict[str, Any]) -> Rollout:
        async with self._action("tests"):
            box = await self._tests.create(
                _box_name(task), self._baseline, _policy(self._settings, "tests")
            )
            await box.write_files({"check.py": task["data"]["check"].encode()})
        return Rollout(task, box)

    async def _sampled(self, rollout: Rollout) -> Generation:
        request = GenerateRequest(
            request_id=f"{rollout.task['task_id']} {rollout.steps}",
            rollout_id=RolloutId(rollout.task["task_id"]),
            task_id=rollout.task["task_id"],
            step=rollout.steps,
            messages=tuple(rollout.messages),
            tools=(RUN_TESTS,),
            sampling=Sampling(tokens_max=_TOKENS_MAX),
            seed=rollout.task["seed"],
        )
        turn = await self.lane.generate(request, (rollout.steps,))
        rollout.steps += 1
        rollout.messages.append(
            Message(role=Role.ASSISTANT, content=turn.text, tool_calls=turn.tool_calls)
        )
        return turn

    async def _tools(self, rollout: Rollout, turn: Generation) -> None:
        """Do what the turn asks for; a turn without tool calls is the answer."""
        for call in turn.tool_calls:
            argv = ("sh", "-c", "cat > solution.py && exec python check.py")
            request = RunRequest(argv=argv, stdin=call.arguments["code"].encode())
            async with self._action("tests"):
                ran = await rollout.box.run(request, timeout_seconds=_RUN_SECONDS)
            await self._queue(rollout)
            said = Message(role=Role.TOOL, content=ran.result.text, tool_call_id=call.call_id)
            rollout.messages.append(said)
        if not turn.tool_calls:
            rollout.done = True
            async with self._action("tests"):
                await rollout.box.write_files({"solution.py": code_of(turn.text).encode()})

    async def _queue(self, rollout: Rollout) -> None:
        seconds = next(rollout.waits, 0.0)
        async with self._action("waits"):
            name = f"{_box_name(rollout.task)}-queue{rollout.steps}"
            box = await self._waits.create(name, self._baseline, _policy(self._settings, "waits"))
            argv = ("sh", "-c", QUEUE, "queue", rollout.task["data"]["counter"], f"{seconds:g}")
            request = RunRequest(argv=argv, environment={"STOKER_ACTION_KEY": name})
            await box.run(request, timeout_seconds=60.0)
            await box.destroy()

    async def _graded(self, rollout: Rollout) -> None:
        data = rollout.task["data"]
        async with self._action("tests"):
            copied = await rollout.box.export((".",), bytes_max=1 << 24)
            verdict, _ = await self._tests.judge(
                _box_name(rollout.task) + "-grade",
                copied.files,
                Tests(source=data["tests"], entry_point=data["entry_point"]),
                policy=_policy(self._settings, "tests"),
                timeout_seconds=_GRADE_SECONDS,
            )
            await rollout.box.destroy()
        rollout.passed = verdict.passed
        self.finished += 1
        self.solved += verdict.passed

    @asynccontextmanager
    async def _action(self, worker_class: str) -> AsyncIterator[None]:
        """Hold one of the class's slots, as an action on a worker does."""
        self._waiting[worker_class] += 1
        async with self._slots[worker_class]:
            self._waiting[worker_class] -= 1
            self._busy[worker_class] += 1
            yield
        self._busy[worker_class] -= 1
        self._done[worker_class] += 1

    # --- the barrier ---------------------------------------------------------------------------

    async def _to_barrier(self, works: Iterable[Awaitable[None]]) -> None:
        """Wait for all; whoever is back early and wants to be sampled again is held meanwhile."""
        await asyncio.gather(*(self._then_held(work) for work in works))
        self._charge(held=0)

    async def _then_held(self, work: Awaitable[None]) -> None:
        await work
        self._charge(held=self._held + 1)

    def _charge(self, *, held: int) -> None:
        room = self.lane.room()
        waits = self._held > 0 and room > 0
        window = self.lane.info.replicas[0].window
        state = LaneState(running=0, window=window, room=room, idle=waits, paused=False)
        self._barrier.charge(state)
        self._held = held

    # --- what it looks like from outside -------------------------------------------------------

    def snapshot(
        self, lane: LaneFigures, seconds: float, total: int, *, leaked: int
    ) -> RunSnapshot:
        """Return the pass, now, in the form a run has."""
        self._charge(held=self._held)
        held_seconds = self._barrier.totals([], []).idle_while_ready_seconds
        return RunSnapshot(
            run_id="lock-step",
            run_directory="",
            state="finished" if self.finished == total else "running",
            seconds=seconds,
            tasks_total=total,
            rollouts_total=total,
            rollouts_active=self.active,
            admission_target=total,
            outcomes={OutcomeKind.COMPLETED: self.finished} if self.finished else {},
            reward_mean=self.solved / self.finished if self.finished else None,
            lane=LaneView(
                model=lane.model,
                simulated=lane.simulated,
                replicas=lane.replicas,
                window=lane.window,
                running=lane.running,
                ready=self._held,
                active_share=lane.active_share,
                throughput_share=lane.throughput_share,
                occupancy=lane.occupancy,
                idle_while_ready_share=lane.idle_while_ready_share + held_seconds / (seconds or 1),
                calls=lane.calls,
                tokens=lane.tokens,
                retries=lane.retries,
            ),
            classes={name: self._class(name) for name in sorted(self._slots)},
            latency_ms_p50=None,
            latency_ms_p99=None,
            actions=self._done.total(),
            retries=0,
            faults={},
            boxes_alive=0,
            boxes_leaked=leaked,
            isolation=self.offers,
            accept_shared_kernel=self._settings.sandbox.accept_shared_kernel,
        )

    def _class(self, name: str) -> ClassView:
        slots = self._settings.workers.classes[name].slots or 1
        return ClassView(
            queued=self._waiting[name],
            running=self._busy[name],
            slots=slots,
            oldest_queued_seconds=0.0,
            finished=self._done[name],
            busy_share=self._busy[name] / slots,
        )


async def _tell(loop: _Loop, total: int, observer: Observer) -> None:
    while True:
        observer(loop.snapshot(loop.lane.figures(), loop.lane.totals().seconds, total, leaked=0))
        await asyncio.sleep(_LOOK_SECONDS)


def _policy(settings: Settings, name: str) -> ExecutionPolicy:
    shared = settings.sandbox.accept_shared_kernel
    return settings.workers.classes[name].policy(accept_shared_kernel=shared)


def _box_name(task: dict[str, Any]) -> str:
    return f"box_{task['task_id'].replace('/', '-')}"
