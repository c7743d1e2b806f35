"""Policies published into a whole run: versions on spans, staleness, calls in flight, marks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import stoker
from stoker.coordinator.view import RunSnapshot
from stoker.errors import BadInput, ConfigInvalid
from stoker.inference.policy import FunctionPolicy
from stoker.testing.openai_server import OpenAIServer
from stoker.testing.openai_server_engine import Features
from stoker.training.groups import Group
from support.command import wait_until_quiet
from support.training import Engine, lay_out, model_of, request

SECONDS = 60


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    wait_until_quiet(tmp_path)


async def rest(run: stoker.Run) -> list[Group]:
    async with asyncio.timeout(SECONDS):
        return [group async for group in run.groups()]


def spans_of(group: Group) -> list[tuple[int, int, int]]:
    (one,) = group.rollouts
    return [(span.policy_version, span.start, span.end) for row in one.rows for span in row.spans]


def loads(engine: Engine, version: int) -> object:
    async def load() -> None:
        engine.version = version

    return load


def test_c5_each_mode_does_with_calls_in_flight_what_it_says(place: Path) -> None:
    lay_out(place, ["a"])

    async def one(mode: str) -> tuple[list[tuple[int, int, int]], int, bool]:
        engine = Engine(gated=True)
        async with stoker.start_run(request(place), model=model_of(engine)) as run:
            (first,) = await engine.until(1)
            gate = engine.gates[first]
            publishing = asyncio.create_task(
                run.publish_policy(1, mode, weights=loads(engine, 1))  # type: ignore[arg-type]
            )
            if mode == "drain":
                assert engine.version == 0, "the call in flight is answered first"
                gate.set()
            async with asyncio.timeout(SECONDS):
                await publishing
            if mode != "drain":
                (again,) = await engine.until(1)
                engine.gates[again].set()
            (group,) = await rest(run)
            assert run.policy_version == 1
            return spans_of(group), len(engine.asked), gate.is_set()

    kept, drained, aborted = (asyncio.run(one(mode)) for mode in ("keep", "drain", "abort"))
    assert kept == ([(0, 2, 3), (1, 3, 4)], 1, True), "it went on, and says which token is whose"
    assert drained == ([(0, 2, 4)], 1, True)
    assert aborted == ([(1, 2, 4)], 2, False), "it was taken back and asked anew"


def test_tokens_of_too_old_a_policy_truncate_with_that_reason(place: Path) -> None:
    lay_out(place, ["a", "b"], turns=2)
    engine = Engine(gated=True)

    async def trainer() -> None:
        asked = request(place, "training.staleness_max=1")
        async with stoker.start_run(asked, model=model_of(engine)) as run:
            for call in await engine.until(2):  # first turns, under version 0
                engine.gates[call].set()
            seconds = await until_second_turns(engine)
            await run.publish_policy(1, weights=loads(engine, 1))  # type: ignore[arg-type]
            assert len(engine.gates) == 2, "one version behind is allowed"
            done = next(call for call in seconds if "/" in call)
            engine.gates[done].set()
            groups = run.groups()
            async with asyncio.timeout(SECONDS):
                whole = await anext(groups)
            await run.publish_policy(2, weights=loads(engine, 2))  # type: ignore[arg-type]
            async with asyncio.timeout(SECONDS):
                cut = await anext(groups)
            assert whole.rollouts[0].outcome.kind == "completed"
            outcome = cut.rollouts[0].outcome
            assert (outcome.kind, outcome.reward) == ("truncated", None)
            assert outcome.reason.startswith("staleness: tokens of policy version 0, 2 versions")
            assert cut.rollouts[0].rows[0].sampled_tokens == 2, "what it had sampled is kept"

    asyncio.run(trainer())


async def until_second_turns(engine: Engine) -> list[str]:
    """Wait until both calls under way are second turns."""
    async with asyncio.timeout(SECONDS), engine.news:
        await engine.news.wait_for(lambda: len(engine.asked) == 4 and len(engine.gates) == 2)
    return list(engine.gates)


def test_b17_groups_of_a_policy_that_was_given_up_are_marked(place: Path) -> None:
    lay_out(place, ["a", "b", "c"])

    async def first() -> dict[str, object]:
        engine = Engine(gated=True)
        engine.version = 1
        async with stoker.start_run(request(place, run="r"), model=model_of(engine)) as run:
            await run.publish_policy(1)  # its engine has it already
            await answer(engine, 3, 1)
            groups = run.groups()
            kept = await anext(groups)
            state = run.state()
            await run.commit(kept)
            await run.publish_policy(2, weights=loads(engine, 2))  # type: ignore[arg-type]
            await answer(engine, 2, 1)
            assert (await anext(groups)).policy_versions == (1, 2)  # asked before, answered after
            return state

    async def second(state: dict[str, object]) -> None:
        engine = Engine(gated=True, prompts=False)
        engine.version = 2  # the servers still have the weights that are given up
        async with stoker.start_run(request(place, run="r"), model=model_of(engine)) as run:
            await run.restore(state)
            assert run.policy_version == 1
            with pytest.raises(BadInput, match="by a policy that was given up"):
                await run.publish_policy(2)
            await answer(engine, 1, 1)  # sampled under 2 before anybody publishes
            groups = await rest(run)
            assert [(one.policy_versions, one.abandoned) for one in groups] == [
                ((1,), ()),
                ((1, 2), (2,)),
                ((2,), (2,)),
            ]
            assert not groups[-1].rollouts[0].rows[0].spans, "marked all the same"
            await run.publish_policy(1)  # the restored weights again
            await run.publish_policy(3)

    asyncio.run(second(asyncio.run(first())))


async def answer(engine: Engine, under_way: int, count: int) -> None:
    """Wait for the calls under way, let the first ``count`` be answered."""
    for call in (await engine.until(under_way))[:count]:
        engine.gates[call].set()
    await engine.until(under_way - count)


def test_what_cannot_be_published_says_so(place: Path) -> None:
    lay_out(place, ["a"])

    async def trainer() -> None:
        engine = Engine()
        async with stoker.start_run(request(place), model=model_of(engine)) as run:
            with pytest.raises(ConfigInvalid, match="not a place"):
                await run.publish_policy(1, weights="/weights")
            await run.publish_policy(1, weights=loads(engine, 1))  # type: ignore[arg-type]
            with pytest.raises(BadInput, match="publish 2 or more"):
                await run.publish_policy(0)
            with pytest.raises(BadInput, match="allowed: keep, drain, abort"):
                await run.publish_policy(2, "pause")  # type: ignore[arg-type]
            assert run.policy_version == 1

    asyncio.run(trainer())


def test_c2_c5_a_server_updated_by_its_run_keeps_the_turn_and_shows_why_it_waits(
    place: Path,
) -> None:
    lay_out(place, ["a"])
    seen: list[RunSnapshot] = []

    async def trainer() -> tuple[Group, list[str]]:
        features = Features(weight_spans=True)
        async with OpenAIServer(
            FunctionPolicy("digits", lambda _request: "0123456789"),
            features=features,
            token_seconds=0.05,
        ) as server:
            asked = msgspec.structs.replace(request(place, "model.scrape=1h"), model=server.url)
            async with stoker.start_run(asked, observer=seen.append) as run:
                await server.engine.until_in_flight(1)

                async def transfer() -> None:
                    assert server.engine.paused
                    before = len(seen)
                    async with asyncio.timeout(SECONDS):
                        while len(seen) < before + 2:  # observers are told four times a second
                            await asyncio.sleep(0.01)

                await run.publish_policy(7, weights=transfer)
                (group,) = await rest(run)
            return group, [request.path for request in server.requests]

    group, paths = asyncio.run(trainer())
    assert any(one.lane.paused for one in seen), "a weight update is told as one"
    assert all(one.lane.idle_while_ready_share < 0.5 for one in seen)
    order = [path for path in paths if path.startswith(("/pause", "/reset", "/update", "/resume"))]
    assert order == ["/pause", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert group.rollouts[0].outcome.kind == "completed"
    versions = [version for version, _, _ in spans_of(group)]
    assert versions in ([7], [0, 7], [0]), "rising, as far as the turn had come when it paused"


def test_c5_an_aborted_turn_goes_on_and_is_one_turn_of_its_group_and_of_a_replay(
    place: Path,
) -> None:
    lay_out(place, ["a"], turns=2)
    said = "0123456789" * 3

    async def trainer() -> tuple[Group, list[str]]:
        async with OpenAIServer(
            FunctionPolicy("digits", lambda _: said), token_seconds=0.02
        ) as server:
            asked = msgspec.structs.replace(
                request(place, "program.check_replays=1", run="r"), model=server.url
            )
            async with stoker.start_run(asked) as run:
                await server.engine.until_sampled(3)

                async def nothing() -> None:
                    assert server.engine.in_flight == 0, "calls are ended before weights change"

                await run.publish_policy(7, "abort", weights=nothing)
                (group,) = await rest(run)
            return group, [request.path for request in server.requests]

    group, paths = asyncio.run(trainer())
    assert "/abort_requests" in paths
    (one,) = group.rollouts
    assert one.outcome.kind == "completed", "and its replay asked for nothing else"
    spans = [(span.policy_version, span.end - span.start) for span in one.rows[-1].spans]
    assert [version for version, _ in spans] == [0, 7, 7], "two parts of the first turn"
    assert sum(count for _, count in spans) == 2 * (len(said) + 1), "two turns, whole"
    log = (place / "runs" / "r" / "logs" / "coordinator.log").read_text()
    assert '"continued":1' in log.replace(" ", "")
    assert "check_failed" not in log
