"""Seeded faults of a simulated server: which call meets which one (C1).

The draw depends on the profile's seed, the call and how often the call was tried, never on time or
order, so a failing run repeats.
"""

from collections import Counter
from enum import StrEnum
from hashlib import blake2b

from stoker.inference.profile import FaultRates
from stoker.model.generation import GenerateRequest

_SPAN = 2**64


class InjectedFault(StrEnum):
    """What is done to a call."""

    TOO_MANY = "too_many"
    """429 at once."""
    BROKEN = "broken"
    """500 at once."""
    CLOSED = "closed"
    """Closed half-way."""
    HANG = "hang"
    """Never answers."""
    LATE = "late"
    """Answers too late."""


class FaultScript:
    """Draws the fault of each try."""

    def __init__(self, rates: FaultRates, seed: int) -> None:
        self._rates = rates
        self._seed = seed
        self._tries: Counter[str] = Counter()
        self.injected: Counter[InjectedFault] = Counter()

    def draw(self, replica: int, request: GenerateRequest) -> InjectedFault | None:
        """Return what happens to this try of ``request`` on ``replica``; mostly nothing."""
        rates = self._rates
        if rates.replicas and replica not in rates.replicas:
            return None
        self._tries[request.request_id] += 1
        number = self._tries[request.request_id]
        key = f"{self._seed}/{request.request_id}/{number}".encode()
        drawn = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / _SPAN
        for fault in InjectedFault:
            share: float = getattr(rates, fault.value)
            if drawn < share:
                self.injected[fault] += 1
                return fault
            drawn -= share
        del self._tries[request.request_id]  # it will succeed: nothing to remember
        return None
