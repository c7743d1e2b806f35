"""What a coordinator's flow is built on, for tests that run it without a ledger or hosts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.broker.base import Append
from stoker.config.tree import Settings
from stoker.coordinator.actions import ActionFactory
from stoker.journal.artifacts import ArtifactStore
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, RolloutId, WorkerId


class Anything:
    """Stands for parts that are only told."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_named: None


class Told(Anything):
    """Keeps what a part is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *said, **_named: self.told.append((name, said))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Return what was said each time ``name`` was called."""
        return [said for verb, said in self.told if verb == name]


class Parts(Anything):
    """What the flow is built on; keeps every append."""

    def __init__(self, folder: Path) -> None:
        self.appends: list[Append] = []
        self.artifacts = ArtifactStore(folder)
        self.factory = ActionFactory(Settings(), self.artifacts)
        self.appender = self
        self.clock = self
        self.figures = self.log = Anything()
        self.late: list[tuple[RolloutId, Completion]] = []
        self.seconds = 0.0

    def append(self, append: Append) -> None:
        self.appends.append(append)

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> Any:
        return self

    wall = boot = 0.0

    def opened_late(self, rollout_id: RolloutId, completion: Completion) -> None:
        self.late.append((rollout_id, completion))

    @property
    def closed(self) -> list[WorkerId | None]:
        """Holders of environments that were told to close."""
        submits = [action for append in self.appends for action in append.submits]
        return [action.holder for action in submits if action.tool == "environment.close"]

    @property
    def acknowledged(self) -> set[ActionId]:
        return {action_id for append in self.appends for action_id in append.acknowledges}
