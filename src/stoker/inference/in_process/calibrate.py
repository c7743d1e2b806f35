"""How long a step takes on this machine, now: for choosing the number format and for the bound.

bf16 is four times as fast where the processor multiplies it (AMX) and a tenth as fast where it does
not: nothing but trying tells. What is timed is a turn of a rollout: its share of steps in which a
batch decodes, and the prefill of its prompt.
"""

from pathlib import Path

import msgspec

from stoker.inference.in_process.network import Network, Stretch
from stoker.seams.clock import Clock

BATCH = 16
"""Sequences that decode at once in a trial, where the window is not smaller."""
PROMPT_TOKENS = 128
"""Prompt of a trial, and tokens each sequence has behind it when it decodes."""
TURN_TOKENS = 64
"""Tokens sampled after such a prompt, in the turn that is weighed."""
_RUNS = 2
_DTYPES = ("float32", "bfloat16")


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """One format's times, seconds; the least of two runs each after one to warm up."""

    dtype: str
    prefill: float
    """Of a prompt of ``PROMPT_TOKENS``."""
    decode: float
    """Of one step of ``batch`` sequences."""
    batch: int

    @property
    def turn(self) -> float:
        """What a turn costs when ``batch`` run side by side."""
        return self.prefill + TURN_TOKENS * self.decode / self.batch


def load_fastest(folder: Path, dtype: str, clock: Clock, batch: int) -> tuple[Network, list[Times]]:
    """Load ``folder`` as ``dtype`` (``auto``: the faster one); return what it was chosen by too.

    Raises:
        ConfigInvalid: as ``Network.load``.
    """
    network = Network.load(folder, _DTYPES[0] if dtype == "auto" else dtype)
    times = [measure(network, clock, batch)]
    if dtype != "auto":
        return network, times
    network.cast(_DTYPES[1])
    times.append(measure(network, clock, batch))
    times.sort(key=lambda one: one.turn)
    if network.dtype != times[0].dtype:
        # Not cast back: weights that were rounded to bf16 are not the folder's any more.
        network = Network.load(folder, times[0].dtype)
    return network, times


def measure(network: Network, clock: Clock, batch: int) -> Times:
    """Time ``network`` with slots for ``batch`` sequences; it has none of use afterwards."""
    count = min(PROMPT_TOKENS, network.longest - 1)
    network.open_slots(batch, count + 1)
    ids = [index * 7 % network.vocabulary for index in range(count)]
    prompt = [Stretch(0, 0, ids, last=True)]
    single = [Stretch(slot, count, ids[:1], last=True) for slot in range(batch)]
    return Times(
        dtype=network.dtype,
        prefill=_least(network, clock, prompt),
        decode=_least(network, clock, single),
        batch=batch,
    )


def _least(network: Network, clock: Clock, stretches: list[Stretch]) -> float:
    network.step(stretches)
    taken: list[float] = []
    for _ in range(_RUNS):
        began = clock.monotonic()
        network.step(stretches)
        taken.append(clock.monotonic() - began)
    return min(taken)
