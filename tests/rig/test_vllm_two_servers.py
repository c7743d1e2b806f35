"""A second, small server: what it says under load, and what its death costs a run on both.

It has a cache for ten blocks, no tool parser, no priorities and no development routes.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from stoker.coordinator.lane import Lane
from stoker.errors import ConfigInvalid
from stoker.inference.base import ServerLoad
from stoker.model.generation import FinishReason, Generation, unpack_tokens
from support.inference import RUN_PYTHON
from support.vllm_calls import asked, asking, lane_over, no_open_ends, say, until_running
from support.vllm_server import SMALL, Rig, Server, served

CALLERS = 8
TOKENS = 6
SHOWN_SECONDS = 10.0
"""Over which throughput is measured."""


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def small(rig: Rig, stack: ExitStack) -> Server:
    return started(rig, stack, 0)


def started(rig: Rig, stack: ExitStack, port: int) -> Server:
    """Return the small server; it ends with ``stack``."""
    return stack.enter_context(
        served(Path(rig.python), Path(rig.model), SMALL, development=False, port=port, say=say)
    )


def test_the_end_of_the_context_is_a_cut_and_not_a_failure(small: Server) -> None:
    async def main() -> list[Generation]:
        async with asking(small) as model:
            # The context holds 512 tokens; the template takes 33 of them.
            prompts = [asked(text="w " * count, tokens_max=5000) for count in (470, 600)]
            return await asyncio.gather(*(model.generate(0, one) for one in prompts))

    rest, full = asyncio.run(main())
    assert 0 < rest.token_count <= 512 - len(unpack_tokens(rest.prompt_ids))
    assert (full.token_count, full.finish_reason) == (0, FinishReason.LENGTH)


def test_every_figure_of_a_loaded_server_is_read(small: Server) -> None:
    async def main() -> tuple[list[ServerLoad], list[Generation]]:
        async with asking(small) as model:
            for _ in range(2):  # the second finds a block of the first in the cache
                await model.generate(0, asked(text="w " * 150, tokens_max=1))
            # Each grows out of its first block of 128 tokens: more than the cache holds.
            requests = [asked(f"rol_{n}", f"{n} " + "w " * 80, tokens_max=24) for n in range(12)]
            calls = [asyncio.create_task(model.generate(0, one)) for one in requests]
            seen = []
            while not all(call.done() for call in calls):
                await model.look()
                load = model.load(0).server
                assert load is not None
                seen.append(load)
                await asyncio.sleep(0.2)
            return seen, [call.result() for call in calls]

    seen, said = asyncio.run(main())
    assert [one.token_count for one in said] == [24] * 12
    assert 0 < max(load.running for load in seen) <= 8
    assert max(load.waiting for load in seen) > 0
    assert max(load.waiting_by_reason["capacity"] for load in seen) > 0
    assert 0.5 < max(load.kv_used_share for load in seen) <= 1
    last = seen[-1]
    assert last.preemptions > 0
    assert 0 < last.prefix_hits < last.prefix_queries
    assert 0 < last.iterations < last.iteration_tokens
    assert last.tokens_prefilled > 12 * 100
    assert last.tokens_sampled > 12 * 20
    say(f"{last}")


def test_without_a_tool_parser_the_tools_are_sent_and_we_read(small: Server) -> None:
    async def main() -> tuple[Generation, str | None]:
        async with asking(small) as model:
            said = await model.generate(0, asked(tools=(RUN_PYTHON,), tokens_max=4))
            return said, model.replicas[0]._tool_choice

    said, choice = asyncio.run(main())
    assert said.token_count == 4
    assert choice == "none"


def test_without_development_routes_nothing_is_paused_and_it_is_said(small: Server) -> None:
    async def main() -> Generation:
        async with asking(small) as model:
            assert not model.replicas[0].offer.pauses
            with pytest.raises(ConfigInvalid, match="VLLM_SERVER_DEV_MODE=1"):
                await model.update_weights("1")
            return await lane_over(model).generate(asked(tokens_max=2), (0,))

    said = asyncio.run(main())
    assert [span.policy_version for span in said.spans] == [0]


def test_a_route_it_does_not_have_is_refused_in_a_sentence(small: Server) -> None:
    async def main() -> str:
        with pytest.raises(ConfigInvalid) as caught:
            async with asking(small, api="generate"):
                pass
        return caught.value.message

    assert "--enable-scale-out" in asyncio.run(main())


def test_priorities_a_server_does_not_schedule_by_change_nothing(small: Server) -> None:
    async def main() -> list[Generation]:
        async with asking(small, priority=True) as model:
            requests = [msgspec.structs.replace(asked(), priority=n) for n in (0, 3)]
            return [await model.generate(0, one) for one in requests]

    plain, hurried = asyncio.run(main())
    assert plain.token_ids == hurried.token_ids


class Load:
    """Callers that ask one call after another; what was answered, and when."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.answers: list[tuple[float, Generation]] = []
        self._over = False
        self._tasks = [asyncio.create_task(self._caller(number)) for number in range(CALLERS)]

    async def _caller(self, number: int) -> None:
        turn = 0
        while not self._over:
            request = asked(f"rol_{number}_{turn}", f"Count from {turn}.", tokens_max=TOKENS)
            said = await self._lane.generate(request, (turn,))
            self.answers.append((time.monotonic(), said))
            turn += 1

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)  # each call is answered or this raises

    async def until_answered(self, replica: int, since: float) -> float:
        """Return how long after ``since`` that replica answered."""
        while True:
            times = [at for at, said in self.answers if at > since and said.replica == replica]
            if times:
                return times[0] - since
            await asyncio.sleep(0.05)

    def rate(self, since: float, until: float) -> float:
        """Return tokens a second of answers in between."""
        counts = [said.token_count for at, said in self.answers if since <= at < until]
        return sum(counts) / (until - since)


