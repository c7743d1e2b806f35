"""Claims on model servers: what coordinators that share one tell each other through the ledger.

Part of the contract in ``base``, which exports all of it. A claim is no right: it is forgotten a
few seconds after it was last made, never durable, and whoever divides a server by it (the lane of
each coordinator) comes to the same result from the same claims.
"""

from collections.abc import Iterable

import msgspec

from stoker.model.ids import RunId

CLAIM_SECONDS = 5.0
"""A coordinator that has not repeated its claim for so long has none."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator that uses some model servers."""

    run_id: RunId
    partition: str = "0"
    servers: tuple[str, ...] = ()
    """Addresses."""
    window: int
    """Calls it would have in flight on each of them, were it alone."""
    wanted: int
    """Calls that run or are ready, on each of them in the mean."""
    memory: float = 0.0
    """Share of the KV cache of each of them that its contexts would have."""
    weight: float = 1.0
    """Share of its run beside those of others."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """Make a claim, and hear those of everybody who uses one of the same servers."""

    claim: Claim


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True, tag="claim_reply"):
    """Every claim that holds and names one of the servers, one's own included."""

    claims: tuple[Claim, ...]


class Claims:
    """The claims that hold: in memory, since a claim is made anew every second."""

    def __init__(self) -> None:
        self._known: dict[tuple[RunId, str], tuple[float, Claim]] = {}

    def make(self, claim: Claim, now: float) -> ClaimReply:
        """Take a claim at boot time ``now``; return those it shares a server with."""
        self._known[claim.run_id, claim.partition] = (now, claim)
        self._known = {
            key: (at, one) for key, (at, one) in self._known.items() if now - at < CLAIM_SECONDS
        }
        return ClaimReply(claims=sharing(claim, (one for _, one in self._known.values())))


def sharing(claim: Claim, known: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims in ``known`` on a server of ``claim``'s, in order of run and partition."""
    found = (one for one in known if not set(claim.servers).isdisjoint(one.servers))
    return tuple(sorted(found, key=lambda one: (one.run_id, one.partition)))
