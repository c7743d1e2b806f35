"""What is counted of a turn that was aborted and gone on with: each token once, where it was."""

import msgspec
import pytest

from stoker.coordinator.prompt_size import PromptSizes
from stoker.coordinator.step_cost import StepCosts
from stoker.inference.account import CallAccount
from stoker.inference.callable import CallableModel
from stoker.inference.continuing import joined
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    VersionSpan,
    pack_tokens,
)
from stoker.testing.virtual_clock import run_virtual
from support.inference import lane_over, request


def part(
    ids: list[int], reason: FinishReason = FinishReason.STOP, *, prompt: int = 10
) -> Generation:
    return Generation(
        text="",
        finish_reason=reason,
        prompt_ids=pack_tokens([1] * prompt),
        token_ids=pack_tokens(ids),
        spans=(VersionSpan(1, 0, len(ids)),),
    )


BEGUN = part([2, 3, 4, 5], FinishReason.ABORTED)


def going_on(begun: Generation) -> GenerateRequest:
    return msgspec.structs.replace(request(), begun=begun)


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (joined(BEGUN, part([6, 7, 8])), (3, 14)),
        (part([6, 7, 8]), (3, 10)),
        (msgspec.structs.replace(part([6]), cached_tokens=8), (1, 2)),
        (msgspec.structs.replace(part([6], prompt=0), cached_tokens=8), (1, 0)),
    ],
    ids=["gone on with", "sampled anew", "partly cached", "no ids said"],
)
def test_what_a_turn_is_gone_on_from_was_prefilled(
    answer: Generation, counted: tuple[int, int]
) -> None:
    account = CallAccount()
    account.answered(going_on(BEGUN), answer)
    load = account.load()
    assert (load.tokens_sampled, load.tokens_prefilled) == counted


def test_a_begun_turn_whose_prompt_is_not_said_still_has_one() -> None:
    begun = part([2, 3, 4, 5], FinishReason.ABORTED, prompt=0)
    sizes = PromptSizes()
    prompt = sizes.estimate(request())
    assert prompt > 0
    assert sizes.estimate(going_on(begun)) == prompt + 4
    assert sizes.learn(going_on(begun), joined(begun, part([6], prompt=0))) == prompt
    assert sizes.estimate(going_on(BEGUN)) == 14


def test_the_cost_of_a_step_is_learnt_from_the_steps_of_the_last_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int, int]] = []

    def note(_: StepCosts, *, steps: int, sampled: int, prefilled: int, seconds: float) -> None:
        seen.append((steps, sampled, prefilled))

    monkeypatch.setattr(StepCosts, "seen", note)

    async def generate(asked: GenerateRequest) -> Generation:
        return BEGUN if asked.begun is None else joined(asked.begun, part([6, 7, 8]))

    async def main() -> Generation:
        lane = lane_over(CallableModel(generate, window=1, kv_tokens=1000))
        return await lane.generate(request(), (0,))

    assert run_virtual(main()).token_count == 7
    assert seen == [(3, 3, 14)]
