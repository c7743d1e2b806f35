"""Servers that refuse, break, hang or die under load, and callers that change their mind."""

import asyncio
from typing import Any

import pytest

from stoker.config.tree import LaneSettings, ModelSettings
from stoker.coordinator.lane import Lane
from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.base import Model
from stoker.inference.http.model import HttpModel
from stoker.inference.policy import FunctionPolicy
from stoker.model.generation import FinishReason, Generation
from stoker.seams.clock import SystemClock
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import request
from support.served import SECONDS_MAX, serving

FLAVOURS = pytest.mark.parametrize("flavour", ["vllm", "sglang", "openai"])


def lane_over(model: Model, **keys: Any) -> Lane:
    """Return a lane in real time whose pauses are short."""
    settings = LaneSettings.model_validate({"retry_delay": "1ms", **keys})
    return Lane(model, settings, SystemClock(), jitter=lambda seconds: seconds / 100)


@FLAVOURS
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("status", {"status": 429}),
        ("status", {"status": 500}),
        ("status", {"status": 503}),
        ("close", {}),
        ("refuse", {}),
        ("html", {}),
    ],
)
def test_c1_what_a_retry_helps_is_unavailable_and_the_lane_retries_it(
    flavour: Any, kind: Any, fields: dict[str, int]
) -> None:
    async def main() -> Generation:
        async with serving("fine", features=Features(flavour=flavour)) as (server, model):
            server.fail(kind, **fields)
            with pytest.raises(ModelUnavailable) as caught:
                await model.generate(0, request())
            assert caught.value.retryable
            assert caught.value.context["replica"] == "0"
            server.fail(kind, 2, **fields)
            return await lane_over(model).generate(request(), (0,))

    assert asyncio.run(main()).text == "fine"


def test_c1_a_fault_that_stays_ends_typed_after_bounded_tries() -> None:
    async def main() -> int:
        async with serving() as (server, model):
            server.fail("status", 1000, status=500)
            before = len(server.requests)
            with pytest.raises(ModelUnavailable, match=r"failed 3 times.*500.*injected"):
                await lane_over(model, retries=2).generate(request(), (0,))
            asked = server.requests[before:]
            return sum(one.path == "/v1/chat/completions" for one in asked)

    assert asyncio.run(main()) == 3


def test_c1_arrays_of_different_length_are_not_handed_on() -> None:
    async def main() -> None:
        async with serving("abc") as (server, model):
            server.fail("shifted")
            with pytest.raises(ModelUnavailable, match="4 token ids and 3 log-probabilities"):
                await model.generate(0, request())

    asyncio.run(main())


def test_c1_a_server_that_hangs_is_left_after_the_call_timeout() -> None:
    async def main() -> None:
        async with serving("late") as (server, model):
            server.fail("hang")
            lane = lane_over(model, call_timeout="300ms")
            assert (await lane.generate(request(), (0,))).text == "late"
            assert lane.totals().failures == 1
            assert model.load(0).running == 0

    asyncio.run(main())


def test_c1_retry_after_is_said_and_heeded_where_nobody_else_can_be_asked() -> None:
    async def main() -> tuple[float, float]:
        async with serving() as (server, model):
            server.fail("status", status=429, retry_after="0.7")
            with pytest.raises(ModelUnavailable) as caught:
                await model.generate(0, request())
            waited: list[float] = []

            def jitter(seconds: float) -> float:
                waited.append(seconds)
                return 0.0

            server.fail("status", status=429, retry_after="0.7")
            settings = LaneSettings.model_validate({"retry_delay": "1ms"})
            lane = Lane(model, settings, SystemClock(), jitter=jitter)
            await lane.generate(request(), (0,))
            return float(caught.value.context["retry_after_seconds"]), waited[0]

    assert asyncio.run(main()) == (0.7, 0.7)


@FLAVOURS
@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_c1_what_no_retry_helps_is_refused_once(flavour: Any, status: int) -> None:
    async def main() -> None:
        async with serving(features=Features(flavour=flavour)) as (server, model):
            server.fail("status", 5, status=status, message="no such thing")
            before = len(server.requests)
            with pytest.raises(ModelRefused, match=f"{status}: no such thing") as caught:
                await lane_over(model).generate(request(), (0,))
            assert not caught.value.retryable
            sampling = [one for one in server.requests[before:] if one.method == "POST"]
            assert len(sampling) == 1

    asyncio.run(main())


