"""Groups that decide from what this gateway wrote last, without locking it first.

Most rows that a request names were written here a moment ago. A lock for each of them costs the
server as much as the change itself, so their versions are checked by the statements that change
them instead: a row, or a journal's end, that somebody else has changed since fails the group, which
is undone whole and tried again with everything locked first. What was decided about and not changed
is checked at the end.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from stoker.broker.postgres.arrays import KINDS, Ints, Xids
from stoker.broker.postgres.connection import Db
from stoker.broker.postgres.known import Known, Trusted
from stoker.broker.postgres.needs import Needs
from stoker.broker.postgres.session import Session
from stoker.broker.postgres.wire import Answer, Result
from stoker.broker.rows import Row
from stoker.broker.store import Head, StorageConflict
from stoker.model.ids import ActionId

_ORDER = attrgetter("order")


class TrustingSession(Session):
    """A session whose groups may take for granted what they were told last."""

    def __init__(self, db: Db, schema: str) -> None:
        super().__init__(db, schema)
        self._known = Known()
        self._careful = False
        """The last group failed: the next one takes nothing for granted."""
        self._trusted: dict[int, int] = {}
        """Rows that this group has neither locked nor written, by place, as of a version."""
        self._ends: dict[int, int] = {}
        """Journals that this group has not moved yet, by key: where they are taken to end."""
        self._assumed: set[ActionId] = set()
        """Ids that this group takes to be new."""
        self._moved: dict[int, Head] = {}
        self._written: dict[int, Row] = {}
        """What the open transaction wrote; known when it has been committed."""
        self._rewritten = False
        """The open transaction changed rows without naming what they hold now."""
        self._later: list[tuple[str, tuple[object, ...]]] = []

    def begin_with(self, asked: Sequence[tuple[str, tuple[object, ...]]]) -> list[Result]:
        """Open a transaction and execute its first statements in the same go."""
        self._leave_group()
        return super().begin_with(asked)

    def commit_after(
        self,
        write: Callable[[], None],
        *,
        sync: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Close the transaction, what ``write`` sends and the commit in one go."""
        asked: list[Answer] = []

        def write_all() -> None:
            write()
            for name, parameters in self._later:
                self.run(name, parameters)
            self._check_trust()
            if self._written:
                asked.append(self.run("version"))

        super().commit_after(write_all, sync=sync, meanwhile=meanwhile)
        if self._rewritten:
            self._known.clear()  # rows read since may have been written again, as one version
        elif asked:
            [(version,)] = asked[0].rows
            for row in self._written.values():
                self._known.keep(version, row)
        for head in self._moved.values():
            self._known.keep_head(head)
        self._careful = False
        self._leave_group()

    def rollback(self) -> None:
        """Undo the transaction; the next one locks everything first."""
        self._careful = True
        super().rollback()

    def trust(self, needs: Needs) -> Trusted:
        """Return what the next group may decide from without a lock."""
        trusted, known = Trusted(), self._known
        if self._careful:
            return trusted
        for action_id in (needs.steps | needs.fresh) - needs.actions:
            found = known.named(action_id)
            if found is not None:
                trusted.rows[action_id] = found[1]
        trusted.absent = needs.fresh - needs.actions - trusted.rows.keys()
        trusted.heads = {key: known.heads[key] for key in needs.moves if key in known.heads}
        return trusted

    def rely(self, trusted: Trusted) -> None:
        """Have the open group fail if anything of this turns out to be otherwise."""
        for row in trusted.rows.values():
            found = self._known.get(row.order)
            assert found is not None, "nothing is forgotten before a group has been written"
            self._trusted[row.order] = found[0]
        self._ends = {head.key: head.seq for head in trusted.heads.values()}
        self._assumed = set(trusted.absent)

    def _check_trust(self) -> None:
        """Check what was only looked at; what was written has been checked by its statement."""
        if self._ends or self._assumed:
            raise StorageConflict("what a request names is not as this gateway knew it")
        self._verify(list(self._trusted))

    def _verify(self, places: list[int]) -> None:
        if places:
            versions = [self._trusted.pop(place) for place in places]
            self.run("verify", (Ints(places), Xids(versions), len(places)))

    def _step(
        self, name: str, kinds: str, rows: Sequence[Row], *changes: Callable[[Row], object]
    ) -> None:
        """Write one step of rows' lives, if they are still what they were taken to be."""
        if not rows:
            return
        rows = sorted(rows, key=_ORDER)
        versions = [self._trusted.pop(row.order, 0) for row in rows]
        new = [
            KINDS[kind](list(map(change, rows)))
            for kind, change in zip(kinds, changes, strict=True)
        ]
        self.run(name, (Ints([row.order for row in rows]), Xids(versions), *new, len(rows)))
        self._written.update((row.order, row) for row in rows)

    def _leave_group(self) -> None:
        self._written.clear()
        self._later.clear()
        self._trusted.clear()
        self._ends.clear()
        self._assumed.clear()
        self._moved.clear()
        self._rewritten = False
