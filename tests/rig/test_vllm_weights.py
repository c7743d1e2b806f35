"""Pauses and weight updates on a real server, while calls are in flight and a run goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.config.load import load_settings
from stoker.config.tree import ModelSettings
from stoker.coordinator.execute import execute
from stoker.coordinator.lane_tries import TakenBack
from stoker.coordinator.request import RunReport, RunRequest
from stoker.inference.http.model import HttpModel
from stoker.model.generation import Generation, VersionSpan, unpack_logprobs, unpack_tokens
from support.command import stoker, wait_until_quiet
from support.vllm_calls import (
    LOOK_SECONDS,
    SECONDS_MAX,
    asked,
    asking,
    lane_over,
    say,
    until_sampled,
)
from support.vllm_server import Server
from support.vllm_weights import halve_norms, kept

LONG = "steam " * 160
"""More than one block of the prefix cache (128 tokens)."""
ROLLOUTS = 12
PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="10m")
async def talk(ctx, task):
    chat = ctx.chat(task.data["prompt"])
    known = b""
    for _ in range(4):
        said = (await ctx.generate(chat, temperature=0.0, tokens_max=6)).generation
        if not said.prompt_ids.startswith(known) or said.rerendered:
            return 0.0
        known = said.prompt_ids + said.token_ids
        chat.user("Go on.")
    return 1.0
"""


@pytest.fixture
def updating(main_server: Server) -> Iterator[Server]:
    """Yield the main server; its weights and their name are given back in the end."""
    with kept(main_server.folder):
        yield main_server
    main_server.post("/pause?mode=wait&clear_cache=false", {})
    main_server.post("/collective_rpc", {"method": "reload_weights"})
    main_server.post("/reset_prefix_cache?reset_running_requests=true", {})
    main_server.post("/update_weight_version", {"new_version": "default"})
    main_server.post("/resume", {})


def test_c2_a_paused_server_shows_as_a_weight_update_and_work_goes_on_after_it(
    main_server: Server,
) -> None:
    async def main() -> list[Generation]:
        async with asking(main_server) as model:
            lane = lane_over(model)
            early = asyncio.create_task(lane.generate(asked("rol_early", tokens_max=40), (0,)))
            await until_sampled(main_server, 2)
            await asyncio.to_thread(main_server.post, "/pause?mode=keep&clear_cache=false", {})
            try:
                await model.look()
                before = lane.totals()
                held = asyncio.create_task(lane.generate(asked("rol_held"), (1,)))
                direct = asyncio.create_task(model.generate(0, asked("rol_direct", tokens_max=4)))
                await asyncio.sleep(1.0)  # the figures are of a time in which nothing may happen
                figures = lane.figures(before)
                assert figures.paused
                assert figures.idle_while_ready_share == 0
                assert (lane.ready_depth(), lane.room()) == (1, 0)
                assert not early.done()
                assert not direct.done()  # the server took it, and hangs
                sampled = main_server.figure("vllm:generation_tokens_total")
                await asyncio.sleep(1.0)
                assert main_server.figure("vllm:generation_tokens_total") == sampled
            finally:
                await asyncio.to_thread(main_server.post, "/resume", {})
            await model.look()
            assert not lane.figures().paused
            return list(await asyncio.gather(early, held, direct))

    assert [one.token_count for one in asyncio.run(main())] == [40, 16, 4]


def test_c5_weights_that_change_under_a_call_are_never_newer_than_its_span(
    updating: Server,
) -> None:
    async def main() -> dict[str, Generation]:
        async with asking(updating) as model:
            lane = lane_over(model)
            said = {"before": await lane.generate(asked("rol_a"), (0,))}
            held = asyncio.create_task(lane.generate(asked("rol_b", tokens_max=40), (1,)))
            await until_sampled(updating, 2)
            await asyncio.to_thread(halve_norms, updating.folder)
            await model.update_weights("step-7", mode="keep")
            said["held"] = await held
            said["after"] = await lane.generate(asked("rol_c"), (2,))
            return said

    said = asyncio.run(main())
    assert said["before"].spans == (VersionSpan(0, 0, 16),)
    count = said["held"].token_count
    assert said["held"].spans == (VersionSpan(0, 0, count),)  # began under 0: never understated
    assert said["after"].spans == (VersionSpan(7, 0, 16),)
    assert said["before"].prompt_ids == said["after"].prompt_ids
    first = [unpack_logprobs(said[name].logprobs)[0] for name in ("before", "after")]
    assert abs(first[0] - first[1]) > 0.05  # half the norm: other probabilities
    # The call that was held began as the one before, and went on under the flatter weights.
    assert unpack_tokens(said["held"].token_ids)[:2] == unpack_tokens(said["before"].token_ids)[:2]
    say(f"log-probability of the first token {first[0]:.3f} before and {first[1]:.3f} after")


def test_c5_weights_that_change_inside_a_turn_are_in_its_spans(updating: Server) -> None:
    async def main() -> Generation:
        async with asking(updating, api="generate") as model:
            held = asyncio.create_task(model.generate(0, asked(tokens_max=40)))
            await until_sampled(updating, 2)
            await asyncio.to_thread(halve_norms, updating.folder)
            await model.update_weights("step-7", mode="keep")
            return await held

    said = asyncio.run(main())
    first, second = said.spans
    assert (first.policy_version, second.policy_version) == (0, 7)
    assert 0 == first.start < first.end == second.start < second.end == said.token_count
    assert len(unpack_logprobs(said.logprobs)) == said.token_count
    say(f"{first.end} of {said.token_count} tokens by the old weights, the rest by the new ones")


