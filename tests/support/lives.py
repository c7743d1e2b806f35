"""The life of one rollout with a real flow, router and resumer; whom they tell is recorded.

After every step it is read back from its journal, as the next coordinator would do it: that must
find what is held here.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec

from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    ActionView,
    JournalReply,
    JournalRequest,
    Ledger,
    LedgerEvent,
    LedgerEventKind,
)
from stoker.config.tree import Settings
from stoker.coordinator.environments import GENERATIONS_MAX
from stoker.coordinator.events import EventRouter
from stoker.coordinator.flow import Flow
from stoker.coordinator.resuming import Resumer
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import BoxFailed, EnvironmentLost, WorkerLost
from stoker.model.action import Action, ActionState, Effect
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState, Timings
from stoker.model.events import (
    JournalEvent,
    Verb,
    decode_event,
)
from stoker.model.generation import GenerateArguments, Message, Role
from stoker.model.ids import ActionId, CallPath, Fence, WorkerId
from stoker.model.tools import CallRequest, CheckpointRequest, ReadRequest, RunRequest
from stoker.model.value import canonical_bytes, inline_value
from stoker.rollout.arguments import (
    BoxArguments,
    CallArguments,
    EnvironmentArguments,
    OnTimeout,
)
from stoker.rollout.messages import HostCall, Turn
from support.flows import Parts, Told
from support.journals import ADMITTED, SAMPLED

FIRST, SECOND = WorkerId("wrk_first"), WorkerId("wrk_second")
LOST = EnvironmentLost("its worker is gone").record()
GONE = WorkerLost("it is out of contact").record()
BROKE = BoxFailed("no program could begin").record()
SAVED = Checkpoint(digest="d" * 64, parent="p" * 64, generation=0)
OK, TIMED_OUT = CompletionStatus.OK, CompletionStatus.TIMED_OUT


def host_call(path: str, verb: Verb, arguments: object) -> HostCall:
    return HostCall(
        path=CallPath(path), verb=verb, digest=path, arguments=canonical_bytes(arguments)
    )


def opening(path: str) -> HostCall:
    return host_call(
        path, Verb.ENVIRONMENT, EnvironmentArguments(baseline="python", worker_class=None)
    )


def run(path: str, environment: str = "0", *, replayable: bool = True) -> HostCall:
    request = canonical_bytes(RunRequest(argv=("true",)))
    arguments = BoxArguments(
        environment=CallPath(environment),
        request=request,
        timeout_seconds=None,
        replayable=replayable,
    )
    return host_call(path, Verb.RUN, arguments)


def read(path: str) -> HostCall:
    arguments = BoxArguments(
        environment=CallPath("0"),
        request=canonical_bytes(ReadRequest(path="a")),
        timeout_seconds=None,
    )
    return host_call(path, Verb.READ, arguments)


def checkpoint(path: str) -> HostCall:
    arguments = BoxArguments(
        environment=CallPath("0"),
        request=canonical_bytes(CheckpointRequest()),
        timeout_seconds=None,
    )
    return host_call(path, Verb.CHECKPOINT, arguments)


def call(path: str, late: OnTimeout = OnTimeout()) -> HostCall:  # noqa: B008 - immutable
    arguments = CallArguments(
        request=CallRequest(argv=("true",)),
        effect=Effect.PURE,
        worker_class=None,
        timeout_seconds=None,
        on_timeout=late,
    )
    return host_call(path, Verb.CALL, arguments)


def generate(path: str) -> HostCall:
    message = Message(role=Role.USER, content=path)
    return host_call(path, Verb.GENERATE, GenerateArguments(parent=None, suffix=(message,)))


class Life:
    """One rollout, and everybody it deals with."""

    def __init__(self, folder: Path) -> None:
        self.parts = Parts(folder)
        self.flow = Flow(self.parts)  # type: ignore[arg-type]
        self.owner, self.hosts, self.lane, self.figures = Told(), Told(), Told(), Told()
        self.parts.figures = self.figures
        self.flow.owner = self.owner
        self.flow.hosts, self.flow.dispatcher = cast("Any", self.hosts), cast("Any", self.lane)
        self.router = EventRouter(self.flow)
        self.rollout = ActiveRollout(admitted=ADMITTED, seq=0)
        self.rollout.deadline = 500.0
        self.done: set[ActionId] = set()
        self.flow.admit(self.rollout)

    def turn(self, *calls: HostCall, **parts: Any) -> None:
        """The program has run until nothing could move."""
        self.rollout.in_turn = True
        withdrawn = tuple(CallPath(path) for path in parts.pop("withdrawn", ()))
        turn = Turn(rollout_id=self.rollout.rollout_id, calls=calls, withdrawn=withdrawn, **parts)
        self.flow.turned(self.rollout, turn)
        self.check()

    def ended(self, path: str, **how: Any) -> ActionId:
        """The ledger tells how the action at ``path`` ended; then the program takes its turn."""
        action_id = self.told(path, **how)
        if self.rollout.in_turn and not self.rollout.finished:
            self.turn()
        self.check()
        return action_id

    def told(self, path: str, **how: Any) -> ActionId:
        """The ledger tells how the action at ``path`` ended."""
        action = self.action(path)
        fault, status = how.pop("fault", None), how.pop("status", OK)
        lost = fault is not None and fault.code == LOST.code
        value = how.pop("value", None)
        held = action.tool == "environment.open" or action.environment_id is not None
        standing = EnvironmentState.CLEAN if held else EnvironmentState.NONE
        completion = Completion(
            action_id=action.action_id,
            fence=Fence(1),
            status=status if fault is None else CompletionStatus.ERROR,
            attempt=how.pop("attempt", 1),
            worker_id=how.pop("worker", FIRST),
            fault=fault,
            observation=None if value is None else inline_value(msgspec.msgpack.encode(value)),
            environment=EnvironmentState.LOST if lost else standing,
            timings=Timings(queue_seconds=0.25, run_seconds=0.5),
        )
        self.done.add(action.action_id)
        self.event(LedgerEventKind.COMPLETED, action.action_id, completion)
        return action.action_id

    def event(
        self, kind: LedgerEventKind, action_id: ActionId, completion: Completion | None = None
    ) -> None:
        self.router.apply(
            LedgerEvent(
                event_id=1,
                kind=kind,
                action_id=action_id,
                rollout_id=self.rollout.rollout_id,
                completion=completion,
                detail="discarded: late",
            )
        )

    def answered(self, path: str) -> None:
        """The lane has an answer to a model call."""
        value = inline_value(msgspec.msgpack.encode(SAMPLED))
        self.rollout.history.returned(CallPath(path), SAMPLED)
        self.flow.arrived(self.rollout, Result(path=CallPath(path), value=value))
        self.turn()

    # --- what there is

    @property
    def written(self) -> list[JournalEvent]:
        return [decode_event(event) for append in self.parts.appends for event in append.events]

    def of(self, kind: type[JournalEvent]) -> list[Any]:
        return [event for event in self.written if isinstance(event, kind)]

    @property
    def submitted(self) -> list[Action]:
        return [action for append in self.parts.appends for action in append.submits]

    def action(self, path: str) -> Action:
        [found] = [one for one in self.submitted if one.path == path]
        return found

    @property
    def delivered(self) -> list[str]:
        return [message.path for _, message in self.hosts.of("deliver")]

    @property
    def cancelled(self) -> set[ActionId]:
        return {action_id for (ids,) in self.owner.of("cancel") for action_id in ids}

    # --- what must hold

    def check(self) -> None:
        """Read the rollout back and compare; every append fits the one before."""
        seq = 0
        for append in self.parts.appends:
            assert append.expected_seq == seq
            seq += len(append.events)
        acknowledged = [one for append in self.parts.appends for one in append.acknowledges]
        assert len(acknowledged) == len(set(acknowledged)), "acknowledged once"
        assert set(acknowledged) <= self.done, "only what has ended"
        if not self.rollout.finished and self.rollout.current is None and not self.rebuilding:
            here, back = held(self.rollout, self.given_up), held(self.resumed(), self.given_up)
            assert back == here, {name: (back[name], here[name]) for name in here}

    @property
    def given_up(self) -> set[CallPath]:
        """Environments that nobody uses again."""
        return {
            path
            for path, one in self.rollout.environments.items()
            if one.lost or one.generation + 1 >= GENERATIONS_MAX
        }

    @property
    def rebuilding(self) -> bool:
        return any(one.restoration for one in self.rollout.environments.values())

    def resumed(self) -> ActiveRollout:
        """Return the rollout as the next coordinator finds it."""

        async def read() -> ActiveRollout:
            resumer = Resumer(
                cast("Ledger", self),
                self.parts.artifacts,
                cast("Any", self.parts),
                Settings().workers,
            )
            admitted = ADMITTED
            return await resumer.revive(
                await resumer.standing(admitted.run_id, admitted.rollout_id)
            )

        return asyncio.run(read())

    async def journal(self, _request: JournalRequest) -> JournalReply:
        return JournalReply(
            events=tuple(event for append in self.parts.appends for event in append.events)
        )

    async def actions(self, _request: ActionsRequest) -> ActionsReply:
        over = self.parts.acknowledged
        return ActionsReply(
            actions=tuple(
                ActionView(
                    action=action,
                    state=ActionState.ACKNOWLEDGED
                    if action.action_id in over
                    else ActionState.COMPLETED,
                    deliveries=1,
                    attempts=1,
                    worker_id=None,
                    completion=None,
                )
                for action in self.submitted
            )
        )


def held(rollout: ActiveRollout, given_up: set[CallPath]) -> dict[str, Any]:
    """Return what the next coordinator must know of a rollout."""
    return {
        "seq": rollout.seq,
        "tainted": rollout.tainted,
        "reissued": rollout.reissued,
        "actions": rollout.actions,
        "attempts": rollout.attempts,
        "run seconds": rollout.run_seconds,
        "queue seconds": rollout.queue_seconds,
        "routes": rollout.routes,
        "model calls": rollout.history.calls,
        "calls": {
            path: (one.verb, one.arguments, one.action_id, one.worker_class, one.generation,
                   one.spent, one.retries)
            for path, one in rollout.calls.items()
        },
        "environments": {
            path: (one.environment_id, one.generation, one.holder, one.replayable, one.saved,
                   [(step.path, step.status) for step in one.log])
            for path, one in rollout.environments.items()
            if path not in given_up
        },
    }  # fmt: skip
