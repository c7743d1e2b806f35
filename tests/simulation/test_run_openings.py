"""Openings of environments whose rollout stopped waiting: whatever the order, somebody closes them.

The coordinator's flow and router run as they are; appends are kept instead of sent.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.broker.base import LedgerEvent, LedgerEventKind
from stoker.coordinator.events import EventRouter
from stoker.coordinator.flow import Flow
from stoker.coordinator.hosts import HISTORY_BYTES_MAX, HostPool
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import WireViolation
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.events import Admitted, Finished, Issued, Verb, decode_event
from stoker.model.ids import ActionId, CallPath, Fence, WorkerId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.value import Value, canonical_bytes
from stoker.rollout.arguments import EnvironmentArguments
from stoker.rollout.messages import HostCall, RecordedResult, RecordedTurn, Turn
from support.flows import Anything, Parts
from support.journals import ADMITTED

WORKER = WorkerId("wrk_holds")
OPENING = HostCall(
    path=CallPath("0"),
    verb=Verb.ENVIRONMENT,
    digest="d",
    arguments=canonical_bytes(EnvironmentArguments(baseline="python", worker_class=None)),
)


class Scene:
    """One rollout whose program has just asked for an environment."""

    def __init__(self, folder: Path) -> None:
        self.parts = Parts(folder)
        self.flow = Flow(self.parts)  # type: ignore[arg-type]
        self.flow.owner = self.parts
        self.flow.hosts = self.flow.dispatcher = Anything()  # type: ignore[assignment]
        self.router = EventRouter(self.flow)
        self.rollout = ActiveRollout(admitted=ADMITTED, seq=0)
        self.rollout.deadline = 60.0
        self.flow.admit(self.rollout)
        self.turn(calls=(OPENING,))
        (self.opening,) = self.rollout.routes

    def turn(self, **parts: Any) -> None:
        self.flow.turned(self.rollout, Turn(rollout_id=self.rollout.rollout_id, **parts))

    def withdrawn(self) -> None:
        """The program stops waiting; a result that is on its way meets nobody."""
        self.rollout.in_turn = True
        self.turn(withdrawn=(OPENING.path,))

    def finished(self) -> None:
        self.flow.finish(self.rollout, Outcome(kind=OutcomeKind.TRUNCATED, reason="timeout"))

    def opened(self) -> None:
        """The ledger tells that the environment stands at its worker."""
        self.completed(self.opening, EnvironmentState.CLEAN)

    def completed(self, action_id: ActionId, environment: EnvironmentState) -> None:
        completion = Completion(
            action_id=action_id,
            fence=Fence(1),
            status=CompletionStatus.OK,
            attempt=1,
            worker_id=WORKER,
            environment=environment,
        )
        self.router.apply(
            LedgerEvent(
                event_id=1,
                kind=LedgerEventKind.COMPLETED,
                action_id=action_id,
                rollout_id=self.rollout.rollout_id,
                completion=completion,
            )
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    async def made() -> Scene:
        return Scene(tmp_path)

    return asyncio.run(made())


def test_opened_after_the_program_stopped_waiting_is_closed_once(scene: Scene) -> None:
    scene.withdrawn()
    scene.opened()
    assert scene.parts.closed == [WORKER]
    assert scene.opening in scene.parts.acknowledged
    (close,) = set(scene.rollout.routes) - {scene.opening}
    scene.completed(close, EnvironmentState.NONE)
    assert close in scene.parts.acknowledged
    scene.finished()
    assert scene.parts.closed == [WORKER]


def test_opened_while_the_program_runs_and_then_withdrawn_is_closed(scene: Scene) -> None:
    scene.rollout.in_turn = True
    scene.opened()
    scene.turn(withdrawn=(OPENING.path,))
    assert scene.parts.closed == [WORKER]
    assert scene.opening in scene.parts.acknowledged


def test_opened_and_never_delivered_before_the_outcome_is_closed(scene: Scene) -> None:
    scene.rollout.in_turn = True
    scene.opened()
    scene.finished()
    assert scene.parts.closed == [WORKER]
    assert scene.opening in scene.parts.acknowledged


def test_opened_after_the_outcome_is_looked_at(scene: Scene) -> None:
    scene.finished()
    scene.opened()
    assert [rollout_id for rollout_id, _ in scene.parts.late] == [scene.rollout.rollout_id]


def test_a_result_that_is_damaged_on_the_disk_ends_its_own_rollout_only(scene: Scene) -> None:
    """Raised to the host pool it would end that host, and the next one, for ever."""
    damaged = Value(digest="f" * 64, size_bytes=40_000)
    result = Result(path=OPENING.path, value=damaged, spent=(scene.opening,))
    scene.flow.arrived(scene.rollout, result)
    assert scene.rollout.faults == ["artifact_damaged"]
    assert scene.rollout.finished
    assert scene.opening in scene.parts.acknowledged


def test_a_turn_that_cannot_be_carried_out_is_not_journalled_in_part(scene: Scene) -> None:
    """Its calls are missing: a replay would take the program for nondeterministic."""
    scene.opened()
    unknown = canonical_bytes(EnvironmentArguments(baseline="nowhere", worker_class=None))
    call = HostCall(path=CallPath("1"), verb=Verb.ENVIRONMENT, digest="e", arguments=unknown)
    scene.turn(calls=(call,))
    assert scene.rollout.finished
    journal = [decode_event(event) for append in scene.parts.appends for event in append.events]
    assert [type(event) for event in journal] == [Admitted, Issued, Finished]
    assert scene.opening in scene.parts.acknowledged
    assert scene.parts.closed == [WORKER]


def test_what_does_not_fit_a_message_ends_its_own_rollout_only(scene: Scene) -> None:
    class Hosts(Anything):
        def deliver(self, *_: object) -> None:
            raise WireViolation("a message is over the limit; it was not sent")

    scene.flow.hosts = Hosts()  # type: ignore[assignment]
    scene.opened()
    assert scene.rollout.faults == ["wire_violation"]
    assert scene.parts.closed == [WORKER]


def test_a_history_too_long_to_be_replayed_ends_its_own_rollout_only(scene: Scene) -> None:
    async def replayed() -> None:
        scene.flow.hosts = HostPool(cast("Any", Anything()).spawn, 1)
        value = b"x" * (HISTORY_BYTES_MAX // 2 + 1)
        result = RecordedResult(path=OPENING.path, value=value, fault=None, at=0.0)
        turns = (RecordedTurn(result=result, calls=()),) * 2
        scene.flow.restart_on_host(scene.rollout, turns)

    asyncio.run(replayed())
    assert scene.rollout.faults == ["wire_violation"]


def test_results_nobody_knew_are_settled_with_the_outcome(scene: Scene) -> None:
    """After a resume: a step of a rebuild that had ended before the coordinator died."""
    scene.completed(ActionId("act_step"), EnvironmentState.NONE)
    scene.completed(ActionId("act_open"), EnvironmentState.CLEAN)
    scene.finished()
    assert ActionId("act_step") in scene.parts.acknowledged
    assert [completion.action_id for _, completion in scene.parts.late] == ["act_open"]
