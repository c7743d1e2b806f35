"""The lane alone, over a model whose every answer the test decides."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker.coordinator.lane import Lane
from stoker.errors import ModelUnavailable, StokerError
from stoker.model.generation import GenerateRequest, Generation
from stoker.testing.virtual_clock import run_virtual
from support.inference import HandModel, lane_over, request, turns_of_loop


def _start(lane: Lane, name: str, order: int = 0) -> "asyncio.Task[Generation]":
    return asyncio.create_task(lane.generate(request(name), (order,)), name=name)


def _issued(model: HandModel) -> list[str]:
    return [name.removesuffix("/0") for _, name in model.calls]


def test_smaller_orders_go_first_and_equals_in_order_of_arrival() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda *_: 1.0
        lane = lane_over(model)
        orders = {"first": 9, "b": 1, "c": 2, "d": 1, "a": 0}
        await asyncio.gather(*(_start(lane, name, order) for name, order in orders.items()))
        assert _issued(model) == ["first", "a", "b", "d", "c"]

    run_virtual(main())


def test_a_window_is_filled_and_never_passed() -> None:
    async def main() -> None:
        model = HandModel(windows=(3, 2))
        model.behave = lambda *_: 1.0
        lane = lane_over(model)
        tasks = [_start(lane, f"r{n}") for n in range(12)]
        await turns_of_loop()
        assert model.running == {0: 3, 1: 2}
        assert (lane.room(), lane.ready_depth()) == (0, 7)
        await asyncio.gather(*tasks)
        assert model.running_max == {0: 3, 1: 2}
        assert (lane.room(), lane.ready_depth()) == (5, 0)

    run_virtual(main())


def test_a_rollout_returns_to_the_replica_that_has_its_prefix() -> None:
    async def main() -> None:
        model = HandModel(windows=(4, 4))
        model.behave = lambda *_: 1.0
        lane = lane_over(model)
        first = await asyncio.gather(*(_start(lane, f"r{n}") for n in range(8)))
        homes = {f"r{n}": answer.replica for n, answer in enumerate(first)}
        assert sorted(homes.values()) == [0] * 4 + [1] * 4
        for name in ("r7", "r0", "r6", "r1"):
            assert (await lane.generate(request(name, step=1), (0,))).replica == homes[name]
        # At home there is no room: elsewhere is better than waiting.
        theirs = [name for name, home in homes.items() if home == 0]
        again = await asyncio.gather(*(_start(lane, name) for name in [*theirs, theirs[0]]))
        assert [answer.replica for answer in again] == [0, 0, 0, 0, 1]

    run_virtual(main())


def test_c1_a_failed_call_tries_another_replica_first() -> None:
    async def main() -> None:
        model = HandModel(windows=(8, 2))
        model.behave = lambda replica, _: ModelUnavailable("once") if replica == 0 else 1.0
        lane = lane_over(model, retries=1)
        for name in ("a", "b"):  # the other has less room, and the first is not resting yet
            assert (await lane.generate(request(name), (0,))).replica == 1
        assert [replica for replica, _ in model.calls] == [0, 1, 0, 1]

    run_virtual(main())


def test_b19_a_pause_holds_new_calls_and_lets_results_flow() -> None:
    async def main() -> None:
        model = HandModel(windows=(2,))
        model.behave = lambda *_: 5.0
        lane = lane_over(model)
        running = [_start(lane, name) for name in ("a", "b")]
        await turns_of_loop()
        lane.pause()
        held = [_start(lane, name) for name in ("c", "d", "e")]
        await asyncio.gather(*running)  # answered while paused
        await asyncio.sleep(100)
        assert _issued(model) == ["a", "b"]
        assert (lane.room(), lane.ready_depth()) == (0, 3)
        assert not lane.wanted.is_set()
        figures = lane.figures()
        assert figures.paused
        assert figures.idle_while_ready_share == 0  # a pause is its own cause (C2)
        assert lane.totals().paused_seconds == pytest.approx(105)
        lane.resume()
        await asyncio.gather(*held)
        assert _issued(model) == ["a", "b", "c", "d", "e"]

    run_virtual(main())


def test_wanted_says_room_and_nothing_ready() -> None:
    async def main() -> None:
        model = HandModel(windows=(2,))
        model.behave = lambda *_: 5.0
        lane = lane_over(model)
        assert lane.wanted.is_set()
        tasks = [_start(lane, name) for name in ("a", "b", "c")]
        await turns_of_loop()
        assert not lane.wanted.is_set()
        await lane.wanted.wait()
        assert asyncio.get_running_loop().time() == 5  # c took the room of a, b's is free
        await asyncio.gather(*tasks)

    run_virtual(main())


Cancel = Callable[[], Awaitable[None]]


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("victims", [("a",), ("b",), ("a", "b"), ("b", "c"), ("a", "b", "c", "d")])
def test_a_cancel_at_any_turn_of_the_loop_frees_room(after: int, victims: tuple[str, ...]) -> None:
    """Window 1, four calls, one failing once: cancel at each point of their lives."""

    async def main() -> None:
        model = HandModel()
        failed: set[str] = set()

        def behave(_: int, asked: GenerateRequest) -> object:
            if asked.rollout_id in {"a", "c"} and asked.rollout_id not in failed:
                failed.add(asked.rollout_id)
                return ModelUnavailable("once")
            return 0.0

        model.behave = behave
        lane = lane_over(model, retry_delay=0.001)
        tasks = {name: _start(lane, name) for name in ("a", "b", "c", "d")}
        await turns_of_loop(after)
        done_before = {name for name, task in tasks.items() if task.done()}
        for name in victims:
            tasks[name].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for name, task in tasks.items():
            assert task.cancelled() == (name in victims and name not in done_before), name
        assert (lane.room(), lane.ready_depth(), model.running[0]) == (1, 0, 0)
        assert lane.figures().running == 0
        assert (await lane.generate(request("after"), (0,))).text == "0"

    run_virtual(main())


def test_a_cancel_between_grant_and_issue_passes_the_room_on() -> None:
    async def main() -> None:
        model = HandModel()
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.behave = lambda _, asked: gate if asked.rollout_id == "a" else 1.0
        lane = lane_over(model)
        first, second, third = (_start(lane, name) for name in ("a", "b", "c"))
        await turns_of_loop()
        gate.set_result(None)
        while lane.ready_depth() == 2:  # until room was given to b, before b's task has run
            await asyncio.sleep(0)
        assert "b" not in _issued(model)
        second.cancel()
        await asyncio.gather(first, third)
        assert second.cancelled()
        assert _issued(model) == ["a", "c"]
        assert lane.room() == 1

    run_virtual(main())


def test_a_cancelled_call_is_aborted_and_its_room_used_in_the_same_instant() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda *_: 10.0
        lane = lane_over(model)
        running, waiting = _start(lane, "a"), _start(lane, "b")
        await asyncio.sleep(3)
        running.cancel()
        await waiting
        assert model.aborted == ["a/0"]
        assert asyncio.get_running_loop().time() == pytest.approx(13)

    run_virtual(main())


def test_a_withdrawn_call_in_a_long_queue_is_forgotten() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda *_: 1.0
        lane = lane_over(model)
        running, next_one = _start(lane, "running"), _start(lane, "next", order=-1)
        tasks = [_start(lane, f"r{n}") for n in range(1000)]
        await turns_of_loop()
        assert lane.ready_depth() == 1001
        for task in tasks[1:]:
            task.cancel()
        await turns_of_loop()
        assert lane.ready_depth() == 2
        assert len(lane._ready._open._heap) < 100
        await asyncio.gather(running, next_one, tasks[0])
        assert _issued(model) == ["running", "next", "r0"]
        assert lane.room() == 1

    run_virtual(main())


def test_a_bug_of_the_model_is_not_retried_and_frees_room() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda *_: ValueError("a bug")
        lane = lane_over(model)
        with pytest.raises(ValueError, match="a bug"):
            await lane.generate(request(), (0,))
        model.behave = lambda *_: TimeoutError("the model's own")
        with pytest.raises(TimeoutError, match="own"):
            await lane.generate(request(), (0,))
        assert len(model.calls) == 2
        assert lane.room() == 1

    run_virtual(main())


def test_a_failing_replica_rests_while_the_other_takes_over_and_comes_back() -> None:
    async def main() -> None:
        model = HandModel(windows=(4, 4))
        broken = True
        model.behave = lambda replica, _: (
            ModelUnavailable("down") if replica == 0 and broken else 1.0
        )
        lane = lane_over(model, retry_delay=0.1)
        for n in range(40):
            assert (await lane.generate(request(f"r{n}"), (0,))).replica == 1
        tries = sum(replica == 0 for replica, _ in model.calls)
        assert 3 <= tries <= 10, "three failures, then one probe per rest, each rest longer"
        assert lane.figures().healthy == 1
        broken = False
        await asyncio.sleep(60)
        await asyncio.gather(*(_start(lane, f"s{n}") for n in range(16)))
        assert lane.figures().healthy == 2
        assert model.running_max[0] == 4

    run_virtual(main())


def test_a_replica_that_refuses_at_once_does_not_swallow_every_try() -> None:
    async def main() -> None:
        model = HandModel(windows=(4, 4))
        model.behave = lambda replica, _: (
            ModelUnavailable("full", status=429) if replica == 0 else 1.0
        )
        lane = lane_over(model, retries=2)
        answers = await asyncio.gather(*(_start(lane, f"r{n}") for n in range(100)))
        assert {answer.replica for answer in answers} == {1}
        assert lane.figures().retries < 12

    run_virtual(main())


def test_a_server_that_is_merely_full_is_back_with_its_next_answer() -> None:
    async def main() -> None:
        model = HandModel(windows=(8,))
        model.behave = lambda replica, _: (
            ModelUnavailable("full", status=429) if model.running[replica] > 4 else 2.0
        )
        lane = lane_over(model)
        await asyncio.gather(*(_start(lane, f"r{n}") for n in range(8)))
        assert lane.figures().healthy == 1
        assert asyncio.get_running_loop().time() < 10

    run_virtual(main())


def test_one_hung_probe_does_not_keep_a_recovered_replica_away() -> None:
    async def main() -> None:
        model = HandModel(windows=(4,))
        hung = asyncio.get_running_loop().create_future()
        replies = [*(ModelUnavailable("down") for _ in range(3)), hung]
        model.behave = lambda *_: replies.pop(0) if replies else 1.0
        lane = lane_over(model, retries=9, retry_delay=0.01, call_timeout=600)
        tasks = [_start(lane, f"r{n}") for n in range(20)]
        await asyncio.wait(tasks, timeout=60)
        assert sum(task.done() for task in tasks) == 19
        assert lane.figures().healthy == 1
        hung.set_result(None)
        await asyncio.gather(*tasks)

    run_virtual(main())


def test_calls_that_wait_while_no_replica_is_well_are_given_up() -> None:
    async def main() -> None:
        model = HandModel(windows=(2,))
        model.behave = lambda *_: ModelUnavailable("down")
        lane = lane_over(model, retries=3, retry_delay=1, call_timeout=60)
        calls = (_start(lane, f"r{n}") for n in range(300))
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, ModelUnavailable) for end in ends)
        assert asyncio.get_running_loop().time() < 10 * 60
        assert lane.ready_depth() == 0
        # Resting is not idling: there was no room anywhere.
        assert lane.figures().idle_while_ready_share < 0.01

    run_virtual(main())


def test_pauses_between_tries_double() -> None:
    async def main() -> None:
        model = HandModel(windows=(8,))
        at: list[float] = []

        def behave(*_: object) -> StokerError:
            at.append(asyncio.get_running_loop().time())
            return ModelUnavailable("full", status=429)

        model.behave = behave
        lane = lane_over(model, retries=4, retry_delay=0.5)
        with pytest.raises(ModelUnavailable, match="failed 5 times"):
            await lane.generate(request(), (0,))
        assert at == pytest.approx([0, 0.5, 1.5, 3.5, 7.5])

    run_virtual(main())


def test_a_retrying_call_holds_no_room_while_it_pauses() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda _, asked: (
            ModelUnavailable("full", status=429) if asked.rollout_id == "a" else 1.0
        )
        lane = lane_over(model, retries=1, retry_delay=100)
        retrying = _start(lane, "a")
        await asyncio.sleep(1)
        await lane.generate(request("b"), (0,))
        assert asyncio.get_running_loop().time() == pytest.approx(2)
        retrying.cancel()

    run_virtual(main())
