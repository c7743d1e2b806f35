"""Seeded randomness and stable ids of a rollout: functions of its epoch, scope and a counter.

One generator per scope, so that siblings do not depend on each other's order; made on first use,
since an object costs as much memory as a whole waiting rollout. A branch *re-keys* it in place:
references the program holds stay valid and draw anew. Values drawn before the branch point, and
generators seeded from them, stay shared between branches.
"""

import random
from hashlib import blake2b

from stoker.errors import VerbMisused

_BYTES_PER_DRAW = 64


class RolloutRandom(random.Random):
    """``random.Random`` whose bits are ``blake2b(epoch, scope, counter)``."""

    def __init__(self, epoch: str, scope: str) -> None:
        super().__init__(0)
        self._scope = scope
        self.rekey(epoch)

    def rekey(self, epoch: str) -> None:
        """Draw from ``epoch`` from now on."""
        self._key = blake2b(f"{epoch}\0{self._scope}".encode(), digest_size=32).digest()
        self._counter = 0
        self.gauss_next = None  # else one Gaussian of the old epoch leaks into every branch

    def random(self) -> float:
        """Return the next float in [0, 1)."""
        return (int.from_bytes(self._draw(8), "big") >> 11) * 2.0**-53

    def getrandbits(self, k: int, /) -> int:
        """Return an integer with ``k`` random bits."""
        if k < 0:
            raise ValueError("number of bits must be non-negative")
        count = (k + 7) // 8
        drawn = b"".join(
            self._draw(min(_BYTES_PER_DRAW, count - start))
            for start in range(0, count, _BYTES_PER_DRAW)
        )
        return int.from_bytes(drawn, "big") >> (count * 8 - k)

    def seed(self, *_args: object, **_kwargs: object) -> None:
        """Do nothing at construction; afterwards refuse, since the epoch is the seed."""
        if hasattr(self, "_key"):
            raise VerbMisused(
                "ctx.random cannot be seeded: the rollout's epoch is its seed; "
                "make a random.Random(ctx.random.getrandbits(64)) of your own instead"
            )

    def _draw(self, count: int) -> bytes:
        drawn = blake2b(self._counter.to_bytes(8, "big"), key=self._key, digest_size=count).digest()
        self._counter += 1
        return drawn
