"""What the flow of rollouts is built on, and whom it belongs to."""

from dataclasses import dataclass
from typing import Protocol

from stoker.coordinator.actions import ActionFactory
from stoker.coordinator.appender import Appender
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.rollouts import ActiveRollout
from stoker.journal.artifacts import ArtifactStore
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, RolloutId
from stoker.model.outcome import Outcome
from stoker.observe.log import Log
from stoker.seams.clock import Clock


@dataclass(slots=True, kw_only=True)
class FlowParts:
    """What the flow is built on."""

    appender: Appender
    artifacts: ArtifactStore
    factory: ActionFactory
    figures: RunFigures
    clock: Clock
    log: Log


class FlowOwner(Protocol):
    """Whom the flow belongs to."""

    def cancel(self, action_ids: list[ActionId]) -> None:
        """Ask the ledger to end actions; does not wait."""
        ...

    def finished(self, rollout: ActiveRollout, outcome: Outcome) -> None:
        """A rollout has its outcome."""
        ...

    def opened_late(self, rollout_id: RolloutId, completion: Completion) -> None:
        """An action that may have opened an environment ended after its rollout; look, settle."""
        ...
