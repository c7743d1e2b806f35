"""A model of the embedding process: checked where it enters, cancelled and paused where it is."""

import asyncio
from array import array
from typing import Any

import msgspec
import pytest

from stoker.config.tree import LaneSettings
from stoker.coordinator.lane import Lane
from stoker.errors import ConfigInvalid, ModelRefused, ModelUnavailable
from stoker.inference.callable import CallableModel, flaw
from stoker.inference.open import open_model
from stoker.model.generation import (
    GenerateRequest,
    Generation,
    LogprobKind,
    VersionSpan,
    pack_logprobs,
    pack_tokens,
)
from stoker.testing.virtual_clock import VirtualClock, run_virtual
from support.inference import request, turns_of_loop

GOOD = Generation(
    text="ab",
    prompt_ids=pack_tokens([1, 2, 3]),
    token_ids=pack_tokens([4, 5]),
    logprobs=pack_logprobs([-0.5, -0.25]),
    logprob_kind=LogprobKind.SAMPLED,
    spans=(VersionSpan(7, 0, 1), VersionSpan(8, 1, 2)),
)


def answering(answer: Any) -> CallableModel:
    async def generate(asked: GenerateRequest) -> Generation:
        del asked
        if isinstance(answer, Exception):
            raise answer
        returned: Generation = answer
        return returned

    return CallableModel(generate, window=2, name="mine")


def test_what_the_owner_samples_comes_back_as_it_is() -> None:
    model = answering(GOOD)
    assert run_virtual(model.generate(0, request())) is GOOD
    assert model.info().name == "callable:mine"
    assert model.info().replicas[0].window == 2
    load = model.load(0)
    assert (load.tokens_sampled, load.tokens_prefilled, load.running) == (2, 3, 0)
    text_only = Generation(text="no ids at all")
    assert run_virtual(answering(text_only).generate(0, request())) is text_only


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": pack_logprobs([-1.0])}, "2 token ids and 1 log-probabilities"),
        ({"spans": ()}, "end at 0 of 2 tokens"),
        ({"spans": (VersionSpan(7, 0, 1),)}, "end at 1 of 2 tokens"),
        ({"spans": (VersionSpan(7, 1, 2),)}, "have gaps"),
        ({"spans": (VersionSpan(7, 0, 2), VersionSpan(8, 2, 2))}, "have gaps"),
        ({"token_ids": array("h", [1, 2, 3]).tobytes()}, "int32 arrays"),
    ],
)
def test_shifted_arrays_do_not_get_in(changes: dict[str, Any], says: str) -> None:
    model = answering(msgspec.structs.replace(GOOD, **changes))
    with pytest.raises(ModelUnavailable, match=says):
        run_virtual(model.generate(0, request()))
    assert not flaw(GOOD)


def test_what_is_no_generation_does_not_get_in() -> None:
    with pytest.raises(ModelUnavailable, match="'text' is no Generation"):
        run_virtual(answering("text").generate(0, request()))


def test_what_the_engine_raises_is_one_try_s_failure_and_typed_errors_pass() -> None:
    with pytest.raises(ModelUnavailable, match=r"raised RuntimeError for call rol_a/0: CUDA"):
        run_virtual(answering(RuntimeError("CUDA")).generate(0, request()))
    with pytest.raises(ModelRefused, match="too long"):
        run_virtual(answering(ModelRefused("too long")).generate(0, request()))


def test_a_cancelled_call_is_cancelled_in_the_engine() -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def generate(asked: GenerateRequest) -> Generation:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(asked.rollout_id)
            raise AssertionError

        model = CallableModel(generate, window=1)
        task = asyncio.create_task(model.generate(0, request("rol_gone")))
        await turns_of_loop()
        assert model.load(0).running == 1
        task.cancel()
        await asyncio.wait({task})
        assert model.load(0).running == 0
        return ended

    assert run_virtual(main()) == ["rol_gone"]


def test_c2_the_owner_s_weight_update_holds_the_lane() -> None:
    async def main() -> None:
        model = answering(GOOD)
        lane = Lane(model, LaneSettings(), VirtualClock())
        model.pause()
        model.watch_pauses(lane.pause, lane.resume)
        held = asyncio.create_task(lane.generate(request(), (0,)))
        await asyncio.sleep(3)
        assert lane.figures().paused
        assert not held.done()
        model.resume()
        assert await held is GOOD

    run_virtual(main())


def test_active_time_is_that_of_our_calls() -> None:
    async def main() -> tuple[float, float]:
        async def generate(asked: GenerateRequest) -> Generation:
            del asked
            await asyncio.sleep(2)
            return GOOD

        model = CallableModel(generate, window=4)
        await asyncio.sleep(1)
        await asyncio.gather(*(model.generate(0, request()) for _ in range(3)))
        await asyncio.sleep(1)
        load = model.load(0)
        return load.active_seconds, load.sequence_seconds

    assert run_virtual(main()) == (2.0, 6.0)


def test_the_command_line_says_how_a_callable_model_is_handed_over(tmp_path: Any) -> None:
    with pytest.raises(ConfigInvalid, match=r"execute\(request, model=CallableModel"):
        open_model("callable:mine", base=tmp_path)
