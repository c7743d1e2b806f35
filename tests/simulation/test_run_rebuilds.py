"""Environments that are lost while their program goes on: nothing runs in a half-built life.

The coordinator's flow and router run as they are; appends are kept instead of sent.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

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
from stoker.config.tree import WorkerSettings
from stoker.coordinator.environments import GENERATIONS_MAX
from stoker.coordinator.events import EventRouter
from stoker.coordinator.flow import Flow
from stoker.coordinator.resuming import Resumer
from stoker.coordinator.rollouts import ActiveRollout
from stoker.errors import BoxFailed, EnvironmentLost
from stoker.model.action import Action, ActionState
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord
from stoker.model.ids import ActionId, CallPath, Fence, WorkerId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.tools import CheckpointRequest, OpenRequest, RunRequest
from stoker.model.value import canonical_bytes, inline_value
from stoker.rollout.arguments import BoxArguments, EnvironmentArguments
from stoker.rollout.messages import HostCall, Turn
from support.flows import Anything, Parts
from support.journals import ADMITTED

FIRST, SECOND = WorkerId("wrk_first"), WorkerId("wrk_second")
OPENING = HostCall(
    path=CallPath("0"),
    verb=Verb.ENVIRONMENT,
    digest="d",
    arguments=canonical_bytes(EnvironmentArguments(baseline="python", worker_class=None)),
)
LOST = EnvironmentLost("its worker is gone").record()


def run(path: str, *, replayable: bool = True) -> HostCall:
    arguments = BoxArguments(
        environment=OPENING.path,
        request=canonical_bytes(RunRequest(argv=("true",))),
        timeout_seconds=None,
        replayable=replayable,
    )
    return HostCall(
        path=CallPath(path), verb=Verb.RUN, digest=path, arguments=canonical_bytes(arguments)
    )


SAVED = Checkpoint(digest="c" * 64, parent="base", generation=0)


def checkpoint(path: str) -> HostCall:
    arguments = BoxArguments(
        environment=OPENING.path,
        request=canonical_bytes(CheckpointRequest()),
        timeout_seconds=None,
    )
    return HostCall(
        path=CallPath(path), verb=Verb.CHECKPOINT, digest=path, arguments=canonical_bytes(arguments)
    )


class Scene:
    """A rollout with an environment at ``FIRST`` in which ``1`` has run and ``2`` is running."""

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
        self.ended("0")
        self.turn(calls=(run("1"),))
        self.ended("1")
        self.turn(calls=(run("2"),))

    def turn(self, **parts: Any) -> None:
        self.rollout.in_turn = True
        self.flow.turned(self.rollout, Turn(rollout_id=self.rollout.rollout_id, **parts))

    def action(self, path: str) -> Action:
        """The action that was submitted as ``path``."""
        (found,) = [one for one in self.submitted if one.path == path]
        return found

    @property
    def submitted(self) -> list[Action]:
        return [action for append in self.parts.appends for action in append.submits]

    def ended(
        self,
        path: str,
        fault: FaultRecord | None = None,
        *,
        worker: WorkerId = FIRST,
        status: CompletionStatus = CompletionStatus.OK,
        result: object = None,
    ) -> ActionId:
        """The ledger tells how the action at ``path`` ended."""
        lost = fault is not None and fault.code == LOST.code
        action_id = self.action(path).action_id
        completion = Completion(
            action_id=action_id,
            fence=Fence(1),
            status=status if fault is None else CompletionStatus.ERROR,
            attempt=1,
            worker_id=worker,
            fault=fault,
            observation=None if result is None else inline_value(canonical_bytes(result)),
            environment=EnvironmentState.LOST if lost else EnvironmentState.CLEAN,
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
        return action_id

    async def journal(self, _request: JournalRequest) -> JournalReply:
        return JournalReply(
            events=tuple(event for append in self.parts.appends for event in append.events)
        )

    async def actions(self, _request: ActionsRequest) -> ActionsReply:
        return ActionsReply(
            actions=tuple(
                ActionView(
                    action=action,
                    state=ActionState.ACKNOWLEDGED
                    if action.action_id in self.parts.acknowledged
                    else ActionState.COMPLETED,
                    deliveries=1,
                    attempts=1,
                    worker_id=None,
                    completion=None,
                )
                for action in self.submitted
            )
        )

    def resumed(self) -> ActiveRollout:
        """The rollout as the next coordinator finds it."""

        async def read() -> ActiveRollout:
            ledger, clock = cast("Ledger", self), cast("Any", self.parts)
            resumer = Resumer(ledger, self.parts.artifacts, clock, WorkerSettings())
            return await resumer.revive(
                await resumer.standing(ADMITTED.run_id, ADMITTED.rollout_id)
            )

        return asyncio.run(read())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    async def made() -> Scene:
        return Scene(tmp_path)

    return asyncio.run(made())


def test_a_call_made_during_a_rebuild_waits_until_the_environment_stands(scene: Scene) -> None:
    scene.ended("2", LOST)
    scene.turn(calls=(run("3"),))
    scene.ended("0~g1", worker=SECOND)
    scene.turn(calls=(run("4"),))
    assert [one.path for one in scene.submitted] == ["0", "1", "2", "0~g1", "1~g1"]
    scene.ended("1~g1", worker=SECOND)
    for path in ("2~g1", "3~g1", "4~g1"):
        assert (scene.action(path).generation, scene.action(path).holder) == (1, SECOND)
    assert scene.rollout.actions == 5


def test_a_retry_during_a_rebuild_waits_too(scene: Scene) -> None:
    scene.turn(calls=(run("3"),))
    scene.ended("2", LOST)
    scene.ended("3", BoxFailed("no program could begin").record())
    assert "3~r1" not in [one.path for one in scene.submitted]
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", worker=SECOND)
    assert scene.action("3~g1").holder == SECOND


def test_a_step_that_ends_otherwise_than_before_does_not_rebuild_anything(scene: Scene) -> None:
    """It had ended in time and now did not: another state than the program knows would stand."""
    scene.ended("2", LOST)
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", worker=SECOND, status=CompletionStatus.TIMED_OUT)
    assert scene.parts.closed == [SECOND]
    assert "2~g1" not in [one.path for one in scene.submitted]
    scene.ended("0~g2", worker=SECOND)
    scene.ended("1~g2", worker=SECOND)
    assert scene.action("2~g2").holder == SECOND


def test_a_step_that_timed_out_before_may_do_so_again(scene: Scene) -> None:
    scene.ended("2", status=CompletionStatus.TIMED_OUT)
    scene.turn(calls=(run("3"),))
    scene.ended("3", LOST)
    for path in ("0~g1", "1~g1"):
        scene.ended(path, worker=SECOND)
    scene.ended("2~g1", worker=SECOND, status=CompletionStatus.TIMED_OUT)
    assert scene.action("3~g1").holder == SECOND


def test_nothing_runs_in_what_could_not_be_rebuilt(scene: Scene) -> None:
    scene.ended("2", LOST)
    for life in range(1, GENERATIONS_MAX):
        scene.ended(f"0~g{life}", worker=SECOND)
        scene.ended(f"1~g{life}", BoxFailed("it broke").record(), worker=SECOND)
    assert scene.parts.closed == [SECOND] * (GENERATIONS_MAX - 1)
    scene.turn(calls=(run("3"),))
    late = scene.action("3")
    assert late.holder is None
    assert late.generation == GENERATIONS_MAX


@pytest.mark.parametrize("holder", [FIRST, None])
def test_what_a_branch_has_of_its_parent_is_made_without_counting_a_retry(
    scene: Scene, holder: WorkerId | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(scene.parts.figures, "retried", counted.append, raising=False)
    scene.rollout.environments[CallPath("0")].holder = holder  # none: nobody held it for a branch
    scene.ended("2", LOST)
    assert counted == ["environment lost"] * (holder is not None)
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", BoxFailed("it broke").record(), worker=SECOND)
    assert len(counted) == 1 + (holder is not None), "a rebuild that failed is tried again"


def test_a_loss_told_after_the_rebuild_does_not_begin_another(scene: Scene) -> None:
    scene.turn(calls=(run("3"),))
    scene.ended("2", LOST)
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", worker=SECOND)
    scene.ended("3", LOST)
    assert scene.action("3~g1").holder == SECOND
    assert not [one.path for one in scene.submitted if one.path.endswith("g2")]


def test_a_retry_in_a_later_life_is_named_after_that_life(scene: Scene) -> None:
    """Else a coordinator that resumes takes an earlier action for the latest."""
    scene.ended("2", LOST)
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", worker=SECOND)
    scene.ended("2~g1", BoxFailed("no program could begin").record(), worker=SECOND)
    assert scene.action("2~g1~r1").generation == 1


@pytest.mark.parametrize("ends", ["withdrawn", "finished"])
def test_results_of_earlier_tries_leave_the_ledger_with_their_call(scene: Scene, ends: str) -> None:
    failed = scene.ended("2", BoxFailed("no program could begin").record())
    lost = scene.ended("2~r1", LOST)
    if ends == "withdrawn":
        scene.turn(withdrawn=(CallPath("2"),))
        assert {failed, lost} <= scene.parts.acknowledged
    opened = scene.ended("0~g1", worker=SECOND)
    scene.flow.finish(scene.rollout, Outcome(kind=OutcomeKind.TRUNCATED, reason="timeout"))
    assert {failed, lost, opened} <= scene.parts.acknowledged


def test_a_resumed_coordinator_sees_which_calls_waited_for_the_rebuild(scene: Scene) -> None:
    scene.ended("2", LOST)
    scene.turn(calls=(run("3"),))
    calls = scene.resumed().calls
    assert [path for path, call in calls.items() if not call.worker_class] == ["3"]


def test_a_resumed_coordinator_knows_what_was_given_up(scene: Scene) -> None:
    """It is cancelled again, and acknowledged when it ends: the first cancel may not have gone."""
    scene.turn(withdrawn=(CallPath("2"),), calls=(run("3"),))
    assert scene.resumed().given_up == [scene.action("2").action_id]


def test_a_resumed_coordinator_goes_on_with_the_latest_try_of_the_latest_life(scene: Scene) -> None:
    refused = BoxFailed("no program could begin").record()
    scene.ended("2", refused)
    scene.ended("2~r1", LOST)
    scene.ended("0~g1", worker=SECOND)
    scene.ended("1~g1", worker=SECOND)
    call = scene.resumed().calls[CallPath("2")]
    assert (call.action_id, call.retries) == (scene.action("2~g1").action_id, 1)
    scene.ended("2~g1", refused, worker=SECOND)
    call = scene.resumed().calls[CallPath("2")]
    assert (call.action_id, call.retries) == (scene.action("2~g1~r2").action_id, 2)


def test_a_resumed_coordinator_does_not_wait_for_a_rebuild_that_was_given_up(scene: Scene) -> None:
    """Its steps are acknowledged: nobody would ever be told of them again."""
    scene.ended("2", LOST)
    for life in range(1, GENERATIONS_MAX):
        scene.ended(f"0~g{life}", BoxFailed("no room").record())
    assert scene.rollout.environments[OPENING.path].lost
    environment = scene.resumed().environments[OPENING.path]
    assert environment.generation == GENERATIONS_MAX - 1
    assert not environment.restorable()


def test_what_ran_before_a_checkpoint_is_not_run_again(scene: Scene) -> None:
    scene.ended("2")
    scene.turn(calls=(run("3", replayable=False),))
    scene.ended("3")
    scene.turn(calls=(checkpoint("4"),))
    scene.ended("4", result=SAVED)
    scene.turn(calls=(run("5"),))
    scene.ended("5")
    scene.turn(calls=(run("6"),))
    scene.ended("6", LOST)
    opening = scene.action("0~g1")
    request = msgspec.msgpack.decode(scene.parts.artifacts.get(opening.input), type=OpenRequest)
    assert request.checkpoint == SAVED
    scene.ended("0~g1", worker=SECOND)
    assert "3~g1" not in [one.path for one in scene.submitted]
    scene.ended("5~g1", worker=SECOND)
    assert scene.action("6~g1").holder == SECOND
    environment = scene.resumed().environments[OPENING.path]
    assert environment.saved == SAVED
    assert [call.path for call in environment.log] == ["5"]
    assert environment.restorable()


def test_what_ran_after_a_checkpoint_and_must_not_run_again_is_lost(scene: Scene) -> None:
    scene.ended("2")
    scene.turn(calls=(checkpoint("3"),))
    scene.ended("3", result=SAVED)
    scene.turn(calls=(run("4", replayable=False),))
    scene.ended("4")
    scene.turn(calls=(run("5"),))
    scene.ended("5", LOST)
    assert "0~g1" not in [one.path for one in scene.submitted]
    assert scene.rollout.environments[OPENING.path].lost
