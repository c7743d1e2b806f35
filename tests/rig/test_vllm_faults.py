"""A real server that hangs, answers late, refuses, or is not what was asked for; and cancels."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from stoker.errors import ModelRefused
from stoker.model.generation import Generation
from support.cancelling import Way, cancelled_at
from support.command import stoker
from support.served import grown
from support.vllm_calls import (
    MORE,
    asked,
    asking,
    lane_over,
    no_open_ends,
    say,
    until_running,
    until_sampled,
)
from support.vllm_server import Server

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="1m")
async def talk(ctx, task):
    return float(bool((await ctx.generate(ctx.chat("Hello."), tokens_max=2)).text))
"""


def test_c1_a_server_that_hangs_is_left_and_what_it_says_late_is_not_used(
    main_server: Server,
) -> None:
    async def main() -> tuple[Generation, int]:
        async with asking(main_server) as model:
            lane = lane_over(model, call_timeout="8s", retries=20, retry_delay="200ms")
            expected = await lane.generate(asked("rol_first", tokens_max=2), (0,))
            main_server.freeze()
            try:
                call = asyncio.create_task(lane.generate(asked("rol_b", tokens_max=2), (1,)))
                while not lane.totals().failures:
                    await asyncio.sleep(0.05)
                assert not call.done()
            finally:
                main_server.thaw()  # now it answers the first try, which nobody waits for
            said = await call
            assert said.token_ids == expected.token_ids
            await until_running(main_server, 0)
            no_open_ends(model)
            return said, lane.totals().failures

    said, failures = asyncio.run(main())
    assert said.token_count == 2
    assert failures >= 1


def test_c1_an_answer_after_our_deadline_is_aborted_on_the_server(main_server: Server) -> None:
    async def main() -> None:
        async with asking(main_server) as model:
            call = asyncio.create_task(model.generate(0, asked(tokens_max=1500)))
            await until_sampled(main_server, 2)
            call.cancel()
            await asyncio.wait({call})
            assert call.cancelled()
            await until_running(main_server, 0)  # long before 1,500 tokens
            no_open_ends(model)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["waiting", "woken"])
@pytest.mark.parametrize("turn", ["first", "by ids"])
def test_a_cancel_at_each_await_point_leaks_nothing_on_either_side(
    main_server: Server, turn: str, way: Way
) -> None:
    async def main() -> int:
        async with asking(main_server) as model:
            one = await model.generate(0, asked(tokens_max=3))
            request = asked(tokens_max=3)
            if turn == "by ids":
                request = grown(one, MORE, before=request.messages, tokens_max=3)
            tasks = asyncio.all_tasks()
            point = 0
            link = model.replicas[0].link
            while True:
                await link.close()
                link._session = None  # so that connecting is among the points
                cancelled, said = await cancelled_at(lambda: model.generate(0, request), point, way)
                no_open_ends(model)
                if not cancelled:
                    assert said.token_count == 3
                    break
                point += 1
            await until_running(main_server, 0)
            assert asyncio.all_tasks() == tasks
            return point

    points = asyncio.run(main())
    assert points >= 5
    say(f"{turn}, {way}: cancelled at each of {points} await points")


def test_what_is_not_served_is_refused_in_a_sentence(main_server: Server, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task_id": "a", "data": {}}) + "\n")
    base = ["run", "program.py", "--tasks", "tasks.jsonl", "--set", "workers.count=0", "--model"]
    answer = stoker(tmp_path, *base, main_server.url, "--set", "model.name=big")
    assert answer.code == 2
    assert "does not serve 'big' (model.name); it serves smol; nothing was started" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_served_no_longer_is_refused_without_another_try(
    main_server: Server,
) -> None:
    async def main() -> str:
        async with asking(main_server) as model:
            model.replicas[0].offer.name = "gone"
            lane = lane_over(model)
            with pytest.raises(ModelRefused) as caught:
                await lane.generate(asked(), (0,))
            assert lane.totals().retries == 0
            return caught.value.message

    said = asyncio.run(main())
    assert "404: The model `gone` does not exist" in said


def test_priorities_are_taken_where_the_server_schedules_by_them(main_server: Server) -> None:
    async def main() -> list[Generation]:
        async with asking(main_server, priority=True) as model:
            urgent = [msgspec.structs.replace(asked(f"rol_{n}"), priority=n) for n in (-3, 0, 7)]
            first = await asyncio.gather(*(model.generate(0, one) for one in urgent))
            more = grown(first[0], MORE, before=asked().messages, tokens_max=2)
            by_ids = msgspec.structs.replace(more, priority=-5)
            return [*first, await model.generate(0, by_ids)]

    said = asyncio.run(main())
    assert len({one.token_ids for one in said[:3]}) == 1  # priority changes when, not what
    assert said[3].token_count == 2
