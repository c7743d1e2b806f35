"""What an open ledger used last, kept between groups: most of it is used again at once.

A bounded number of rows, journal ends and counts, each as the store has it. An action's row is read
for its submit, its completion and its acknowledgement, a rollout's journal end by every append.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from stoker.broker.rows import Row
from stoker.broker.store import Head
from stoker.model.action import ActionState
from stoker.model.ids import ActionId, RolloutId, RunId

KEPT_MAX = 4096
"""Of each."""
ROW_BYTES_MAX = 4096
"""Rows with a larger input and result are read again when they are needed."""


class Recent:
    """Rows, journal ends and counts, oldest first."""

    def __init__(self) -> None:
        self.rows: dict[ActionId, Row] = {}
        self.heads: dict[tuple[RunId, RolloutId], Head] = {}
        self.outstanding: dict[RolloutId, int] = {}
        """Unfinished actions of a rollout, less those parked for its own cap."""

    def take(self, rows: Iterable[Row]) -> None:
        """Keep the rows of a group that has committed; forget the oldest of everything."""
        for row in rows:
            self.rows.pop(row.action_id, None)
            if row.state is not ActionState.ACKNOWLEDGED and _bytes(row) <= ROW_BYTES_MAX:
                self.rows[row.action_id] = row
        for kept in (self.rows, self.heads, self.outstanding):
            _forget_oldest(kept)


def _bytes(row: Row) -> int:
    observation = row.completion.observation if row.completion is not None else None
    return row.action.input.size_bytes + (observation.size_bytes if observation else 0)


def _forget_oldest(kept: dict[Any, Any]) -> None:
    for key in list(islice(kept, max(0, len(kept) - KEPT_MAX))):
        del kept[key]
