"""What an open ledger used last, kept between groups: most of it is used again at once.

A bounded number of rows, journal ends and counts, each as the store has it. An action's row is read
for its submit, its completion and its acknowledgement, a rollout's journal end by every append.
"""

from itertools import islice
from typing import Any

from stoker.broker.rows import ACKNOWLEDGED, Row
from stoker.broker.store import Head
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

        self._passing: list[ActionId] = []

    def keep(self, row: Row, *, again: bool = True) -> None:
        """Take a row as the open group has read or left it; it is the newest now.

        ``again``: it is likely to be used by groups to come.
        """
        action, result = row.action, row.completion
        size = action.input.size_bytes
        if result is not None and result.observation is not None:
            size += result.observation.size_bytes
        self.rows.pop(action.action_id, None)
        self.rows[action.action_id] = row
        if not again or size > ROW_BYTES_MAX or row.state is ACKNOWLEDGED:
            self._passing.append(action.action_id)

    def trim(self) -> None:
        """Forget what only the group that has committed needed, and the oldest of everything."""
        for action_id in self._passing:
            self.rows.pop(action_id, None)
        self._passing.clear()
        for kept in (self.rows, self.heads, self.outstanding):
            _forget_oldest(kept)


def _forget_oldest(kept: dict[Any, Any]) -> None:
    if len(kept) > KEPT_MAX:
        for key in list(islice(kept, len(kept) - KEPT_MAX)):
            del kept[key]
