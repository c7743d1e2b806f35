"""Weight updates: servers that pause, the lane that shows it, and figures of the servers."""

import asyncio
from typing import Any

import pytest

from stoker.config.tree import LaneSettings, ModelSettings
from stoker.coordinator.lane import Lane
from stoker.errors import ConfigInvalid, ModelUnavailable
from stoker.inference.base import ServerLoad
from stoker.inference.http.model import HttpModel
from stoker.inference.http.watch import Watch
from stoker.inference.policy import FunctionPolicy
from stoker.model.generation import Generation, VersionSpan
from stoker.seams.clock import SystemClock
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from support.inference import request
from support.served import SECONDS_MAX, serving

NEVER = {"scrape": "1h"}


def lane_over(model: HttpModel) -> Lane:
    """Return a lane that follows the model's pauses, as the coordinator makes it."""
    lane = Lane(model, LaneSettings(), SystemClock())
    model.watch_pauses(lane.pause, lane.resume)
    return lane


def test_c2_a_paused_server_shows_as_a_weight_update_and_work_goes_on_after_it() -> None:
    async def main() -> list[Generation]:
        async with serving("0123", token_seconds=0.001, settings=NEVER) as (server, model):
            lane = lane_over(model)
            early = asyncio.create_task(lane.generate(request("rol_early"), (0,)))
            await server.engine.until_in_flight(1)
            server.engine.pause()
            await model.look()
            before = lane.totals()
            held = asyncio.create_task(lane.generate(request("rol_held"), (1,)))
            await asyncio.sleep(0.02)
            figures = lane.figures(before)
            assert figures.paused
            assert figures.idle_while_ready_share == 0
            assert lane.ready_depth() == 1
            assert lane.room() == 0
            load = model.load(0)
            assert load.server is not None
            assert load.server.paused
            assert (load.running, load.server.running, load.server.waiting) == (1, 0, 0)
            server.engine.resume()
            await model.look()
            assert not lane.figures().paused
            return [await early, await held]

    assert [said.text for said in asyncio.run(main())] == ["0123"] * 2


def test_what_a_server_put_back_is_counted_from_the_first_look_on_and_never_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[int | Exception] = [
        5000,  # work of others, before this run
        5003,
        ModelUnavailable("no answer"),
        5004,
        2,  # it was started anew
        3,
    ]

    async def figures(_: Watch) -> ServerLoad:
        if isinstance(told := said.pop(0), Exception):
            raise told
        return ServerLoad(preemptions=told)

    async def main() -> list[int]:
        async with serving("0", settings=NEVER) as (_, model):
            await model.look()  # the one that every model begins with is over
            monkeypatch.setattr(Watch, "_figures", figures)
            model._watches = (Watch(model.replicas[0], lambda: 0),)
            lane, seen = lane_over(model), []
            while said:
                await model.look()
                seen.append(lane.figures().preemptions)
        return seen

    assert asyncio.run(main()) == [0, 3, 3, 4, 4, 5]


@pytest.mark.parametrize(
    "features", [Features(flavour="sglang"), Features(development=False)], ids=["sglang", "vllm"]
)
def test_c2_a_pause_nobody_tells_of_is_inferred_from_silence(features: Features) -> None:
    async def main() -> list[bool]:
        settings = NEVER
        async with serving("0123", features=features, settings=settings, token_seconds=0.001) as (
            server,
            model,
        ):
            lane = lane_over(model)
            seen = []
            await model.look()
            seen.append(lane.figures().paused)
            server.engine.pause()
            await model.look()
            await model.look()
            seen.append(lane.figures().paused)  # nothing of ours is in flight: it may just be idle
            call = asyncio.create_task(lane.generate(request(), (0,)))
            await server.engine.until_in_flight(1)
            await model.look()
            seen.append(lane.figures().paused)  # one silent look may be chance
            await model.look()
            seen.append(lane.figures().paused)
            server.engine.resume()
            await call
            await model.look()
            seen.append(lane.figures().paused)
            return seen

    assert asyncio.run(main()) == [False, False, False, True, False]


def test_c2_one_of_two_replicas_that_pauses_does_not_hold_the_lane() -> None:
    async def main() -> None:
        policy = FunctionPolicy("test", lambda _: "ok")
        one, two = OpenAIServer(policy), OpenAIServer(policy)
        async with asyncio.timeout(SECONDS_MAX), one, two:
            model = HttpModel((one.url, two.url), ModelSettings.model_validate(NEVER))
            await model.start()
            lane = lane_over(model)
            one.engine.pause()
            await model.look()
            assert not lane.figures().paused
            two.engine.pause()
            await model.look()
            assert lane.figures().paused
            one.engine.resume()
            await model.look()
            assert not lane.figures().paused
            await model.close()
            one.engine.resume()
            two.engine.resume()

    asyncio.run(main())


def test_c2_a_server_that_cannot_be_reached_is_not_paused() -> None:
    async def main() -> None:
        async with serving(settings=NEVER) as (server, model):
            lane = lane_over(model)
            server.engine.pause()
            await model.look()
            assert lane.figures().paused
            await server.kill()
            await model.look()
            assert not lane.figures().paused
            assert model.load(0).server is None
            with pytest.raises(ModelUnavailable):
                await model.generate(0, request())

    asyncio.run(main())


def test_a_pause_is_seen_by_the_watch_itself() -> None:
    async def main() -> None:
        async with serving(settings={"scrape": "5ms"}) as (server, model):
            paused, resumed = asyncio.Event(), asyncio.Event()
            model.watch_pauses(paused.set, resumed.set)
            server.engine.pause()
            await paused.wait()
            server.engine.resume()
            await resumed.wait()

    asyncio.run(main())


