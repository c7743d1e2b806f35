"""``stoker bench torch``: what a step of an in-process model costs, and what batching is worth.

The peer is ``transformers``' own ``generate`` with static batches of the same size, on the same
weights and format, in the same run: a batch there lasts as long as its longest sequence.
Both sample greedily the same number of tokens for each prompt. Figures of speed count the tokens
that were asked for. Time is that of the CPU, in one thread: what other processes take on a busy
machine is in no figure, so that two runs can be compared.
"""

import resource
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.cli.bench_machine import figure, machine
from stoker.inference.in_process.calibrate import load_fastest, measure
from stoker.inference.in_process.engine import Engine, Running
from stoker.inference.in_process.network import Network
from stoker.inference.in_process.smollm2 import smollm2_folder
from stoker.seams.clock import SystemClock

_BATCHES = (1, 8, 32, 64)
_WINDOW = 8
_LENGTHS = (4, 6, 8, 8, 10, 12, 16, 64)
"""Tokens of eight sequences: one in eight is long, as turns of agents are."""
_ROUNDS = 2
_PROMPT_TOKENS = 32

Say = Callable[[str], object]


class CpuClock(SystemClock):
    """Its monotonic time is the CPU time of the thread that asks."""

    def monotonic(self) -> float:
        """Return seconds of CPU."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_utime + used.ru_stime


def bench(*, folder: Path | None, runs: int, say: Say) -> dict[str, Any]:
    """Measure ``runs`` times and return the bench document (DESIGN §9)."""
    torch.set_num_threads(1)
    clock = CpuClock()
    where = folder if folder is not None else smollm2_folder()
    say("bench torch: loading and choosing the number format …")
    network, times = load_fastest(where, "auto", clock, _WINDOW)
    peer = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=network.model.dtype)
    steps: dict[int, list[float]] = {batch: [] for batch in _BATCHES}
    ours: list[float] = []
    ratios: list[float] = []
    equal: list[float] = []
    for number in range(runs):
        say(f"bench torch: run {number + 1} of {runs} …")
        for batch in _BATCHES:
            steps[batch].append(measure(network, clock, batch).decode * 1e3)
        network.open_slots(_WINDOW, _PROMPT_TOKENS + max(_LENGTHS))
        lengths = list(_LENGTHS * _ROUNDS)
        ours.append(sum(lengths) / _continuous(network, clock, lengths))
        ratios.append(ours[-1] * _static(peer, clock, lengths) / sum(lengths))
        even = [sum(lengths) // len(lengths)] * len(lengths)
        equal.append(_static(peer, clock, even) / _continuous(network, clock, even))
    figures = {f"decode_step_{batch}_ms": figure(taken, "ms") for batch, taken in steps.items()}
    against = "transformers.generate, static batches of 8, same weights, one thread"
    figures["tokens_per_second"] = figure(ours, "tokens/s")
    figures["throughput_vs_static"] = figure(ratios, "ratio", target=1.5, against=against)
    figures["equal_lengths_vs_static"] = figure(equal, "ratio", against=against)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    described = machine()
    described["versions"] |= versions
    described["dtype"] = times[0].dtype
    return {"bench": "torch", "machine": described, "figures": figures}


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [
        [(7 * number + 13 * place) % 1000 + 100 for place in range(_PROMPT_TOKENS)]
        for number in range(len(lengths))
    ]


def _continuous(network: Network, clock: CpuClock, lengths: Sequence[int]) -> float:
    """Return the seconds our engine takes; a place that comes free is filled at once."""
    engine = Engine(network, _WINDOW, lambda _sequence, _problem: None)
    began = clock.monotonic()
    for ids, count in zip(_prompts(lengths), lengths, strict=True):
        engine.submit(
            Running(array("i", ids), tokens_max=count, temperature=0, seed=0, stop_ids=frozenset())
        )
    while engine.busy:
        engine.step()
    return clock.monotonic() - began


def _static(peer: Any, clock: CpuClock, lengths: Sequence[int]) -> float:  # noqa: ANN401 - transformers' own
    """Return the seconds static batches take, each to its longest sequence."""
    prompts = _prompts(lengths)
    began = clock.monotonic()
    for first in range(0, len(lengths), _WINDOW):
        ids = torch.tensor(prompts[first : first + _WINDOW])
        with torch.inference_mode():
            peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(lengths[first : first + _WINDOW]),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
    return clock.monotonic() - began
