"""The table that keeps infrastructure faults from becoming rewards (promise 4, C11)."""

import math

import msgspec
import pytest

from stoker.coordinator.calls import Call
from stoker.coordinator.outcomes import outcome_of
from stoker.coordinator.results import SAFE_RETRIES_MAX, retry_reason, seen, taints
from stoker.errors import (
    BoxFailed,
    EffectAmbiguous,
    EnvironmentLost,
    Infrastructure,
    ProgramRaised,
    ToolRefused,
    WorkerLost,
)
from stoker.model.action import Effect
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.events import Verb
from stoker.model.faults import FaultSide
from stoker.model.ids import ActionId, CallPath, Fence
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.tools import CallRequest, CallResult, RunResult
from stoker.model.value import inline_value
from stoker.rollout.arguments import CallArguments, OnTimeout
from stoker.rollout.messages import ProgramOutcome

LOST = EnvironmentLost("box gone").record()
AMBIGUOUS = EffectAmbiguous("mail may have been sent").record()
RAISED = ProgramRaised("boom").record()


def test_a_score_without_faults_is_completed() -> None:
    outcome = outcome_of(ProgramOutcome(reward=0.5, metrics={"steps": 2.0}), {})
    assert (outcome.kind, outcome.reward) == (OutcomeKind.COMPLETED, 0.5)
    assert outcome.metrics == {"steps": 2.0}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_c11_a_program_that_swallows_a_fault_gets_no_reward(reward: float) -> None:
    outcome = outcome_of(ProgramOutcome(reward=reward), {LOST.code: LOST})
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.reward is None
    assert outcome.fault == LOST


def test_an_ambiguous_effect_stays_ambiguous_whatever_the_program_did() -> None:
    tainted = {LOST.code: LOST, AMBIGUOUS.code: AMBIGUOUS}
    for program in (ProgramOutcome(reward=1.0), ProgramOutcome(fault=RAISED)):
        assert outcome_of(program, tainted).kind is OutcomeKind.AMBIGUOUS


def test_a_program_that_raised_failed_by_its_own_fault() -> None:
    outcome = outcome_of(ProgramOutcome(fault=RAISED), {})
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.fault is not None
    assert outcome.fault.side is FaultSide.ENVIRONMENT


def test_truncation_by_the_program_carries_its_reason() -> None:
    outcome = outcome_of(ProgramOutcome(truncated="too long"), {})
    assert (outcome.kind, outcome.reason) == (OutcomeKind.TRUNCATED, "too long")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
def test_c6_a_reward_that_is_no_number_fails(reward: float | None) -> None:
    outcome = outcome_of(ProgramOutcome(reward=reward), {})
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.fault is not None
    assert outcome.fault.code == "reward_invalid"


@pytest.mark.parametrize("kind", [kind for kind in OutcomeKind if kind != "completed"])
def test_no_other_outcome_can_be_built_with_a_reward(kind: OutcomeKind) -> None:
    with pytest.raises(ValueError, match="carries no reward"):
        Outcome(kind=kind, reward=0.0)


def completion(status: CompletionStatus, **more: object) -> Completion:
    values: dict[str, object] = {"action_id": ActionId("act_1"), "fence": Fence(1)} | more
    return Completion(status=status, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "status", [CompletionStatus.OK, CompletionStatus.LIMIT, CompletionStatus.TIMED_OUT]
)
def test_what_the_policy_did_is_data(status: CompletionStatus) -> None:
    value = inline_value(b"\xc0")
    what = seen(Verb.RUN, completion(status, observation=value, attempt=1))
    assert (what.value, what.fault) == (value, None)


def test_a_run_that_timed_out_without_an_observation_is_still_data() -> None:
    what = seen(Verb.RUN, completion(CompletionStatus.TIMED_OUT, attempt=1))
    assert what.fault is None
    assert what.value is not None
    assert what.value.inline is not None

    assert msgspec.msgpack.decode(what.value.inline, type=RunResult).timed_out
    called = seen(Verb.CALL, completion(CompletionStatus.TIMED_OUT, attempt=1)).value
    assert called is not None
    assert called.inline is not None
    run = msgspec.msgpack.decode(called.inline, type=CallResult).run
    assert run is not None
    assert run.timed_out


