"""What a gateway wrote or read last, and may take for granted until its group is written.

Every row is kept with its *version*, the transaction that wrote it. Nothing here is believed
without being checked: a row of which a group took for granted what it holds is written, or looked
at, under the condition that its version is still the same, and the group fails otherwise.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from stoker.broker.rows import ACKNOWLEDGED, Row
from stoker.broker.store import Head
from stoker.model.ids import ActionId, RolloutId, RunId

BYTES_MAX = 32 << 20
"""Of rows with their inputs, roughly."""
_ROW_BYTES = 1024
HEADS_MAX = 8192


@dataclass
class Trusted:
    """What a group takes for granted instead of locking it first."""

    rows: dict[ActionId, Row] = field(default_factory=dict)
    heads: dict[tuple[RunId, RolloutId], Head] = field(default_factory=dict)
    absent: set[ActionId] = field(default_factory=set)
    """Ids that are submitted and have not been seen here."""


class Known:
    """Rows and journal ends, oldest first."""

    def __init__(self) -> None:
        self.heads: dict[tuple[RunId, RolloutId], Head] = {}
        self._rows: dict[int, tuple[int, Row]] = {}
        self._places: dict[ActionId, int] = {}
        self.bytes = 0

    def get(self, place: int) -> tuple[int, Row] | None:
        """Return version and row."""
        return self._rows.get(place)

    def named(self, action_id: ActionId) -> tuple[int, Row] | None:
        """Return version and row of one id."""
        place = self._places.get(action_id)
        return None if place is None else self._rows[place]

    def keep(self, version: int, row: Row) -> None:
        """Take a row as it was committed; it is the newest now. Results are not kept."""
        self._drop(row.order)
        if row.state is ACKNOWLEDGED:
            return
        if row.completion is not None:
            row = replace(row, completion=None)
        self._rows[row.order] = (version, row)
        self._places[row.action_id] = row.order
        self.bytes += _size(row)
        while self.bytes > BYTES_MAX:
            self._drop(next(iter(self._rows)))

    def keep_head(self, head: Head) -> None:
        """Take a journal's end as it was committed."""
        heads, key = self.heads, (head.run_id, head.rollout_id)
        heads.pop(key, None)
        heads[key] = head
        if len(heads) > HEADS_MAX:
            del heads[next(iter(heads))]

    def _drop(self, place: int) -> None:
        found = self._rows.pop(place, None)
        if found is not None:
            self.bytes -= _size(found[1])
            del self._places[found[1].action_id]

    def clear(self) -> None:
        """Know nothing of rows any more."""
        self._rows.clear()
        self._places.clear()
        self.bytes = 0


def _size(row: Row) -> int:
    return _ROW_BYTES + len(row.action.input.inline or b"")
