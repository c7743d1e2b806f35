"""The trainer's part in a weight update: it writes other weights where the server reads them.

Read and written as bytes, so that Stoker's interpreter needs no torch: a safetensors file is the
length of a JSON header, the header, and the tensors at the places it names.
"""

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NORMS = ("model.layers.0.input_layernorm.weight", "model.norm.weight")
"""The first changes what every token leaves in the KV cache, the last flattens every
distribution."""
_HALVED = {"BF16": ("H", 0x7F80, 1 << 7), "F32": ("I", 0x7F80_0000, 1 << 23)}
"""Kind of array, a number's exponent, and one of it, which halves the number."""


def halve_norms(folder: Path) -> None:
    """Write the weights in ``folder`` anew with half of two norms; the old file is replaced.

    By rename: a server that reads at the same time reads the one or the other.
    """
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name in _NORMS:
        kind, exponent, one = _HALVED[header[name]["dtype"]]
        start, end = (8 + size + place for place in header[name]["data_offsets"])
        numbers = array(kind, content[start:end])
        halved = (number - one if number & exponent > one else 0 for number in numbers)
        content[start:end] = array(kind, halved).tobytes()
    made = weights.with_suffix(".new")
    made.write_bytes(content)
    made.replace(weights)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Give ``folder`` its weights back in the end."""
    weights, aside = folder / "model.safetensors", folder / "model.kept"
    os.link(weights, aside)
    try:
        yield
    finally:
        aside.replace(weights)
