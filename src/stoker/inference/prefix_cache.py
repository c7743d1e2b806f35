"""The idle part of a simulated KV cache: contexts of turns that ended, least recently used first.

A prefix belongs to the rollout that made it and is found again when that rollout's next prompt
begins with exactly its ids (a rerendered history does not, and saves nothing). Memory is taken
back from the *tail* of the least recently used prefix, as vLLM does, so a prefix may be partial.
Only sizes and digests are kept, never ids: an idle history costs a few hundred bytes.
"""

from collections import OrderedDict
from hashlib import blake2b

_ID_BYTES = 4


class Prefix:
    """One cached context."""

    __slots__ = ("digest", "id_bytes", "owner", "tokens")

    def __init__(self, owner: str, context: bytes, tokens: int) -> None:
        self.owner = owner
        self.id_bytes = len(context)
        self.digest = blake2b(context, digest_size=16).digest()
        self.tokens = tokens

    def begins(self, prompt: bytes) -> bool:
        """Whether ``prompt`` starts with this context."""
        if self.id_bytes > len(prompt):
            return False
        start = memoryview(prompt)[: self.id_bytes]
        return blake2b(start, digest_size=16).digest() == self.digest


class PrefixCache:
    """Idle prefixes and the tokens they hold."""

    def __init__(self) -> None:
        self.tokens = 0
        """Held by all idle prefixes together."""
        self.evicted_tokens = 0
        self._by_age: OrderedDict[int, Prefix] = OrderedDict()
        self._by_owner: dict[str, list[Prefix]] = {}

    def put(self, prefix: Prefix) -> None:
        """Keep ``prefix`` as the most recently used one."""
        if prefix.tokens <= 0:
            return
        self._by_age[id(prefix)] = prefix
        self._by_owner.setdefault(prefix.owner, []).append(prefix)
        self.tokens += prefix.tokens

    def find(self, owner: str, prompt: bytes) -> Prefix | None:
        """Return the longest idle prefix of ``owner`` that ``prompt`` begins with."""
        mine = self._by_owner.get(owner, ())
        fitting = [prefix for prefix in mine if prefix.begins(prompt)]
        return max(fitting, key=lambda prefix: prefix.tokens, default=None)

    def take(self, prefix: Prefix) -> None:
        """Remove ``prefix``: a running sequence holds its tokens now."""
        del self._by_age[id(prefix)]
        self._by_owner[prefix.owner].remove(prefix)
        if not self._by_owner[prefix.owner]:
            del self._by_owner[prefix.owner]
        self.tokens -= prefix.tokens

    def shrink(self, tokens: int) -> None:
        """Give up tokens until at most ``tokens`` are held, oldest prefix first, from its tail."""
        while self.tokens > max(0, tokens):
            oldest = next(iter(self._by_age.values()))
            excess = self.tokens - max(0, tokens)
            if oldest.tokens <= excess:
                self.evicted_tokens += oldest.tokens
                self.take(oldest)
            else:
                oldest.tokens -= excess
                self.tokens -= excess
                self.evicted_tokens += excess