@pytest.mark.parametrize("api", ["auto", "generate"])
def test_c5_an_aborted_turn_goes_on_from_its_tokens(main_server: Server, api: str) -> None:
    async def main() -> tuple[Generation, Generation]:
        async with asking(main_server, api=api) as model:
            lane = lane_over(model)
            whole = await lane.generate(asked("rol_whole", tokens_max=40), (0,))
            call = asyncio.create_task(lane.generate(asked("rol_cut", tokens_max=40), (1,)))
            await until_sampled(main_server, 5)
            lane.pause("test")
            assert await lane.take_back() == TakenBack(continued=1, anew=0)
            name = {"new_version": "step-7"}
            await asyncio.to_thread(main_server.post, "/update_weight_version", name)
            lane.resume("test")
            return whole, await call

    try:
        whole, turn = asyncio.run(main())
    finally:
        main_server.post("/update_weight_version", {"new_version": "default"})
    assert turn.token_ids == whole.token_ids, "the weights have another name only"
    assert (turn.text, turn.finish_reason) == (whole.text, whole.finish_reason)
    first, second = turn.spans
    assert (first.policy_version, second.policy_version) == (0, 7)
    assert 0 == first.start < first.end == second.start < second.end == turn.token_count
    assert unpack_logprobs(turn.logprobs) == pytest.approx(
        unpack_logprobs(whole.logprobs), abs=1e-3
    )
    assert not turn.reissued
    say(f"aborted after {first.end} of {turn.token_count} tokens, and gone on with")


def test_c5_no_prefix_of_the_old_weights_is_served_after_an_update(updating: Server) -> None:
    async def main() -> tuple[list[float], list[float]]:
        async with asking(updating) as model:
            busy = asyncio.create_task(model.generate(0, asked("rol_busy", tokens_max=60)))
            await model.generate(0, asked("rol_a", LONG, tokens_max=2))  # now in the cache
            await until_sampled(updating, 1)
            await asyncio.to_thread(halve_norms, updating.folder)
            await model.update_weights("1", mode="keep")  # under the call that is in flight
            assert not busy.done()
            cached = await model.generate(0, asked("rol_b", LONG, tokens_max=2))
            await busy
            await asyncio.to_thread(updating.post, "/reset_prefix_cache", {})
            fresh = await model.generate(0, asked("rol_c", LONG, tokens_max=2))
            return unpack_logprobs(cached.logprobs), unpack_logprobs(fresh.logprobs)

    cached, fresh = asyncio.run(main())
    assert cached == pytest.approx(fresh, abs=1e-3)


class Answers:
    """A model that counts what it answered, and lets others wait for it."""

    def __init__(self, model: HttpModel) -> None:
        self.count = 0
        honest = model.generate

        async def counted(replica: int, request: Any) -> Generation:
            said = await honest(replica, request)
            self.count += 1
            return said

        model.generate = counted  # type: ignore[method-assign]

    async def reached(self, count: int) -> None:
        while self.count < count:
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def running(place: Path, model: HttpModel) -> AsyncIterator[asyncio.Task[RunReport]]:
    (place / "program.py").write_text(PROGRAM)
    lines = [
        json.dumps({"task_id": str(n), "data": {"prompt": f"Tell me about the number {n}."}})
        for n in range(ROLLOUTS)
    ]
    (place / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    request = RunRequest(
        program=place / "program.py", program_name=None, tasks=place / "tasks.jsonl",
        model="http:rig", settings=load_settings(sets=["workers.count=0"]).settings,
        runs_directory=place / "runs",
    )  # fmt: skip
    task = asyncio.create_task(execute(request, model=model))
    async with asyncio.timeout(SECONDS_MAX):
        yield task


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_c5_a_weight_reload_in_the_middle_of_a_run_is_in_its_rows(
    tmp_path: Path, updating: Server, mode: Any
) -> None:
    async def main() -> RunReport:
        model = HttpModel((updating.url,), ModelSettings(window=8))
        await model.start()
        answers = Answers(model)
        async with running(tmp_path, model) as run:
            await answers.reached(ROLLOUTS)
            await asyncio.to_thread(halve_norms, updating.folder)
            await model.update_weights("step-1", mode=mode)
            return await run

    try:
        report = asyncio.run(main())
    finally:
        wait_until_quiet(tmp_path)
    assert report.snapshot.outcomes == {"completed": ROLLOUTS}
    assert report.snapshot.reward_mean == 1.0  # every history went on by exact ids
    run = report.snapshot.run_id
    answer = stoker(tmp_path, "export", run, "--out", "rows.jsonl")
    assert answer.code == 0, answer
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == ROLLOUTS  # one segment each
    versions = [[span["policy_version"] for span in row["spans"]] for row in rows]
    assert all(one == sorted(one) for one in versions)
    assert any(set(one) == {0, 1} for one in versions)
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["mask"])
        assert sum(row["mask"]) == sum(span["end"] - span["start"] for span in row["spans"])
    both = sum(set(one) == {0, 1} for one in versions)
    say(f"{mode}: {both} of {ROLLOUTS} rows hold both versions")
