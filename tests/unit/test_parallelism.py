"""How many calls of one rollout are on the lane at once."""

import asyncio

import pytest

from stoker.coordinator.parallelism import Parallelism
from stoker.model.ids import RolloutId
from stoker.testing.virtual_clock import run_virtual
from support.inference import HandModel, lane_over, request, turns_of_loop

A = RolloutId("a")


def test_a_bound_holds_per_rollout_and_lets_the_next_in() -> None:
    async def main() -> None:
        model = HandModel(windows=(10,))
        model.behave = lambda *_: 1.0
        lane = lane_over(model)
        lane.parallelism.limit(2)
        calls = [lane.generate(request(name), (0,)) for name in "aaaaab"]
        tasks = [asyncio.create_task(call) for call in calls]
        await turns_of_loop()
        assert sorted(name for _, name in model.calls) == ["a/0", "a/0", "b/0"]
        assert lane.ready_depth() == 0
        await asyncio.sleep(1.5)
        assert len(model.calls) == 5
        lane.parallelism.limit(None)
        await turns_of_loop()
        assert len(model.calls) == 6
        await asyncio.gather(*tasks)

    run_virtual(main())


@pytest.mark.parametrize("moment", range(8))
def test_a_cancel_at_any_turn_leaves_no_place_taken(moment: int) -> None:
    async def main() -> None:
        places = Parallelism()
        places.limit(1)

        async def hold() -> None:
            async with places.place(A):
                await asyncio.sleep(1)

        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        for _ in range(moment):
            await asyncio.sleep(0.25)
        tasks[1].cancel()
        tasks[moment % 3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (places._taken, places._waiting) == ({}, {})

    run_virtual(main())
