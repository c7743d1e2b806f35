"""C6: every end of a program is a typed outcome; only a finite number is a reward."""

import math
from typing import Any

import pytest

import stoker
from stoker.errors import BadInput
from stoker.model.tools import Verdict
from stoker.rollout.score import outcome_of_return
from stoker.testing.driver import drive


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (stoker.Score(0.25, {"steps": 3}), 0.25),
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (Verdict(passed=True), 1.0),
        (Verdict(passed=False, detail="f() == 2"), 0.0),
    ],
)
def test_scores_of_every_accepted_form(returned: Any, reward: float) -> None:
    outcome = outcome_of_return(returned)
    assert (outcome.reward, outcome.fault) == (reward, None)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1",
        math.nan,
        math.inf,
        -math.inf,
        [1.0],
        10**400,
        stoker.Score(math.nan),
        stoker.Score(1.0, {"x": math.nan}),
        stoker.Score(1.0, {"x": "y"}),  # type: ignore[dict-item]
    ],
    ids=str,
)
def test_c6_nan_and_other_returns_are_reward_invalid(returned: Any) -> None:
    outcome = outcome_of_return(returned)
    assert outcome.reward is None
    assert outcome.fault is not None
    assert outcome.fault.code == "reward_invalid"


def test_c6_a_program_that_raises_is_typed_with_its_line() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.sleep(1)
        raise KeyError("lost \ud800 it")

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.fault.code == "program_raised"
    assert "KeyError" in outcome.fault.message
    assert "test_rollout_outcome.py:" in outcome.fault.message
    assert "Traceback" in outcome.fault.context["trace"]


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_c6_endings_that_are_no_exceptions_do_not_end_the_host(ending: BaseException) -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        raise ending

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.fault.code == "program_raised"


def test_a_program_truncates_itself_even_inside_except_exception() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def sub_agent() -> float:
            await ctx.sleep(1)
            stoker.truncate("out of turns")

        try:
            await ctx.gather(sub_agent(), ctx.sleep(2))
        except Exception:
            return 0.0
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert (outcome.reward, outcome.truncated, outcome.fault) == (None, "out of turns", None)


def test_a_stoker_error_that_is_not_caught_is_the_outcome_itself() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.call(["x"])
        return 1.0

    outcome = drive(program, lambda _asked: BadInput("no such thing")).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.fault.code == "bad_input"


def test_c6_a_program_that_never_ends_stands_without_outcome_and_can_be_thrown_away() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        while True:
            await ctx.sleep(3600)

    with pytest.raises(AssertionError, match="still went on"):
        drive(program, deliveries_max=200)
