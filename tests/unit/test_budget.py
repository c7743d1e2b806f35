"""What a run may cost: counted from what rollouts report, over resumptions and partitions."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.tree import BudgetSettings
from stoker.coordinator.budget import Budget
from stoker.coordinator.group_keeper import GroupKeeper
from stoker.coordinator.partition import Partition
from stoker.coordinator.reviving import Reviver
from stoker.coordinator.rollouts import ActiveRollout
from stoker.model.events import Finished
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.seams.clock import SystemClock
from support.flows import Told
from support.journals import ADMITTED


def rollout(tokens: int, seconds: float = 0.0) -> ActiveRollout:
    return ActiveRollout(admitted=cast("Any", None), seq=0, tokens=tokens, run_seconds=seconds)


def over(tokens: int, seconds: float = 0.0) -> Finished:
    done = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)
    return Finished(outcome=done, at=0.0, tokens=tokens, box_seconds=seconds)


def test_earlier_ended_and_active_rollouts_count_together_and_it_runs_out_once() -> None:
    budget = Budget(BudgetSettings(tokens=100))
    budget.counted(over(40))
    active = [rollout(30)]
    assert not budget.look(active, 1, 0.0)
    assert budget.held == ""
    active[0].tokens += 29
    assert not budget.look(active, 1, 0.0)
    active[0].tokens += 1
    assert budget.look(active, 1, 0.0)
    assert "100 of the 100 of budget.tokens" in budget.held
    assert not budget.look(active, 1, 0.0), "said once"
    budget.ended(active[0])
    assert not budget.look([], 0, 0.0)
    view = budget.view()
    assert view is not None
    assert view.tokens == 100, "who ends is not counted twice"
    assert budget.truncated is None


def test_what_a_restart_gives_up_was_spent() -> None:
    budget, told = Budget(BudgetSettings(tokens=100)), Told()
    plan = SimpleNamespace(run_id="run", group_size=1, spare=0, tasks=())
    flow = SimpleNamespace(parts=SimpleNamespace(clock=SystemClock()))
    keeper = GroupKeeper(cast("Any", plan), cast("Any", flow), None, budget)
    parts = cast("Any", SimpleNamespace(plan=plan, flow=told))
    reviver = Reviver(parts, keeper, cast("Any", None), cast("Any", None))
    reviver.known = {("t", 0)}
    given_up = ActiveRollout(admitted=ADMITTED, seq=0, tokens=100)
    reviver._restart(given_up)
    assert [rollout for rollout, _ in told.of("abandon")] == [given_up]
    assert budget.look([], 0, 0.0)


def test_box_time_and_money_run_out_as_tokens_do() -> None:
    boxes = Budget(BudgetSettings(box_seconds=60.0, spent="truncate"))
    assert boxes.look([rollout(0, 60.0)], 1, 0.0)
    assert "budget.box_seconds" in boxes.held
    assert boxes.truncated == Outcome(
        kind=OutcomeKind.TRUNCATED, reason="the run's budget is spent"
    )
    money = Budget(BudgetSettings(money=1.0, token_price=2.0, box_price=3.6))
    assert not money.look([rollout(400_000, 100.0)], 1, 0.0)
    view = money.view()
    assert view is not None
    assert view.money == pytest.approx(0.8 + 0.1)
    assert money.look([rollout(400_000, 200.0)], 1, 0.0)


def test_partitions_share_a_budget_and_without_one_nothing_is_counted() -> None:
    part = Budget(BudgetSettings(tokens=100), Partition(index=1, count=4))
    assert not part.look([rollout(24)], 1, 0.0)
    assert part.look([rollout(25)], 1, 0.0)
    none = Budget(BudgetSettings())
    assert not none.look([rollout(10**9)], 1, 0.0)
    assert none.view() is None


def test_many_active_rollouts_are_counted_ten_times_a_second() -> None:
    budget = Budget(BudgetSettings(tokens=5000))
    active = [rollout(1) for _ in range(1000)]
    assert not budget.look(active, 1000, 10.0)
    active[0].tokens = 9000
    assert not budget.look(active, 1000, 10.05)
    assert budget.look(active, 1000, 10.1)


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["earlier", "ended", "active"]), st.integers(0, 50)), max_size=20
    ),
    most=st.integers(1, 400),
)
def test_it_is_spent_exactly_when_the_sum_reaches_it(
    parts: list[tuple[str, int]], most: int
) -> None:
    budget = Budget(BudgetSettings(tokens=most))
    active = []
    for where, tokens in parts:
        if where == "earlier":
            budget.counted(over(tokens))
        elif where == "ended":
            budget.ended(rollout(tokens))
        else:
            active.append(rollout(tokens))
    assert budget.look(active, len(active), 0.0) == (sum(n for _, n in parts) >= most)
