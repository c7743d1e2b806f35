"""What one replica's KV cache is believed to hold: our own LRU model of it.

Running sequences hold memory; contexts of ended turns stay until room is needed, the least recently
used giving up its *tail* first, as vLLM does. The server's own count of cached tokens corrects the
model: a context found missing although it should have been there bounds what the server keeps by
the depth at which it lay (everything used since, itself included); one found deeper than believed
raises that bound again. The model never believes more than the server says it has. A server
that never has anything keeps nothing (prefix caching is off), which says nothing of its size.
"""

import math
from collections import OrderedDict

KEPT_SHARE = 0.9
"""A context counts as cached while at most a tenth of it is missing: half cached is not cached."""
_LOWER_MIN = 0.95
"""One miss lowers the bound at most to this share of it: other reasons (a restart) pass."""
_RAISE = 1.02
_CONFIRM = 1.001
"""Each context found where it should be makes up for a few misses that had other reasons."""

_MISSES_MAX = 50
"""Misses in a row after which nothing is believed to be kept, until something is found."""


class Residency:
    """Believed contents of one KV cache, tokens."""

    def __init__(self, kv_tokens: int) -> None:
        self._kv = self._whole = kv_tokens
        self.kept = float(kv_tokens)
        """What the server is believed to keep altogether."""
        self.keeps = True
        """Whether contexts of ended turns stay at all."""
        self._misses = 0
        self._running: dict[int, int] = {}
        self._held = 0
        self._idle: OrderedDict[str, list[int]] = OrderedDict()
        """History → [tokens still there, tokens of the context], least recently used first."""
        self._idle_tokens = 0
        self._before: dict[int, tuple[float, bool]] = {}
        """Call → how deep its context lay when it began, and whether it was believed whole."""

    def share(self, part: float) -> None:
        """Believe in this part of the whole cache from now on."""
        kv = max(1, int(self._whole * part))
        self.kept, self._kv = self.kept * kv / self._kv, kv
        self._shrink()

    def is_cached(self, history: str) -> bool:
        """Return whether the context of ``history`` is believed to be there."""
        found = self._idle.get(history)
        return self.keeps and found is not None and found[0] >= KEPT_SHARE * found[1]

    def run(self, call: int, history: str, tokens: int) -> None:
        """A call begins: its prompt, and what it will probably sample, is in use."""
        if history in self._idle:
            self._before[call] = (self._depth(history), self.is_cached(history))
            self._idle_tokens -= self._idle.pop(history)[0]
        self._running[call] = tokens
        self._held += tokens
        self._shrink()

    def end(self, call: int, *, found: bool | None = None) -> None:
        """A call ended however it did; ``found``: whether the server had its context, if it says.

        A context that should have been there and was not bounds what the server keeps.
        """
        self._held -= self._running.pop(call, 0)
        depth, believed = self._before.pop(call, (0.0, None))
        if found:
            self._misses, self.keeps = 0, True
        if believed is None or found is None or not (believed or found):
            return
        if believed and found:
            self.kept = min(float(self._kv), self.kept * _CONFIRM)
        elif believed:
            self._missed(depth)
        else:
            self.kept = min(float(self._kv), self.kept * _RAISE)

    def _missed(self, depth: float) -> None:
        self._misses += 1
        if self._misses < _MISSES_MAX:
            self.kept = max(min(depth, self.kept), self.kept * _LOWER_MIN)
            self._shrink()
        else:
            self.keeps, self.kept = False, float(self._kv)

    def keep(self, history: str, tokens: int) -> None:
        """The context of an ended turn is the most recently used one now."""
        if history in self._idle:
            self._idle_tokens -= self._idle.pop(history)[0]
        self._idle[history] = [tokens, tokens]
        self._idle_tokens += tokens
        self._shrink()

    def forget(self) -> None:
        """The server dropped every context that no running call holds."""
        self._idle.clear()
        self._idle_tokens = 0

    def _depth(self, history: str) -> float:
        newer = 0
        for name, (tokens, _) in reversed(self._idle.items()):
            newer += tokens
            if name == history:
                break
        return float(self._held + newer)

    def _shrink(self) -> None:
        excess = self._held + self._idle_tokens - self.kept
        while excess > 0 and self._idle:
            history, entry = next(iter(self._idle.items()))
            gone = min(entry[0], math.ceil(excess))
            entry[0] -= gone
            self._idle_tokens -= gone
            excess -= gone
            if entry[0] <= 0:
                del self._idle[history]
