"""What a run may cost: tokens, box-seconds and money, counted from its journals.

What every rollout sampled and how long its actions ran stands in its journal: of one that ended in
its outcome, of one that goes on in its results. So a resumed run knows what was spent before, and
a larger budget lets it go on. Each partition of a divided run has its share.

Once a budget is spent nothing new is admitted; what is active finishes, or is truncated with that
reason (``budget.spent``). Looked at before every admission, and at least ten times a second.
"""

from collections.abc import Iterable

from stoker.config.tree import BudgetSettings
from stoker.coordinator.partition import WHOLE, Partition
from stoker.coordinator.rollouts import ActiveRollout
from stoker.coordinator.view import BudgetView
from stoker.model.events import Finished
from stoker.model.outcome import Outcome, OutcomeKind

TOKENS_PRICED = 1_000_000
HOUR_SECONDS = 3600.0
_LOOK_SECONDS = 0.1
_COUNTED_AT_ONCE = 1000
"""From so many active rollouts on they are counted every 0.1 s, not before every admission."""


class Budget:
    """Counts what one partition spends, and says when that is enough."""

    def __init__(self, settings: BudgetSettings, partition: Partition = WHOLE) -> None:
        self._settings = settings
        self._share = 1.0 / partition.count
        self._tokens = 0
        self._box_seconds = 0.0
        self._look_at = 0.0
        self._view = self._viewed(0, 0.0)
        self.held = ""
        """Why nothing new is admitted, once a budget is spent."""

    def counted(self, finished: Finished) -> None:
        """Count a rollout that ended under an earlier coordinator."""
        self._tokens += finished.tokens
        self._box_seconds += finished.box_seconds

    def ended(self, rollout: ActiveRollout) -> None:
        """Count a rollout that has its outcome now."""
        self._tokens += rollout.tokens
        self._box_seconds += rollout.run_seconds

    def look(self, active: Iterable[ActiveRollout], count: int, now: float) -> bool:
        """Count what is spent, ``count`` rollouts being active; return whether it just ran out."""
        if not self._limited or now < self._look_at:
            return False
        self._look_at = now + (_LOOK_SECONDS if count >= _COUNTED_AT_ONCE else 0.0)
        tokens, seconds = self._tokens, self._box_seconds
        for rollout in active:
            tokens += rollout.tokens
            seconds += rollout.run_seconds
        self._view = self._viewed(tokens, seconds)
        before, self.held = self.held, self._spent(self._view)
        return bool(self.held) and not before

    @property
    def truncated(self) -> Outcome | None:
        """Return what becomes of active rollouts once a budget is spent; ``None``: they finish."""
        if not self.held or self._settings.spent == "finish":
            return None
        return Outcome(kind=OutcomeKind.TRUNCATED, reason="the run's budget is spent")

    def view(self) -> BudgetView | None:
        """Return what was spent, when last looked at; ``None``: there is no budget."""
        return self._view if self._limited else None

    @property
    def _limited(self) -> bool:
        settings = self._settings
        return any(
            most is not None for most in (settings.tokens, settings.box_seconds, settings.money)
        )

    def _viewed(self, tokens: int, seconds: float) -> BudgetView:
        settings, share = self._settings, self._share
        return BudgetView(
            tokens=tokens,
            tokens_max=_part(settings.tokens, share),
            box_seconds=seconds,
            box_seconds_max=_part(settings.box_seconds, share),
            money=tokens / TOKENS_PRICED * settings.token_price
            + seconds / HOUR_SECONDS * settings.box_price,
            money_max=_part(settings.money, share),
        )

    def _spent(self, view: BudgetView) -> str:
        for name in ("tokens", "box_seconds", "money"):
            spent, most = getattr(view, name), getattr(view, f"{name}_max")
            if most is not None and spent >= most:
                return (
                    f"the budget is spent: {spent:,.6g} of the {most:,.6g} of budget.{name}; "
                    "nothing new is admitted; with a larger budget the run can be resumed"
                )
        return ""


def _part(most: float | None, share: float) -> float | None:
    return None if most is None else most * share
