"""The order of ready calls: what is urgent goes first, and nothing waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.coordinator.places import CREDIT_SECONDS_MAX, NEW_SECONDS, Places
from stoker.coordinator.rollouts import ActiveRollout
from stoker.model.events import Admitted
from stoker.model.ids import GroupId, RolloutId, RunId
from stoker.model.task import Task


def _rollout(
    group: str = "g", order: int = 0, versions: frozenset[int] = frozenset({0})
) -> ActiveRollout:
    admitted = Admitted(
        run_id=RunId("run_a"),
        rollout_id=RolloutId(f"rol_{group}_{order}"),
        group_id=GroupId(group),
        index=order,
        task=Task(task_id=group),
        epoch="e",
        at=0.0,
        timeout_seconds=1.0,
        program="p",
        program_version="1",
        program_digest="d",
        python="3.11",
        hash_seed=0,
    )
    rollout = ActiveRollout(admitted=admitted, seq=0, order=order)
    rollout.policy_versions.update(versions)
    return rollout


def test_a_first_call_goes_after_calls_of_rollouts_under_way() -> None:
    places = Places(1)
    new = places.order(_rollout(versions=frozenset()), 0.0)
    assert places.order(_rollout(order=1), NEW_SECONDS - 1) < new
    assert places.order(_rollout(order=1), NEW_SECONDS + 1) > new


def test_the_last_of_a_group_goes_first() -> None:
    places = Places(4)
    for number in range(3):
        places.ended(_rollout("nearly", number))
    places.ended(_rollout("half", 0))
    orders = {name: places.order(_rollout(name, 3), 100.0) for name in ("none", "half", "nearly")}
    assert sorted(orders, key=lambda name: orders[name]) == ["nearly", "half", "none"]
    places.ended(_rollout("nearly", 3))
    assert not places._ended["nearly"]


def test_older_weights_go_first() -> None:
    places = Places(1)
    places.order(_rollout(versions=frozenset({9})), 0.0)
    old, new = _rollout(versions=frozenset({7, 8})), _rollout(versions=frozenset({9}))
    assert places.order(old, 5.0) < places.order(new, 0.0)


@given(
    st.lists(st.integers(0, 3)),
    st.frozensets(st.integers(0, 50), max_size=3),
    st.frozensets(st.integers(0, 50), max_size=3),
)
def test_nobody_is_overtaken_for_ever(
    ended: list[int], one: frozenset[int], other: frozenset[int]
) -> None:
    places = Places(4)
    for number in ended[:3]:
        places.ended(_rollout("g", number))
    early = places.order(_rollout("h", 1, one), 0.0)
    late = places.order(_rollout("g", 2, other), CREDIT_SECONDS_MAX + 0.001)
    assert early < late