def test_c2_a_pause_that_aborts_calls_is_seen_with_the_first_of_them() -> None:
    async def main() -> tuple[str, int]:
        async with serving("0123" * 9, settings=NEVER, token_seconds=0.002) as (server, model):
            lane = lane_over(model)
            paused = asyncio.Event()

            def hold() -> None:
                lane.pause()
                paused.set()

            model.watch_pauses(hold, lane.resume)
            call = asyncio.create_task(lane.generate(request(), (0,)))
            await server.engine.until_sampled(3)
            server.engine.pause()
            server.engine.end()
            await paused.wait()  # long before the next regular look
            server.engine.resume()
            await model.look()
            return (await call).text, lane.totals().retries

    assert asyncio.run(main()) == ("0123" * 9, 0), "it goes on from what it had"


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_c5_a_weight_update_in_the_middle_of_a_run_is_in_the_spans(flavour: Any) -> None:
    async def main() -> tuple[list[Generation], list[str]]:
        features = Features(flavour=flavour)
        async with serving("0123", features=features, settings=NEVER) as (server, model):
            lane = lane_over(model)
            one = await lane.generate(request("rol_a"), (0,))
            seen: list[bool] = []

            def hold() -> None:
                seen.append(True)
                lane.pause()

            def release() -> None:
                seen.append(False)
                lane.resume()

            model.watch_pauses(hold, release)
            mode: Any = "keep" if flavour == "sglang" else "wait"
            folder = "/weights" if flavour == "sglang" else None
            await model.update_weights("step-3", folder=folder, mode=mode)
            assert seen == [True, False]
            two = await lane.generate(request("rol_b"), (1,))
            return [one, two], [one.path for one in server.requests if one.method == "POST"]

    (one, two), posts = asyncio.run(main())
    assert one.spans == (VersionSpan(0, 0, 5),)
    assert two.spans == (VersionSpan(3, 0, 5),)
    expected = {
        "vllm": [
            "/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        ],
        "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
    }  # fmt: skip
    assert [path for path in posts if "chat" not in path][-len(expected[flavour]) :] == expected[
        flavour
    ]


def test_c5_calls_held_by_an_update_keep_no_prefixes_of_the_old_weights() -> None:
    async def main() -> list[int]:
        async with serving("0123", settings=NEVER, token_seconds=0.001) as (server, model):
            held = asyncio.create_task(model.generate(0, request("rol_held")))
            await server.engine.until_in_flight(1)
            hits = [server.engine.prefix_hits]
            await model.update_weights("2", mode="keep")
            await held
            for name in ("rol_a", "rol_b"):
                await model.generate(0, request(name))
                hits.append(server.engine.prefix_hits)
            return hits

    before, first, second = asyncio.run(main())
    assert before == first < second  # the same prompt: not in the cache, then put there


def test_c5_a_cache_that_keeps_the_old_weights_prefixes_is_said() -> None:
    async def main() -> None:
        async with serving("x", settings=NEVER) as (server, model):
            link = model.replicas[0].link
            honest = link.post

            async def keeping(path: str, body: object, request_id: str = "") -> Any:
                answer = await honest(path, body, request_id)
                return {"success": False} if path.startswith("/reset_prefix_cache") else answer

            link.post = keeping  # type: ignore[method-assign]
            with pytest.raises(ModelUnavailable, match="keeps prefixes of the old weights"):
                await model.update_weights("2")
            assert not server.engine.paused

    asyncio.run(main())


def test_an_update_the_server_does_not_offer_is_refused_and_leaves_it_running() -> None:
    async def main() -> str:
        async with serving("x", features=Features(development=False), settings=NEVER) as (_, model):
            lane = lane_over(model)
            with pytest.raises(ConfigInvalid, match="VLLM_SERVER_DEV_MODE=1"):
                await model.update_weights("2")
            return (await lane.generate(request(), (0,))).text

    assert asyncio.run(main()) == "x"


def test_an_update_that_breaks_half_way_leaves_the_servers_running() -> None:
    async def main() -> str:
        async with serving("x", settings=NEVER) as (server, model):
            lane = lane_over(model)
            link = model.replicas[0].link
            honest = link.post

            async def breaking(path: str, body: object, request_id: str = "") -> Any:
                if path == "/collective_rpc":
                    raise ModelUnavailable("the engine died")
                return await honest(path, body, request_id)

            link.post = breaking  # type: ignore[method-assign]
            with pytest.raises(ModelUnavailable, match="the engine died"):
                await model.update_weights("2")
            assert not server.engine.paused
            return (await lane.generate(request(), (0,))).text

    assert asyncio.run(main()) == "x"


def test_what_a_server_reports_is_in_the_load() -> None:
    async def main(flavour: Any) -> None:
        async with serving(
            "0123456789", features=Features(flavour=flavour), settings=NEVER, token_seconds=0.001
        ) as (server, model):
            await model.generate(0, request())
            task = asyncio.create_task(model.generate(0, request("rol_b")))
            await server.engine.until_in_flight(1)
            await model.look()
            load = model.load(0)
            await task
            assert load.server is not None
            assert load.server.running == load.running == 1
            assert load.server.kv_used_share == load.kv_used_share == 0.01
            assert load.server.tokens_prefilled == server.engine.tokens_prefilled
            assert load.server.prefix_hits > 0
            assert load.tokens_sampled == 11  # ours; the server's hold the trial at the start too
            assert load.server.tokens_sampled >= 12
            assert 0 < load.active_seconds <= load.sequence_seconds
            if flavour == "vllm":
                assert load.server.waiting_by_reason == {"capacity": 0, "deferred": 0}

    for flavour in ("vllm", "sglang"):
        asyncio.run(main(flavour))
