"""Two engines, the same weights, temperature 0: equal tokens until two are all but equally likely.

Their kernels add in different orders, so that two tokens whose log-probabilities hardly differ may
change places; from there on the histories are others. Each first difference is shown.
"""

import asyncio
import os
import subprocess
from typing import Any

import msgspec
import pytest

from support.source import ROOT
from support.torch_rollouts import ROLLOUTS, Compare, Compared, Difference, Turn, rollouts
from support.vllm_calls import SECONDS_MAX, asking, say
from support.vllm_server import NAME, Rig, Server

NEAR_TIE = {"float32": 0.01, "bfloat16": 0.5}
"""Log-probability by which one token may be the likelier one at a first difference. vLLM computes
in float32; a sum of 576 products in bfloat16 has two or three right digits."""


@pytest.fixture(scope="module")
def theirs(main_server: Server) -> list[list[Turn]]:
    async def sampled() -> list[list[Turn]]:
        async with asking(main_server, window=ROLLOUTS) as model:
            return await rollouts(model)

    return asyncio.run(sampled())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_and_vllm_agree_token_by_token_until_a_near_tie(
    main_server: Server, rig: Rig, theirs: list[list[Turn]], dtype: Any
) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [rig.python, "-m", "support.torch_rollouts"], env=environ, cwd=ROOT, check=True,
        input=msgspec.json.encode(Compare(rig.model, dtype, theirs)), stdout=subprocess.PIPE,
        timeout=2 * SECONDS_MAX,
    )  # fmt: skip
    found = msgspec.json.decode(done.stdout, type=Compared)
    say(f"{ROLLOUTS - len(found.differences)} of {ROLLOUTS} rollouts are equal to their ends")
    say(f"{found.tokens_equal} tokens equal, log-probabilities within {found.logprob_gap_max:.5f}")
    for one in found.differences:
        gap = vllm_gap(main_server, one)
        say(
            f"rollout {one.rollout}, turn {one.turn}, after {len(one.context)} tokens: torch "
            f"{one.torch} (by {one.torch_gap:.5f}), vLLM {one.vllm} (by {gap:.5f})"
        )
        assert abs(one.torch_gap) < NEAR_TIE[dtype]  # the context alone may turn it again
        assert abs(gap) < NEAR_TIE[dtype]
    assert found.logprob_gap_max < NEAR_TIE[dtype]
    assert found.tokens_equal > ROLLOUTS  # more than a first token each


def vllm_gap(server: Server, one: Difference) -> float:
    """Return by how much vLLM likes its own token better, in log-probability."""
    body = {
        "model": NAME, "prompt": one.context, "max_tokens": 1, "temperature": 0, "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = msgspec.convert(server.post("/v1/completions", body), _Answer)
    (top,) = answer.choices[0].logprobs.top_logprobs
    return top[f"token_id:{one.vllm}"] - top[f"token_id:{one.torch}"]


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]