def test_two_servers_and_one_killed_under_load_loses_nothing(
    main_server: Server, small: Server, rig: Rig, stack: ExitStack
) -> None:
    async def main() -> None:
        async with asking(main_server, small, window=CALLERS // 2) as model:
            lane = lane_over(model, retries=20)
            load = Load(lane)
            began = time.monotonic()
            for replica in (0, 1):
                await load.until_answered(replica, began)
            began = time.monotonic()
            await asyncio.sleep(SHOWN_SECONDS)
            killed = time.monotonic()
            small.kill()
            survivor = await load.until_answered(0, killed)
            await asyncio.sleep(SHOWN_SECONDS)
            alone = time.monotonic()
            port = int(small.url.rpartition(":")[2])
            fresh = await asyncio.to_thread(started, rig, stack, port)
            back = time.monotonic()
            returned = await load.until_answered(1, back)
            again = time.monotonic()
            await asyncio.sleep(SHOWN_SECONDS)
            both = time.monotonic()
            assert lane.figures().healthy == 2
            failures = lane.totals().failures
            fresh.kill_engine()
            while lane.totals().failures == failures:
                await asyncio.sleep(0.05)
            await load.end()
            assert all(0 < said.token_count <= TOKENS for _, said in load.answers)
            assert lane.totals().failures >= 1  # it was killed with calls in flight
            no_open_ends(model)
            await until_running(main_server, 0)
            say(f"two servers: {load.rate(began, killed):.1f} tokens/s")
            say(f"one killed: the other answered {survivor:.1f} s later")
            say(f"alone: {load.rate(killed, alone):.1f} tokens/s in {alone - killed:.0f} s")
            say(f"started again: used {returned:.1f} s after it was healthy and warm")
            say(f"two again: {load.rate(again, both):.1f} tokens/s")
            say(f"{len(load.answers)} calls, {lane.totals().failures} failed tries, none lost")

    asyncio.run(main())