def test_c1_a_call_aborted_before_it_has_tokens_is_tried_again() -> None:
    async def main() -> None:
        async with serving("x") as (_, model):
            replica = model.replicas[0]
            honest = replica.link.post

            async def aborted(path: str, body: object, request_id: str = "") -> Any:
                answer = await honest(path, body, request_id)
                if "choices" in answer:
                    answer["choices"][0] |= {"finish_reason": "abort", "token_ids": []}
                    answer["choices"][0]["logprobs"] = {"content": []}
                return answer

            replica.link.post = aborted  # type: ignore[method-assign]
            with pytest.raises(ModelUnavailable, match="aborted call rol_a/0 after 0 tokens"):
                await model.generate(0, request())

    asyncio.run(main())


def test_the_end_of_the_context_is_a_cut_and_not_a_failure() -> None:
    async def rest() -> Generation:
        async with serving("0123456789", features=Features(context_max=20)) as (_, model):
            return await model.generate(0, request())

    # A prompt of 8 tokens leaves 12 of the 100,000 that were asked for; 11 are needed.
    assert asyncio.run(rest()).finish_reason is FinishReason.STOP

    async def full() -> Generation:
        async with serving("0123456789", features=Features(context_max=8)) as (_, model):
            return await model.generate(0, request())

    assert asyncio.run(full()).finish_reason is FinishReason.LENGTH


def test_two_replicas_and_one_killed_under_load_loses_nothing() -> None:
    async def main() -> tuple[list[Generation], set[int]]:
        policy = FunctionPolicy("test", lambda _: "0123456789")
        first, second = (OpenAIServer(policy, token_seconds=0.002) for _ in range(2))
        async with asyncio.timeout(SECONDS_MAX), first, second:
            settings = ModelSettings(window=4)
            model = HttpModel((first.url, second.url), settings)
            await model.start()
            lane = lane_over(model, retries=20, retry_delay="20ms")
            calls = [
                asyncio.create_task(lane.generate(request(f"rol_{number}"), (number,)))
                for number in range(60)
            ]
            await first.engine.until_in_flight(2)
            await first.kill()
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await first.start()  # the same port, as a server that is restarted
            answers = await asyncio.gather(*calls)
            after = 0
            while lane.figures().healthy < 2:
                # The lane rests a replica that failed; it is back with its first answer.
                after += 1
                await lane.generate(request(f"rol_after{after}"), (1000 + after,))
            assert model.load(0).running == model.load(1).running == 0
            await model.close()
            return answers, {one.replica for one in answers}

    answers, replicas = asyncio.run(main())
    assert [one.text for one in answers] == ["0123456789"] * 60
    assert 1 in replicas


@FLAVOURS
def test_a_cancel_at_each_await_point_leaks_nothing_on_either_side(flavour: Any) -> None:
    async def main() -> int:
        features = Features(flavour=flavour)
        async with serving("abc", features=features, settings={"scrape": "1h"}) as (server, model):
            await model.look()
            await model.generate(0, request())
            session = model.replicas[0].link._session
            assert session is not None
            connector = session.connector
            assert connector is not None
            turns, cancelled = 0, 0
            while True:
                task = asyncio.create_task(model.generate(0, request()))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                done = await asyncio.wait({task})
                await server.engine.until_quiet()
                assert model.load(0).running == 0
                while model.replicas[0]._aborts:
                    await asyncio.sleep(0)
                assert not connector._acquired, turns
                if not task.cancelled():
                    assert done[0].pop().result().text == "abc"
                    break
                cancelled += 1
                turns += 1
            await model.close()
            assert not connector._conns
            while server.connections:
                await asyncio.sleep(0.001)
            return cancelled

    assert asyncio.run(main()) > 5


def test_sglang_is_told_which_call_nobody_waits_for() -> None:
    async def main() -> list[str]:
        features = Features(flavour="sglang")
        async with serving("x" * 100, features=features, token_seconds=0.01) as (server, model):
            task = asyncio.create_task(model.generate(0, request("rol_gone")))
            await server.engine.until_in_flight(1)
            task.cancel()
            await asyncio.wait({task})
            await server.engine.until_quiet()
            await model.close()
            return [one.json()["rid"] for one in server.requests if "abort" in one.path]

    (told,) = asyncio.run(main())
    assert told.startswith("rol_gone/0-")


def test_each_try_is_a_request_of_its_own_to_the_server() -> None:
    async def main() -> list[str]:
        async with serving() as (server, model):
            await model.generate(0, request())
            await model.generate(0, request())
            return [call.request_id for call in server.engine.calls[-2:]]

    one, two = asyncio.run(main())
    assert one != two
    assert one.startswith("rol_a/0-")
    assert two.startswith("rol_a/0-")
