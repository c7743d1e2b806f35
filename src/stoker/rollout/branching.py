"""``ctx.branch``: a checkpoint of each environment, then the verb that branches the rollout itself.

In a branch the same await returns another number; what it does in its environments begins at those
checkpoints. So replay, resume and rebuilds know of nothing but ordinary calls.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.model.events import Verb
from stoker.model.value import canonical_bytes
from stoker.rollout.arguments import BranchArguments
from stoker.rollout.operation import JoinOperation, Operation, VerbOperation

if TYPE_CHECKING:
    from stoker.rollout.trampoline import Trampoline


class RolloutBranching(Operation[int]):
    """Branches the rollout that awaits it."""

    __slots__ = ("_count", "_timeout")

    def __init__(self, trampoline: "Trampoline", count: int, timeout: float | str | None) -> None:
        super().__init__(trampoline)
        self._count = count
        self._timeout = timeout

    def __await__(self) -> Generator[Operation[Any], Any, int]:
        self._begin()
        trampoline = self.trampoline
        trampoline.require_alone("ctx.branch")
        if self._count > 1 and trampoline.environments:
            kept = tuple(one.checkpoint(timeout=self._timeout) for one in trampoline.environments)
            yield from JoinOperation[Any](trampoline, kept, first=False).__await__()
        asked = canonical_bytes(BranchArguments(count=self._count))
        verb = VerbOperation[int](
            trampoline,
            Verb.BRANCH,
            lambda: asked,
            lambda _path, value: msgspec.msgpack.decode(value, type=int),
        )
        return (yield from verb.__await__())
