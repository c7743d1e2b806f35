"""Randomness that must differ between runs: run, worker and lineage ids, jitter.

Everything random *inside* a rollout is derived from its seed instead (room ``rollout``). A
simulation gives a seed here (``seeded``), so that its ids and jitter are the same each time.
"""

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

_ID_BYTES = 6
_source: random.Random = random.SystemRandom()


def fresh_id(prefix: str) -> str:
    """Return ``prefix`` + 12 random hex digits."""
    return prefix + _source.randbytes(_ID_BYTES).hex()


def nonce() -> str:
    """Return 128 random bits, hex: what a peer must have been told to know. Never seeded."""
    return secrets.token_hex(16)


def jittered(seconds: float) -> float:
    """Return ``seconds`` spread by up to a half either way: retries must not march in step."""
    return seconds * _source.uniform(0.5, 1.5)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make ids and jitter of this process follow ``seed`` within the block; for simulations."""
    global _source  # noqa: PLW0603 - one source for the process is what the seam is
    before, _source = _source, random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    try:
        yield
    finally:
        _source = before
