"""Every interleaving of a small world, breadth first, states told apart by their futures.

The world (``support.ledger_world``) has the production service in it. A finding prints the shortest
way to it. Bounds are budgets, not depth: within them nothing is left out.
"""

import sys
from collections import deque
from typing import Any

import pytest

from stoker.model.action import Action, Effect
from stoker.model.ids import EnvironmentId
from support.ledger import action
from support.ledger_world import CALM, Budgets, Step, World

BOUNDS: dict[str, Any] = {"attempts_max": 2, "deliveries_max": 2, "deadline_seconds": 40.0}


def external(number: int) -> Action:
    return action(number, effect=Effect.EXTERNAL, **BOUNDS)


def pure(number: int) -> Action:
    return action(number, effect=Effect.PURE, **BOUNDS)


def boxed(number: int) -> Action:
    return action(number, effect=Effect.CONTAINED, environment_id=EnvironmentId("env_1"), **BOUNDS)


def explore(world: World) -> tuple[int, int]:
    """Visit every state; return how many there are, and how many steps lead between them."""
    ways: dict[bytes, tuple[bytes, Step] | None] = {world.digest(): None}
    waiting = deque([(world.digest(), world)])
    steps = 0
    while waiting:
        digest, here = waiting.popleft()
        for step in (CALM, *here.steps()):
            steps += 1
            try:
                there = here.taken(step)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_way(ways, digest, step)}") from error
            found = there.digest()
            if step is not CALM and found not in ways:
                ways[found] = (digest, step)
                waiting.append((found, there))
    return len(ways), steps


def _way(ways: dict[bytes, tuple[bytes, Step] | None], digest: bytes, last: Step) -> str:
    path = [last]
    while (before := ways[digest]) is not None:
        digest, step = before
        path.append(step)
    return "\n".join(f"{n}. {' '.join(map(str, step))}" for n, step in enumerate(reversed(path), 1))


SMALL = {
    "an external action, power cut": (
        [external(1)],
        Budgets(power_cuts=1, ticks=1, lost_replies=1),
    ),
    "a pure action, killed workers and ledger": (
        [pure(1)],
        Budgets(deaths=1, kills=1, lost_replies=1),
    ),
    "cancelled and taken over": ([external(1)], Budgets(cancels=1, takeovers=1, ticks=1)),
}
LARGE = {
    "external and pure": ([external(1), pure(2)], Budgets()),
    "external and pure, power cut": ([external(1), pure(2)], Budgets(power_cuts=1, repeats=0)),
}


def search(
    name: str, actions: list[Action], budgets: Budgets, tell: pytest.CaptureFixture[str]
) -> int:
    states, steps = explore(World(actions, workers=2, budgets=budgets))
    with tell.disabled():
        sys.stdout.write(f"\n  {name}: {states} states, {steps} steps\n")
    return states


@pytest.mark.parametrize("name", SMALL)
def test_i1_to_i13_hold_in_every_state_of_a_small_world(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(name, *SMALL[name], capsys) > 300


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_i1_to_i13_hold_in_every_state_of_a_larger_world(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(name, *LARGE[name], capsys) > 5_000


def test_the_search_finds_the_double_effect_where_a_start_is_not_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.broker.worker_verbs.is_external", lambda _row: False)
    world = World([external(1)], workers=2, budgets=Budgets(power_cuts=1))
    with pytest.raises(AssertionError, match="I12") as found:
        explore(world)
    assert "cut the power" in str(found.value), "it says the way there"
