"""What our calls did on one replica of a real model: exact for our calls, silent about others'."""

import asyncio

from stoker.inference.base import DeviceLoad
from stoker.inference.continuing import fresh_tokens
from stoker.model.generation import GenerateRequest, Generation


class CallAccount:
    """Calls in flight over time, and the tokens they brought; belongs to one event loop."""

    def __init__(self) -> None:
        self.running = 0
        """Calls in flight."""
        self._sampled = self._prefilled = 0
        self._active_seconds = self._sequence_seconds = self._since = 0.0

    def begun(self) -> None:
        """Count a call in."""
        self._charge()
        self.running += 1

    def ended(self) -> None:
        """Count a call out, however it went."""
        self._charge()
        self.running -= 1

    def answered(self, request: GenerateRequest, generation: Generation) -> None:
        """Count what a call brought. What a turn is gone on from is computed as its prompt is."""
        fresh = fresh_tokens(request, generation)
        given = len(generation.prompt_ids) // 4 + generation.token_count - fresh
        self._sampled += fresh
        self._prefilled += max(0, given - (generation.cached_tokens or 0))  # ids may not be said

    def load(self) -> DeviceLoad:
        """Return the sums up to now."""
        if self.running:
            self._charge()
        return DeviceLoad(
            active_seconds=self._active_seconds,
            sequence_seconds=self._sequence_seconds,
            tokens_sampled=self._sampled,
            tokens_prefilled=self._prefilled,
            running=self.running,
        )

    def _charge(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.running:
            self._active_seconds += now - self._since
            self._sequence_seconds += self.running * (now - self._since)
        self._since = now
