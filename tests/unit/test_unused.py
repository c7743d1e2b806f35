"""Where the unused window is charged: classes, pauses, programs, admission, the end of work."""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from stoker.coordinator.calls import Call
from stoker.coordinator.rollouts import ActiveRollout
from stoker.coordinator.unused import ADMISSION, NO_WORK, PAUSES, PROGRAMS, Unused
from stoker.model.events import Verb
from stoker.model.ids import CallPath
from stoker.testing.virtual_clock import run_virtual
from support.inference import lane_over, request, sim

SECONDS = 8.0


def rollout(*calls: tuple[Verb, str], in_turn: bool = False) -> ActiveRollout:
    """Return a rollout that awaits calls of these verbs, of these worker classes."""
    made = ActiveRollout(admitted=cast("Any", None), seq=1, in_turn=in_turn)
    for number, (verb, worker_class) in enumerate(calls):
        path = CallPath(str(number))
        made.calls[path] = Call(path, verb, b"", 0.0, worker_class=worker_class)
    return made


def charged(active: Iterable[ActiveRollout], *, more: bool = False) -> dict[str, float]:
    """Return the seconds by cause after a lane of window 4 had nothing to do for ``SECONDS``."""

    async def main() -> dict[str, float]:
        unused = Unused(lane_over(sim()))
        await asyncio.sleep(SECONDS)
        unused.look(active, more=more)
        assert sum(unused.seconds.values()) == pytest.approx(4 * SECONDS), "all of it has a cause"
        assert sum(unused.shares().values()) == pytest.approx(1.0)
        return dict(unused.seconds)

    return run_virtual(main())


def test_c8_a_class_that_is_gone_is_charged_with_what_it_leaves_unused() -> None:
    gone = [rollout((Verb.CALL, "fast")) for _ in range(9)]
    assert charged(gone) == {"class fast": pytest.approx(32)}


def test_several_causes_are_charged_in_proportion() -> None:
    active = [
        rollout((Verb.CALL, "fast")),
        rollout((Verb.CALL, "fast"), (Verb.TIMER, "")),
        rollout((Verb.CALL, "slow")),
        rollout((Verb.SLEEP, "")),
        rollout(in_turn=True),
        rollout(),
        rollout((Verb.LOCAL, "")),
        rollout((Verb.TIMER, "")),
    ]
    assert charged(active) == {
        "class fast": pytest.approx(8),
        "class slow": pytest.approx(4),
        PAUSES: pytest.approx(8),
        PROGRAMS: pytest.approx(12),
    }


def test_places_that_no_active_rollout_could_use_want_more_rollouts() -> None:
    one = [rollout((Verb.CALL, "fast"))]
    assert charged(one) == {"class fast": pytest.approx(8), NO_WORK: pytest.approx(24)}
    assert charged(one, more=True) == {"class fast": pytest.approx(8), ADMISSION: pytest.approx(24)}


def test_shares_are_of_the_window_that_there_was() -> None:
    async def main() -> None:
        lane = lane_over(sim())
        await asyncio.sleep(SECONDS)  # before anybody looks
        unused = Unused(lane)
        gone = [rollout((Verb.CALL, "fast"))]
        for part in (0.25, 1.0, 0.5):  # claims of others change it just before a look
            await asyncio.sleep(SECONDS)
            lane.share({0: (part, 1.0)})
            unused.look(gone, more=False)
            assert sum(unused.shares().values()) == pytest.approx(1.0)
        assert unused.shares() == {
            "class fast": pytest.approx(3 / 9),  # one place of windows of 4, 1 and 4
            NO_WORK: pytest.approx(6 / 9),
        }
        assert lane.figures().room_share == pytest.approx(1.0)

    run_virtual(main())


def test_rollouts_on_the_lane_are_no_cause_and_a_full_lane_has_none() -> None:
    on_it = rollout((Verb.GENERATE, ""), (Verb.CALL, "fast"))
    assert charged([on_it]) == {NO_WORK: pytest.approx(32)}

    async def main() -> None:
        lane = lane_over(sim())
        unused = Unused(lane)
        await asyncio.gather(*(lane.generate(request(f"r{n}"), (0,)) for n in range(4)))
        unused.look([on_it] * 4, more=True)
        assert not unused.seconds
        assert not any(unused.shares().values())

    run_virtual(main())
