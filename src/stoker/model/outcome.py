"""Outcomes: how a rollout ended, typed, with a reward only where one was earned."""

from enum import StrEnum

import msgspec

from stoker.model.faults import FaultRecord


class OutcomeKind(StrEnum):
    """The five ends of a rollout."""

    COMPLETED = "completed"
    """The program returned a score. The only kind that carries a reward."""
    TRUNCATED = "truncated"
    """Cut by a limit; ``reason`` names it."""
    FAILED = "failed"
    """A fault; ``fault`` says whose."""
    CANCELLED = "cancelled"
    """Ended by the coordinator or the user."""
    AMBIGUOUS = "ambiguous"
    """An external effect may or may not have happened."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rollout ended."""

    kind: OutcomeKind
    reward: float | None = None
    """Finite, and only with ``completed``."""
    reason: str = ""
    fault: FaultRecord | None = None
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        """Refuse a reward that was not earned: the fourth promise, held by construction."""
        if self.reward is not None and self.kind is not OutcomeKind.COMPLETED:
            raise ValueError(f"a rollout that is {self.kind} carries no reward")
        if self.kind is OutcomeKind.COMPLETED and self.reward is None:
            raise ValueError("a completed rollout carries a reward")
