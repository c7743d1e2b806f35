"""Which slot of the KV cache a sequence gets, and how much of its prompt is there already.

A free slot keeps the ids it was filled with. A prompt that begins with them (the next turn of the
same rollout) takes that slot and prefills only the rest; one that begins like another slot's (the
samples of one group) has that part copied. Pure bookkeeping: the memory itself is ``network``'s.
"""

import msgspec


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequence goes."""

    slot: int
    reused: int
    """Tokens of its prompt whose keys and values need not be computed."""
    copied_from: int | None = None
    """The slot that holds them; ``None``: the slot itself does."""


class Slots:
    """Slots of equal size; ids are int32 arrays in bytes."""

    def __init__(self, count: int) -> None:
        self._kept = [b""] * count
        """Ids whose keys and values each slot holds, as far as others may use them."""
        self._free = list(range(count))
        """Longest free first."""

    @property
    def free_count(self) -> int:
        """Slots nobody uses."""
        return len(self._free)

    def place(self, ids: bytes) -> Placement:
        """Return a free slot for a sequence that begins with ``ids``; the caller fills it."""
        assert self._free, "a sequence is placed only where a slot is free"
        last = len(ids) // 4 - 1  # one token at least is computed: the next one follows from it
        shared = [min(common_tokens(kept, ids), last) for kept in self._kept]
        own = max(self._free, key=lambda slot: shared[slot])
        best = max(range(len(shared)), key=lambda slot: shared[slot])
        if shared[own] == shared[best] > 0:
            slot, source = own, None
        else:
            slot = self._least_worth()
            source = best if shared[best] > 0 and best != slot else None
        self._free.remove(slot)
        self._kept[slot] = b""
        return Placement(slot=slot, reused=shared[best], copied_from=source)

    def keep(self, slot: int, ids: bytes) -> None:
        """Note that ``slot`` holds the keys and values of ``ids``; others may copy them."""
        self._kept[slot] = ids

    def release(self, slot: int, ids: bytes) -> None:
        """Free ``slot``, which holds the keys and values of ``ids``."""
        assert slot not in self._free, f"slot {slot} is freed twice"
        self._kept[slot] = ids
        self._free.append(slot)

    def forget(self) -> None:
        """Let nobody use what any slot holds: it was computed by other weights."""
        self._kept = [b""] * len(self._kept)

    def _least_worth(self) -> int:
        empty = [slot for slot in self._free if not self._kept[slot]]
        # The lowest empty one keeps the running slots side by side, which saves a copy each step.
        return min(empty) if empty else self._free[0]


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many ids both begin with."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
