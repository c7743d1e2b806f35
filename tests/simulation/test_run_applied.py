"""What a coordinator makes of turns and results: journalled, submitted, acknowledged, let go.

The flow and the router run as they are (``support.lives``). After every step the rollout is read
back from its journal, as the next coordinator would: it must find what is held here.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stoker.broker.base import LedgerEventKind
from stoker.coordinator.environments import GENERATIONS_MAX
from stoker.coordinator.rollouts import Result
from stoker.errors import ToolRefused
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.events import (
    Admitted,
    Delivered,
    Dropped,
    Finished,
    Issued,
    Late,
    Recovered,
    Reissued,
    Restored,
    Tainted,
    Withdrawn,
)
from stoker.model.ids import CallPath, Fence
from stoker.model.ids import action_id as make_id
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.tools import OpenRequest
from stoker.rollout.arguments import OnTimeout
from stoker.rollout.messages import ProgramOutcome, RecordedTurn, Turn
from support.flows import Told
from support.lives import (
    BROKE,
    FIRST,
    GONE,
    LOST,
    OK,
    SAVED,
    SECOND,
    TIMED_OUT,
    Life,
    call,
    checkpoint,
    generate,
    opening,
    read,
    run,
)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    async def made() -> Life:
        return Life(tmp_path)

    return asyncio.run(made())


def test_a_rollout_is_read_back_as_it_was_after_each_step(life: Life) -> None:
    life.turn(opening("0"), generate("1"), call("2"), opening("3"))
    life.answered("1")
    life.ended("0")
    life.turn(run("4"), run("5", replayable=False), read("6"))
    life.ended("4", attempt=2, status=TIMED_OUT)
    life.ended("6", worker=SECOND)
    life.ended("2", fault=GONE, attempt=0)
    life.ended("2~r1", fault=GONE, attempt=0)
    life.ended("3", fault=BROKE)
    life.ended("2~r2")
    life.ended("5")
    life.ended("3~r1", worker=SECOND)
    life.turn(run("7", "3"), generate("8"), call("9"), tainted=LOST)
    life.turn(withdrawn=("9",), recovered=(LOST.code,))
    life.ended("7", fault=GONE, attempt=0)
    life.turn(recovered=("never met",))
    life.flow.relaunch(life.rollout, [(life.rollout.calls[CallPath("8")], 0.0)])
    life.check()
    back = life.resumed()
    assert (back.resumed, back.tokens, back.policy_versions) == (1, 3, {4})
    assert (life.rollout.queue_seconds, life.rollout.run_seconds) == (1.5, 3.0)
    assert life.rollout.environments[CallPath("0")].replayable is False
    assert [event.code for event in life.of(Recovered)] == [LOST.code]
    assert [event.path for event in life.of(Reissued)] == ["8"]


def test_a_rollout_is_read_back_after_its_environment_was_rebuilt(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"))
    life.ended("1")
    lost = life.told("2", fault=LOST)
    for path in ("0~g1", "1~g1"):
        assert life.rollout.environments[CallPath("0")].holder != FIRST, "nobody holds it yet"
        life.told(path, worker=SECOND)
    life.check()
    [restored] = life.of(Restored)
    assert (restored.generation, restored.worker_id) == (1, SECOND)
    life.ended("2~g1", worker=SECOND)
    assert lost in life.parts.acknowledged
    life.turn(run("3"))
    assert (life.action("3").holder, life.action("3").generation) == (SECOND, 1)


def test_what_had_ended_in_a_lost_box_is_rebuilt_though_its_program_does_not_know(
    life: Life,
) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"), run("3"))
    life.told("1")  # in the program now
    life.told("2")  # waits
    life.told("3", fault=LOST)
    for path in ("0~g1", "1~g1", "2~g1"):
        life.told(path, worker=SECOND)
    assert life.action("3~g1").holder == SECOND
    life.turn()
    life.turn()
    assert [step.path for step in life.rollout.environments[CallPath("0")].log] == ["1", "2"]


def test_what_ended_and_must_not_run_again_bars_a_rebuild_though_its_program_does_not_know(
    life: Life,
) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1", replayable=False), run("2"))
    life.told("1")
    life.told("2", fault=LOST)
    assert life.rollout.environments[CallPath("0")].lost
    life.turn()
    life.turn()
    assert [event.fault and event.fault.code for event in life.of(Delivered)] == [
        None,
        None,
        LOST.code,
    ]


def test_a_rebuild_begins_at_a_checkpoint_its_program_does_not_know_yet(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1", replayable=False), checkpoint("2"), run("3"), run("4"))
    life.told("1")
    life.told("2", value=SAVED)
    life.told("3")
    life.told("4", fault=LOST)
    opened = life.action("0~g1").input
    request = msgspec.msgpack.decode(life.parts.artifacts.get(opened), type=OpenRequest)
    assert request.checkpoint == SAVED
    life.told("0~g1", worker=SECOND)
    life.told("3~g1", worker=SECOND)
    assert life.action("4~g1").holder == SECOND
    for _ in range(3):
        life.turn()
    environment = life.rollout.environments[CallPath("0")]
    assert [step.path for step in environment.log] == ["3"]
    assert (environment.saved, environment.replayable) == (SAVED, True)


def test_results_wait_for_the_turn_and_are_delivered_one_by_one(life: Life) -> None:
    life.turn(call("0"), call("1"), call("2"))
    first = life.told("0")
    life.told("0")  # told again: it is in the program now
    second = life.told("1")
    life.told("1")  # and again: it waits
    life.told("2")
    assert life.delivered == ["0"]
    assert life.parts.acknowledged == set()
    life.turn()
    assert life.delivered == ["0", "1"]
    assert life.parts.acknowledged == {first}
    life.flow.restart_on_host(life.rollout, ())
    assert life.hosts.of("place")[-1] == (life.rollout, ())
    life.turn()
    assert life.delivered == ["0", "1", "1"], "its host was lost with it: it comes first again"
    life.turn()
    life.turn()
    assert life.delivered == ["0", "1", "1", "2"]
    assert second in life.parts.acknowledged
    assert [event.path for event in life.of(Delivered)] == ["0", "1", "2"]


def test_the_end_of_a_replay_is_no_turn_and_what_came_meanwhile_is_delivered(life: Life) -> None:
    life.turn(call("0"))
    before = len(life.written)
    history = (RecordedTurn(result=None, calls=()),)
    life.flow.resume(life.rollout, history)
    assert life.hosts.of("place")[-1] == (life.rollout, history)
    assert (life.rollout.in_turn, life.rollout.replaying) == (True, True)
    life.told("0")
    assert life.delivered == []
    life.flow.turned(life.rollout, Turn(rollout_id=life.rollout.rollout_id))
    assert (life.delivered, len(life.written)) == (["0"], before)
    life.flow.turned(life.rollout, Turn(rollout_id=life.rollout.rollout_id))
    assert [type(event) for event in life.written[before:]] == [Delivered]
    stray = Turn(rollout_id=life.rollout.rollout_id, calls=(call("9"),))
    life.flow.turned(life.rollout, stray)
    assert len(life.written) == before + 1, "a turn that nobody waits for is none"
    life.rollout.in_turn = True
    life.flow.finish(life.rollout, Outcome(kind=OutcomeKind.TRUNCATED, reason="timeout"))
    life.flow.turned(life.rollout, stray)
    assert isinstance(life.written[-1], Finished), "nothing follows an outcome"


@pytest.mark.parametrize("asked", ["calls", "outcome"])
def test_what_a_replay_ends_with_beyond_its_history_is_journalled(life: Life, asked: str) -> None:
    life.flow.resume(life.rollout, (RecordedTurn(result=None, calls=()),))
    more: dict[str, Any] = (
        {"calls": (call("0"),)} if asked == "calls" else {"outcome": ProgramOutcome(reward=1.0)}
    )
    life.flow.turned(life.rollout, Turn(rollout_id=life.rollout.rollout_id, **more))
    kinds = [type(event) for event in life.written]
    assert kinds == [Admitted, Issued if asked == "calls" else Finished]


def test_calls_are_begun_where_they_belong_and_once(life: Life) -> None:
    life.turn(generate("0"), call("1"))
    assert [one.path for _, one in life.lane.of("start")] == ["0"]
    assert [one.path for one in life.submitted] == ["1"]
    life.turn(call("2"), withdrawn=("1", "2"))
    assert [type(event) for event in life.written[3:]] == [Issued, Withdrawn, Withdrawn]
    assert life.cancelled == {life.action("1").action_id}, "the other one never began"
    assert [one.path for (one,) in life.lane.of("withdraw")] == ["1", "2"]
    late = life.ended("1")
    [dropped] = life.of(Dropped)
    assert (dropped.path, dropped.action_id) == ("1", late)
    assert late in life.parts.acknowledged
    life.flow.relaunch(life.rollout, [(life.rollout.calls[CallPath("0")], 3.0)])
    assert [(one.path, *waited) for _, one, *waited in life.lane.of("start")[1:]] == [("0", 3.0)]


def test_thinking_is_from_an_answer_to_the_next_model_call(life: Life) -> None:
    life.turn(generate("0"))
    life.parts.seconds = 7.0
    life.answered("0")
    life.parts.seconds = 9.5
    life.turn(generate("1"))
    life.turn(generate("2"))
    assert life.figures.of("thought") == [(2.5,)]


@pytest.mark.parametrize(("fault", "bars"), [(GONE, True), (ToolRefused("no").record(), False)])
def test_only_our_own_faults_are_told_to_bar_a_reward(
    life: Life,
    fault: Any,
    bars: bool,  # noqa: FBT001 - by name
) -> None:
    life.turn(generate("0"))
    life.flow.arrived(life.rollout, Result(path=CallPath("0"), fault=fault))
    life.turn()
    assert [event.fault for event in life.of(Tainted)] == [fault] * bars
    assert life.rollout.faults == [fault.code]
    life.turn(outcome=ProgramOutcome(reward=1.0))
    [(_, outcome)] = life.owner.of("finished")
    assert (outcome.kind is OutcomeKind.COMPLETED) != bars


def test_an_outcome_lets_go_of_everything(life: Life) -> None:
    life.rollout.timeout = cast("Any", Told())
    life.turn(opening("0"), opening("1"))
    life.ended("0")
    life.ended("1", worker=SECOND)
    life.turn(run("2"), call("3"), generate("4"), run("5", "1"), call("6"))
    first = life.told("3")  # in the program
    second = life.told("2")  # waits
    life.told("5", fault=LOST)  # its environment is being rebuilt
    life.turn(outcome=ProgramOutcome(reward=1.0))
    assert life.parts.appends[-1].finished
    [finished] = life.of(Finished)
    assert finished.outcome.kind is OutcomeKind.COMPLETED
    assert [outcome.kind for _, outcome in life.owner.of("finished")] == [OutcomeKind.COMPLETED]
    assert {first, second, life.action("5").action_id} <= life.parts.acknowledged
    assert life.cancelled >= {life.action("1~g1").action_id}, "steps of a rebuild are ended too"
    assert {one.path for (one,) in life.lane.of("withdraw")} == {"2", "4", "5", "6"}
    assert life.hosts.of("evict") == [(life.rollout,)]
    assert life.rollout.timeout.told == [("cancel", ())]  # type: ignore[union-attr]
    assert life.parts.closed == [FIRST], "the other one is nobody's now"
    rebuilt = life.told("1~g1", worker=SECOND)
    [(_, completion)] = life.owner.of("opened_late")
    life.flow.acknowledge_finished(life.rollout.rollout_id, completion, opened=life.action("1~g1"))
    assert rebuilt in life.parts.acknowledged
    assert life.parts.closed == [FIRST, SECOND]
    late = life.told("6")
    assert late in life.cancelled
    assert life.parts.appends[-1].acknowledges == (late,), "what comes later is settled"


def test_a_rollout_without_outstanding_actions_cancels_nothing(life: Life) -> None:
    life.turn(outcome=ProgramOutcome(reward=1.0))
    assert life.owner.of("cancel") == []


def test_an_abandoned_rollout_is_journalled_and_not_told_as_an_end(life: Life) -> None:
    life.turn(call("0"))
    life.flow.abandon(life.rollout, Outcome(kind=OutcomeKind.CANCELLED, reason="restarted"))
    assert len(life.of(Finished)) == 1
    assert life.cancelled == {life.action("0").action_id}
    assert life.owner.of("finished") == []


def test_what_the_ledger_tells_in_passing_is_recorded_and_nothing_more(life: Life) -> None:
    life.turn(call("0"))
    action_id = life.action("0").action_id
    late = Completion(action_id=action_id, fence=Fence(1), status=OK)
    life.event(LedgerEventKind.LATE, action_id, late)
    [event] = life.of(Late)
    assert (event.action_id, event.status, event.disposition) == (action_id, OK, "discarded: late")
    assert life.figures.of("late") == [()]
    resumed = life.resumed()
    assert resumed.late == [event]
    life.flow.active[life.rollout.rollout_id] = resumed
    life.event(LedgerEventKind.LATE, action_id, late)
    assert (life.of(Late), life.figures.of("late")) == ([event], [()]), "told again after a resume"
    life.event(LedgerEventKind.LATE, action_id, late)
    assert life.of(Late) == [event, event], "another one, which is alike"
    life.flow.active[life.rollout.rollout_id] = life.rollout
    before = len(life.parts.appends)
    life.event(LedgerEventKind.REQUEUED, action_id)
    assert life.figures.of("retried") == [("discarded: late",)]
    life.event(LedgerEventKind.RECLAIMED, action_id)
    assert (len(life.parts.appends), life.delivered) == (before, [])
    assert len(life.figures.of("retried")) == 1


@pytest.mark.parametrize(
    ("late", "attempt", "becomes"),
    [
        (OnTimeout(kind="truncate"), 1, "truncated"),
        (OnTimeout(kind="observe"), 1, "delivered"),
        (OnTimeout(kind="retry", times=1), 1, "retried"),
        (OnTimeout(kind="truncate"), 0, "retried"),
    ],
)
def test_a_timeout_becomes_what_the_program_said(
    life: Life, late: OnTimeout, attempt: int, becomes: str
) -> None:
    life.turn(call("0", late))
    spent = life.told("0", status=TIMED_OUT, attempt=attempt)
    outcomes = [outcome.reason for _, outcome in life.owner.of("finished")]
    assert outcomes == ["tool timeout"] * (becomes == "truncated")
    assert life.delivered == ["0"] * (becomes == "delivered")
    assert ("0~r1" in [one.path for one in life.submitted]) == (becomes == "retried")
    assert (spent in life.parts.acknowledged) == (becomes == "truncated")


def test_a_limit_or_an_error_is_never_taken_for_a_timeout(life: Life) -> None:
    life.turn(call("0", OnTimeout(kind="truncate")), call("1", OnTimeout(kind="truncate")))
    life.told("0", status=CompletionStatus.LIMIT)
    life.turn()
    life.told("1", fault=ToolRefused("no").record())
    assert life.delivered == ["0", "1"]
    assert not life.rollout.finished


def test_an_environment_lost_while_it_opens_is_opened_again_a_bounded_number_of_times(
    life: Life,
) -> None:
    life.turn(opening("0"))
    for suffix in ("", *(f"~r{n}" for n in range(1, GENERATIONS_MAX - 1))):
        assert life.delivered == []
        life.told(f"0{suffix}", fault=LOST)
    life.told(f"0~r{GENERATIONS_MAX - 1}", fault=LOST)
    assert life.delivered == ["0"]
    assert len(life.submitted) == GENERATIONS_MAX
    life.turn()
    assert [event.fault.code for event in life.of(Delivered)] == [LOST.code]
    assert len(life.parts.acknowledged) == GENERATIONS_MAX
    life.turn(call("1"))
    life.told("1", fault=LOST)
    assert life.delivered == ["0", "1"], "what is in no environment rebuilds none"


def test_what_cannot_be_rebuilt_is_told_with_its_spent_actions(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1", replayable=False))
    life.ended("1")
    life.turn(run("2"), run("3"))
    lost = life.told("2", fault=LOST)
    assert life.delivered[-1] == "2"
    assert life.rollout.environments[CallPath("0")].lost
    life.turn()
    assert lost in life.parts.acknowledged
    life.turn(outcome=ProgramOutcome(reward=0.0))
    assert life.parts.closed == [], "nobody holds what is lost"


def test_a_rebuild_that_is_given_up_tells_every_call_that_waited_for_it(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"))
    lost = {life.told("1", fault=LOST)}
    lost.add(life.told("2", fault=LOST))
    for generation in range(1, GENERATIONS_MAX):
        life.told(f"0~g{generation}", fault=BROKE)
    assert life.delivered == ["0", "1"]
    life.turn()
    assert life.delivered == ["0", "1", "2"]
    life.turn()
    assert lost <= life.parts.acknowledged
    assert [event.fault.code for event in life.of(Delivered)[1:]] == [LOST.code] * 2


def test_what_had_ended_before_a_resume_is_taken_up_when_it_is_known_again(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"), run("3"))
    life.ended("1")
    early = {}
    for path in ("0~g1", "1~g1", "2~g1"):
        action_id = make_id(life.rollout.rollout_id, CallPath(path))
        early[path] = Completion(
            action_id=action_id,
            fence=Fence(1),
            status=OK,
            attempt=1,
            worker_id=SECOND,
            environment=EnvironmentState.CLEAN,
        )
        life.done.add(action_id)
        life.event(LedgerEventKind.COMPLETED, action_id, early[path])
    assert set(life.rollout.unrouted.values()) == set(early.values())
    life.told("2", fault=LOST)
    assert life.delivered == ["0", "1", "2"], "the rebuild and the call after it were all done"
    assert life.rollout.unrouted == {}


def test_what_had_ended_before_a_resume_is_taken_up_step_by_step_too(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"), call("3"))
    life.ended("1")
    for path in ("2~g1", "3~r1"):
        action_id = make_id(life.rollout.rollout_id, CallPath(path))
        known = Completion(
            action_id=action_id, fence=Fence(1), status=OK, attempt=1, worker_id=SECOND
        )
        life.done.add(action_id)
        life.event(LedgerEventKind.COMPLETED, action_id, known)
    life.told("3", fault=GONE, attempt=0)
    assert life.delivered == ["0", "1", "3"], "its second try had ended"
    life.turn()
    life.told("2", fault=LOST)
    for path in ("0~g1", "1~g1"):
        life.told(path, worker=SECOND)
    assert life.delivered == ["0", "1", "3", "2"], "so had what waited for the rebuild"
    assert life.rollout.unrouted == {}


def test_closing_what_could_not_be_rebuilt_is_acknowledged_at_once(life: Life) -> None:
    life.turn(opening("0"))
    life.ended("0")
    life.turn(run("1"), run("2"))
    life.ended("1")
    life.told("2", fault=LOST)
    life.told("0~g1", worker=SECOND)
    life.told("1~g1", worker=SECOND, status=TIMED_OUT)
    assert life.parts.closed == [SECOND]
    assert life.told("0~close1", worker=SECOND) in life.parts.acknowledged


def test_time_that_is_left_bounds_every_action(life: Life) -> None:
    assert life.flow.left(life.rollout) == 500.0
    life.parts.seconds = 497.0
    life.turn(call("0"))
    assert life.action("0").deadline_seconds == 3.0
    life.parts.seconds = 499.5
    assert life.flow.left(life.rollout) == 1.0
    life.parts.seconds = 600.0
    assert life.flow.left(life.rollout) == 1.0
