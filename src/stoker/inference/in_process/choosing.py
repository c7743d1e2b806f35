"""One token for each sequence out of its logits, by a number of its own.

The number comes from the request's seed and the token's place, so that a sequence does not depend
on who shares its batch. (The logits may, in their last digits: matrices of another size are summed
in another order. In bf16 a near-tie can then go either way.)

Log-probabilities are of the distribution that was sampled, after temperature. At temperature 0 the
likeliest token is taken and its log-probability is that at temperature 1: a policy that always does
the same has no other worth a trainer's while.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch


def choose(
    logits: Any,  # noqa: ANN401 - a tensor
    temperatures: Sequence[float],
    numbers: Sequence[float],
) -> tuple[list[int], list[float]]:
    """Return an id and its log-probability for each row; ``nan`` where the logits are none."""
    greedy = torch.tensor([temperature <= 0 for temperature in temperatures])
    divisors = torch.tensor([one if one > 0 else 1.0 for one in temperatures])
    logprobs = torch.log_softmax(logits / divisors[:, None], dim=-1)
    best = logits.argmax(dim=-1)
    if bool(greedy.all()):
        chosen = best
    else:
        # In double precision: a sum over a whole vocabulary would lose the rare tokens.
        sums = logprobs.double().exp().cumsum(dim=-1)
        aims = torch.tensor(numbers, dtype=torch.double)[:, None] * sums[:, -1:]
        drawn = torch.searchsorted(sums, aims, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        chosen = torch.where(greedy, best, drawn)
    taken = logprobs.gather(-1, chosen[:, None])[:, 0]
    return chosen.tolist(), taken.tolist()


def number(seed: int, place: int) -> float:
    """Return a number in [0, 1) for the token at ``place`` of a request with ``seed``."""
    digest = blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