@pytest.mark.parametrize("verb", [Verb.RUN, Verb.CALL])
def test_a_timeout_that_the_ledger_declared_is_the_infrastructures_fault(verb: Verb) -> None:
    """Its worker never answered, or was lost and no other took the action in time."""
    silent = Infrastructure("reached its deadline while a worker held it").record()
    what = seen(verb, completion(CompletionStatus.TIMED_OUT, attempt=1, fault=silent))
    assert what.value is None
    assert taints(what.fault)


def test_a_transfer_that_timed_out_does_not_claim_that_it_never_began() -> None:
    what = seen(Verb.WRITE, completion(CompletionStatus.TIMED_OUT, attempt=1))
    assert what.fault is not None
    assert "before it was started" not in what.fault.message


def test_an_action_that_never_started_is_the_infrastructures_fault() -> None:
    what = seen(Verb.RUN, completion(CompletionStatus.TIMED_OUT, attempt=0))
    assert taints(what.fault)


@pytest.mark.parametrize(
    ("fault", "bars"),
    [(LOST, True), (AMBIGUOUS, True), (ToolRefused("no").record(), False), (None, False)],
)
def test_only_our_own_faults_taint(fault: object, bars: bool) -> None:  # noqa: FBT001 - a table
    assert taints(fault) is bars  # type: ignore[arg-type]


def call(effect: Effect = Effect.PURE, late: str = "observe", *, retries: int = 0) -> Call:
    arguments = CallArguments(
        request=CallRequest(argv=("true",)),
        effect=effect,
        worker_class=None,
        timeout_seconds=None,
        on_timeout=OnTimeout(kind=late, times=3),
    )
    encoded = msgspec.msgpack.encode(arguments)
    return Call(
        path=CallPath("0"), verb=Verb.CALL, arguments=encoded, issued_at=0.0, retries=retries
    )


NOT_STARTED = completion(CompletionStatus.TIMED_OUT, attempt=0)
TIMED_OUT = completion(CompletionStatus.TIMED_OUT, attempt=1)
NO_BOX = completion(CompletionStatus.ERROR, attempt=1, fault=BoxFailed("no room").record())


def test_work_that_never_began_is_tried_again_a_bounded_number_of_times() -> None:
    for retries in range(SAFE_RETRIES_MAX):
        assert retry_reason(call(retries=retries), NOT_STARTED)
        assert retry_reason(call(retries=retries), NO_BOX)
    assert not retry_reason(call(retries=SAFE_RETRIES_MAX), NOT_STARTED)
    assert not retry_reason(call(retries=SAFE_RETRIES_MAX), NO_BOX)


def test_an_opening_whose_box_failed_is_tried_again_though_no_box_stands() -> None:
    gone = msgspec.structs.replace(NO_BOX, environment=EnvironmentState.LOST)
    opening = Call(path=CallPath("0"), verb=Verb.ENVIRONMENT, arguments=b"", issued_at=0.0)
    running = Call(path=CallPath("1"), verb=Verb.RUN, arguments=b"", issued_at=0.0)
    assert retry_reason(opening, gone)
    assert not retry_reason(running, gone)


def test_what_a_worker_out_of_contact_did_not_begin_is_submitted_again() -> None:
    """Found by the soak (seed 12): nothing had run, and the rollout failed."""
    unbegun = msgspec.structs.replace(NO_BOX, fault=WorkerLost("out of contact").record())
    assert retry_reason(call(Effect.EXTERNAL), unbegun)
    assert not retry_reason(call(retries=SAFE_RETRIES_MAX), unbegun)


def test_an_external_action_whose_box_failed_is_not_run_again_blindly() -> None:
    assert not retry_reason(call(Effect.EXTERNAL), NO_BOX)


def test_a_timeout_of_running_work_is_repeated_only_where_the_program_says_so() -> None:
    assert not retry_reason(call(), TIMED_OUT)
    assert retry_reason(call(late="retry", retries=2), TIMED_OUT)
    assert not retry_reason(call(late="retry", retries=3), TIMED_OUT)
