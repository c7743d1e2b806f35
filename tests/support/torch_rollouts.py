"""The same rollouts on any model, and ``torch:``'s side of their comparison with vLLM.

Stoker's interpreter needs no torch, so ``torch:`` runs in the rig's: ``PYTHON -m
support.torch_rollouts`` reads a ``Compare`` from its standard input and answers with ``Compared``.
"""

import asyncio
import sys
from pathlib import Path
from typing import Literal

import msgspec

from stoker.config.tree import ModelSettings, TorchSettings
from stoker.inference.base import Model
from stoker.inference.open import open_model, start_model
from stoker.model.generation import Generation, unpack_logprobs, unpack_tokens
from support.served import grown
from support.vllm_calls import MORE, asked, at

ROLLOUTS = 64
TURNS = 2
TOKENS = 10


class Turn(msgspec.Struct, frozen=True):
    """One model call as it went."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]


class Difference(msgspec.Struct, frozen=True):
    """Where one rollout went another way for the first time."""

    rollout: int
    turn: int
    context: list[int]
    """What both were shown."""
    torch: int
    """The token ``torch:`` chose."""
    vllm: int
    torch_gap: float = 0.0
    """By how much ``torch:`` likes its own token better, in log-probability."""


class Compare(msgspec.Struct, frozen=True):
    """What ``torch:`` is asked."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    vllm: list[list[Turn]]


class Compared(msgspec.Struct, frozen=True):
    """What came out."""

    tokens_equal: int
    """Sampled by both, up to the first difference of each rollout."""
    logprob_gap_max: float
    """Largest difference of their log-probabilities."""
    differences: list[Difference]


async def rollouts(model: Model) -> list[list[Turn]]:
    """Sample ``ROLLOUTS`` histories of ``TURNS`` turns at temperature 0, all at once."""

    async def one(number: int) -> list[Turn]:
        text = f"Tell me about the year {1900 + number}."
        request = asked(f"rol_{number}", text, tokens_max=TOKENS)
        turns: list[Generation] = []
        for _ in range(TURNS):
            turns.append(await model.generate(0, request))
            more = grown(turns[-1], MORE, before=request.messages, tokens_max=TOKENS)
            request = at(0.0, more)
        return [_turn(said) for said in turns]

    return list(await asyncio.gather(*(one(number) for number in range(ROLLOUTS))))


def _turn(said: Generation) -> Turn:
    return Turn(
        unpack_tokens(said.prompt_ids),
        unpack_tokens(said.token_ids),
        unpack_logprobs(said.logprobs),
    )


def first_difference(rollout: int, ours: list[Turn], theirs: list[Turn]) -> Difference | None:
    """Return where two ways of one rollout part; ``None`` where they are the same."""
    for turn, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.prompt == other.prompt, "the prompts of equal histories differ"
        for place, (token, other_token) in enumerate(zip(one.sampled, other.sampled, strict=False)):
            if token != other_token:
                context = one.prompt + one.sampled[:place]
                return Difference(rollout, turn, context, token, other_token)
        assert one.sampled == other.sampled, "equal tokens, and one goes on"
    return None


def compared(ours: list[list[Turn]], theirs: list[list[Turn]]) -> Compared:
    """Compare every rollout up to its first difference."""
    equal, gap, differences = 0, 0.0, []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        found = first_difference(number, one, other)
        if found is not None:
            differences.append(found)
        for turn, (mine, its) in enumerate(zip(one, other, strict=True)):
            count = len(mine.sampled)
            if found is not None and turn >= found.turn:
                count = len(found.context) - len(mine.prompt) if turn == found.turn else 0
            equal += count
            pairs = zip(mine.logprobs[:count], its.logprobs[:count], strict=True)
            gap = max([gap, *(abs(a - b) for a, b in pairs)])
    return Compared(equal, gap, differences)


def with_gaps(model: Path, dtype: str, found: Compared) -> Compared:
    """Say of each difference how much better ``torch:`` likes its own token."""
    # Only the rig's interpreter has torch.
    from stoker.inference.in_process.network import Network, Stretch  # noqa: PLC0415

    network = Network.load(model, dtype)
    network.open_slots(1, max((len(one.context) for one in found.differences), default=1) + 1)
    differences = []
    for one in found.differences:
        logits = network.step([Stretch(0, 0, one.context, last=True)])[0]
        gap = float(logits[one.torch] - logits[one.vllm])
        differences.append(msgspec.structs.replace(one, torch_gap=gap))
    return msgspec.structs.replace(found, differences=differences)


async def _sampled(given: Compare) -> list[list[Turn]]:
    settings = ModelSettings(window=ROLLOUTS, torch=TorchSettings(dtype=given.dtype, threads=1))
    opened = open_model(f"torch:{given.model}", base=Path(), settings=settings)
    await start_model(opened)
    try:
        return await rollouts(opened)
    finally:
        await opened.close()


def main() -> None:
    """Answer one ``Compare``."""
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Compare)
    found = compared(asyncio.run(_sampled(given)), given.vllm)
    answer = with_gaps(Path(given.model), given.dtype, found)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
