"""What one turn of a rollout did: the record from which its ``Turn`` is made.

Taints outlive turns: they bar a reward until the program vouches for its result. A turn tells only
those that are new and not recovered by its end.
"""

from stoker.errors import StokerError, VerbMisused
from stoker.model.faults import FaultRecord
from stoker.model.ids import CallPath, RolloutId
from stoker.rollout.messages import HostCall, ProgramOutcome, Turn
from stoker.rollout.tree import Tree

TURN_BYTES_MAX = 48 * 1024 * 1024
"""Arguments of all calls of one turn together; a turn is one frame."""


class TurnLog:
    """Calls, withdrawals, taints and recoveries of the current turn."""

    __slots__ = ("_bytes", "_told", "_withdrawn_before", "calls", "recovered", "taints")

    def __init__(self) -> None:
        self.taints: dict[str, FaultRecord] = {}
        """Faults met here and not recovered from, by code."""
        self._withdrawn_before = 0
        self.begin(None)

    def begin(self, tree: Tree | None) -> None:
        """Begin the next turn."""
        self.calls: list[HostCall] = []
        if tree is not None:
            self._withdrawn_before = tree.withdrawn_count
        self.recovered: list[str] = []
        self._told = frozenset(self.taints)
        self._bytes = 0

    def add(self, call: HostCall) -> None:
        """Count ``call`` as issued."""
        self.calls.append(call)
        self._bytes += len(call.arguments)

    def room_for(self, arguments: bytes) -> bool:
        """Whether a call with ``arguments`` still fits the turn's frame."""
        return self._bytes + len(arguments) <= TURN_BYTES_MAX

    def taint(self, error: StokerError) -> None:
        """Bar a reward until the program says it recovered from errors of this code."""
        self.taints.setdefault(error.code, error.record())

    def misused(self, message: str) -> VerbMisused:
        """Return the error for a verb used wrongly, and bar a reward."""
        error = VerbMisused(message)
        self.taint(error)
        return error

    def recover(self, code: str) -> None:
        """Note that the program vouches for its result in spite of faults with ``code``."""
        self.taints.pop(code, None)
        if code not in self.recovered:
            self.recovered.append(code)

    def withdrawn(self, tree: Tree) -> tuple[CallPath, ...]:
        """Return the calls withdrawn in this turn."""
        return tree.withdrawn_since(self._withdrawn_before)

    def turn(self, rollout_id: RolloutId, outcome: ProgramOutcome | None, tree: Tree) -> Turn:
        """Return the turn to report."""
        new = (fault for code, fault in self.taints.items() if code not in self._told)
        return Turn(
            rollout_id=rollout_id,
            calls=tuple(self.calls),
            withdrawn=self.withdrawn(tree),
            outcome=outcome,
            tainted=next(new, None),
            recovered=tuple(self.recovered),
        )
