"""Randomness that must differ between runs: run, worker and lineage ids, jitter.

Everything random *inside* a rollout is derived from its seed instead (room ``rollout``).
"""

import random
import secrets

_ID_BYTES = 6


def fresh_id(prefix: str) -> str:
    """Return ``prefix`` + 12 random hex digits."""
    return prefix + secrets.token_hex(_ID_BYTES)


def nonce() -> str:
    """Return 128 random bits, hex: what a peer must have been told to know."""
    return secrets.token_hex(16)


def jittered(seconds: float) -> float:
    """Return ``seconds`` spread by up to a half either way: retries must not march in step."""
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311 - not a secret
