"""A worker, an in-memory ledger and a coordinator's hand, all on one virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from stoker.broker.base import (
    ActionsRequest,
    ActionView,
    Append,
    AppendBatch,
    Attach,
    Cancel,
    CompleteReply,
    CompleteRequest,
    Enroll,
    Enrolled,
    EventsRequest,
    HeartbeatRequest,
    HoldReply,
    LeaseReply,
    LeaseRequest,
    LedgerEvent,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    StartRequest,
)
from stoker.broker.memory import MemoryLedger
from stoker.errors import LedgerUnavailable
from stoker.journal.artifacts import ArtifactStore
from stoker.model.action import Action
from stoker.model.completion import Completion
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.ids import ActionId, EnvironmentId, Fence, RolloutId, WorkerId
from stoker.model.tools import CallRequest, OpenRequest, RunRequest
from stoker.testing.boxes import MemoryBackend
from stoker.testing.virtual_clock import VirtualClock
from stoker.worker.boxes import Boxes, Chosen
from stoker.worker.contact import Contact
from stoker.worker.environments import Environments
from stoker.worker.executor import Executor
from stoker.worker.figures import Meters
from stoker.worker.hands import Hands
from stoker.worker.home import WorkerHome
from stoker.worker.loop import Worker
from stoker.worker.reports import Reports
from stoker.worker.states import States
from stoker.worker.tools import Tools
from support.worker_boxes import RUN, TRUSTED, DictArtifacts, make_action, quiet_log

LEASE = 10.0


class Line(MemoryLedger):
    """The memory ledger behind a line that can be cut, with a record of what was asked."""

    def __init__(self, limits: LedgerLimits, clock: VirtualClock) -> None:
        super().__init__(limits, clock)
        self.cut = False
        self.enrolled: list[Enroll] = []
        self.leases: list[LeaseRequest] = []
        self.given: list[tuple[ActionId, float]] = []
        self.alone: set[ActionId] = set()
        self.beats: list[float] = []
        self.on_start: Callable[[], Awaitable[None]] | None = None
        self.on_complete: Callable[[], None] = lambda: None
        self._time = clock

    def check(self) -> None:
        if self.cut:
            raise LedgerUnavailable("the line is cut")

    async def enroll(self, request: Enroll) -> Enrolled:
        self.check()
        self.enrolled.append(request)
        return await super().enroll(request)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.check()
        self.leases.append(request)
        reply = await super().lease(request)
        self.check()
        self.alone |= {one.action.action_id for one in reply.leases if one.alone}
        self.given += [(one.action.action_id, self._time.monotonic()) for one in reply.leases]
        return reply

    async def start(self, request: StartRequest) -> HoldReply:
        self.check()
        reply = await super().start(request)
        if self.on_start is not None:
            await self.on_start()
        self.check()
        return reply

    async def heartbeat(self, request: HeartbeatRequest) -> HoldReply:
        self.check()
        self.beats.append(self._time.monotonic())
        return await super().heartbeat(request)

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        self.check()
        self.on_complete()
        return await super().complete(request)

    async def release(self, request: ReleaseRequest) -> HoldReply:
        self.check()
        return await super().release(request)


class World:
    """Everything one test needs; ``async with`` it."""

    def __init__(
        self,
        directory: Path,
        slots: dict[str, int] | None = None,
        backend: MemoryBackend | None = None,
        ticket_classes: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.slots = slots or {"fast": 2}
        self.backend = backend or MemoryBackend()
        self.ticket_classes = ticket_classes
        self.clock = VirtualClock()
        self._after = 0
        self._seqs: dict[RolloutId, int] = {}
        self.events: list[LedgerEvent] = []

    async def __aenter__(self) -> Self:
        limits = LedgerLimits(
            lease_seconds=LEASE, grace_seconds=LEASE, ticket_classes=self.ticket_classes
        )
        self.ledger = Line(limits, self.clock)
        attached = await self.ledger.attach(Attach(run_id=RUN, incarnation="crd_test"))
        self.fence: Fence = attached.fence
        self.home = WorkerHome(self.directory, "w0")
        self.worker, self.boxes, self.environments = self._worker(self.home)
        self.task = asyncio.create_task(self.worker.run(polling=not self.ticket_classes))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ledger.cut = False
        self.worker.kill()
        await asyncio.wait_for(self.task, 60)
        await self.ledger.close()
        self.home.close()

    def _worker(self, home: WorkerHome) -> tuple[Worker, Boxes, Environments]:
        log = quiet_log()

        async def choose(policy: ExecutionPolicy) -> Chosen:
            return Chosen(self.backend, await self.backend.offer())

        boxes = Boxes(choose, log)
        environments = Environments(boxes)
        meters = Meters(self.slots, self.clock.monotonic())
        states = States(ArtifactStore(self.directory / "artifacts"), home.directory / "states")
        policies = dict.fromkeys(self.slots, TRUSTED)
        tools = Tools(boxes, environments, policies, Baseline(), states)
        executor = Executor(tools, environments, DictArtifacts())

        def hands(reports: Reports, contact: Contact) -> Hands:
            return Hands(
                reports=reports,
                executor=executor,
                environments=environments,
                contact=contact,
                meters=meters,
                clock=self.clock,
                log=log,
            )

        worker = Worker(
            ledger=self.ledger,
            home=home,
            boxes=boxes,
            make_hands=hands,
            meters=meters,
            clock=self.clock,
            log=log,
        )
        return worker, boxes, environments

    # --- the coordinator's hand ---

    async def submit(self, *actions: Action) -> None:
        """Submit actions, each in its rollout's journal."""
        for action in actions:
            seq = self._seqs.get(action.rollout_id, 0)
            self._seqs[action.rollout_id] = seq + 1
            await self.ledger.append(
                AppendBatch(
                    run_id=RUN,
                    fence=self.fence,
                    appends=(
                        Append(
                            rollout_id=action.rollout_id,
                            expected_seq=seq,
                            events=(b"e",),
                            submits=(action,),
                        ),
                    ),
                )
            )

    def program(self, *argv: str, path: str = "", **fields: Any) -> Action:
        """Return a stateless call of a program."""
        return make_action("call", CallRequest(argv=argv), path or "-".join(argv), **fields)

    def opening(self, name: str = "env_a", **fields: Any) -> Action:
        """Return the opening of an environment."""
        return make_action(
            "environment.open",
            OpenRequest(baseline=Baseline(), policy=TRUSTED),
            f"open-{name}",
            environment_id=EnvironmentId(name),
            **fields,
        )

    def running(self, *argv: str, name: str = "env_a", path: str = "", **fields: Any) -> Action:
        """Return a program to run in an environment of this worker."""
        return make_action(
            "box.run",
            RunRequest(argv=argv),
            path or f"run-{'-'.join(argv)}",
            environment_id=EnvironmentId(name),
            holder=WorkerId(self.home.worker_id),
            **fields,
        )

    async def cancel(self, *actions: Action) -> None:
        """Cancel actions."""
        await self.ledger.cancel(
            Cancel(run_id=RUN, fence=self.fence, action_ids=tuple(a.action_id for a in actions))
        )

    async def completion(self, action: Action, *, within: float = 300.0) -> Completion:
        """Wait for the terminal result of ``action``."""
        event = await self.event(
            lambda e: e.action_id == action.action_id and e.kind is LedgerEventKind.COMPLETED,
            within=within,
        )
        assert event.completion is not None
        return event.completion

    async def event(
        self, wanted: Callable[[LedgerEvent], bool], *, within: float = 300.0
    ) -> LedgerEvent:
        """Wait for an event of the ledger."""
        deadline = self.clock.monotonic() + within
        while True:
            for event in self.events:
                if wanted(event):
                    return event
            left = deadline - self.clock.monotonic()
            assert left > 0, f"nothing of that kind in {within} s; saw {self.events}"
            reply = await self.ledger.events(
                EventsRequest(run_id=RUN, fence=self.fence, after=self._after, wait_seconds=left)
            )
            self.events += reply.events
            if reply.events:
                self._after = reply.events[-1].event_id

    async def view(self, action: Action) -> ActionView:
        """Return the ledger's view of one action."""
        reply = await self.ledger.actions(ActionsRequest(action_ids=(action.action_id,)))
        return reply.actions[0]
