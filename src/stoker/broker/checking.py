"""The invariants of a ledger, as far as rows at rest show them: for ``stoker ledger check``.

Works on a copy of the database, never on the ledger itself. Each rule is one query for the rows
that break it, so that a million rows cost seconds; what lies in encoded columns is decoded row by
row. The rules cite the invariants of DESIGN §4.
"""

from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from stoker.broker.schema import migrate
from stoker.broker.store import Meta
from stoker.broker.store_sqlite_files import read_meta
from stoker.model.action import Action
from stoker.model.completion import Completion
from stoker.model.value import Value, content_digest

T = TypeVar("T")
_EACH_MAX = 20
"""Problems of one kind that are told; more are counted."""


class DatabaseChecked(msgspec.Struct, kw_only=True):
    """What was looked at, and every problem found."""

    schema_version: int = 0
    """Of the file as it was found."""
    lineage: str = ""
    epoch: int = 0
    actions: int = 0
    unacknowledged: int = 0
    size_bytes: int = 0
    problems: list[str] = []
    values: dict[str, int] = {}
    """Digest → bytes of content that lies in the artifact store."""


def check_database(path: Path) -> DatabaseChecked:
    """Check the copy ``path``; a file SQLite cannot read at all is one problem."""
    checked = DatabaseChecked(size_bytes=path.stat().st_size)
    try:
        with closing(apsw.Connection(str(path))) as db:
            _check(db, path, checked)
    except apsw.Error as error:
        checked.problems.append(f"file: it cannot be read to its end ({error})")
    return checked


def _check(db: apsw.Connection, path: Path, checked: DatabaseChecked) -> None:
    said = [row[0] for row in db.execute(f"PRAGMA integrity_check({_EACH_MAX})")]
    if said != ["ok"]:
        checked.problems += [f"file: {line}" for line in said]
    checked.schema_version = migrate(db, path)
    meta = read_meta(db)
    checked.lineage, checked.epoch = meta.lineage, meta.epoch
    [(checked.actions, checked.unacknowledged)] = _all(
        db, "SELECT count(*), count(*) FILTER (WHERE state = 4) FROM action"
    )
    for invariant, sentence, query in _rules():
        bound = {"epoch": meta.epoch} if ":epoch" in query else {}
        rows = db.execute(query, bound)
        _tell(checked, invariant, (sentence.format(*row, epoch=meta.epoch) for row in rows))
    _tell(checked, "counters", _counters(db, meta))
    _tell(checked, "content", _encoded(db, checked.values))


def _tell(checked: DatabaseChecked, kind: str, found: Iterator[str]) -> None:
    more = 0
    for number, problem in enumerate(found):
        if number < _EACH_MAX:
            checked.problems.append(f"{kind}: {problem}")
        else:
            more += 1
    if more:
        checked.problems.append(f"{kind}: and {more} more of this kind")


def _counters(db: apsw.Connection, meta: Meta) -> Iterator[str]:
    """Compare totals, which only grow, with what the rows still show."""
    [(deliveries, attempts)] = _all(
        db, "SELECT coalesce(sum(deliveries), 0), coalesce(sum(attempts), 0) FROM action"
    )
    for name, rows, total in (
        ("deliveries", deliveries, meta.deliveries),
        ("attempts", attempts, meta.attempts),
    ):
        if rows > total:
            yield f"rows show {rows} {name} and the ledger has counted {total}"
    ended = "SELECT settled_status, count(*) FROM action WHERE state >= 4 GROUP BY 1"
    for status, count in _all(db, ended):
        total = meta.completions.get(status, 0)
        if count > total:
            yield f"{count} results are {status} and the ledger has counted {total}"


def _rules() -> Iterator[tuple[str, str, str]]:
    """Yield invariant, sentence and query of each rule."""
    text = (files("stoker.broker") / "sql" / "checks.sql").read_text("utf-8")
    for part in text.split("-- check: ")[1:]:
        said, _, query = part.partition("\n")
        invariant, _, sentence = said.partition(": ")
        yield invariant, sentence, query.strip()


def _encoded(db: apsw.Connection, values: dict[str, int]) -> Iterator[str]:
    """Decode inputs and results: digests, bounds and ids against their rows."""
    inputs = _all(
        db,
        "SELECT a.action_id, a.digest, a.attempts, a.deliveries, i.action "
        "FROM input i JOIN action a USING (place)",
    )
    for action_id, digest, attempts, deliveries, stored in inputs:
        action = _decoded(Action, stored)
        if action is None:
            yield f"the input of {action_id} does not decode"
            continue
        for problem in _action(action, digest, (attempts, deliveries)):
            yield f"the input of {action_id}: {problem}"
        yield from value_problems(action.input, values, f"the input of {action_id}")
    results = _all(
        db,
        "SELECT a.action_id, a.settled_fence, a.settled_status, r.completion "
        "FROM result r JOIN action a USING (place)",
    )
    for action_id, fence, status, stored in results:
        result = _decoded(Completion, stored)
        if result is None:
            yield f"the result of {action_id} does not decode"
            continue
        if (result.action_id, result.fence, result.status) != (action_id, fence, status):
            yield (
                f"the result of {action_id} is that of {result.action_id}, {result.status} under "
                f"{result.fence}, where its row says {status} under {fence} (I2)"
            )
        yield from value_problems(result.observation, values, f"the result of {action_id}")


def _all(db: apsw.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    yield from db.execute(query)


def _decoded(kind: type[T], stored: bytes) -> T | None:
    try:
        return msgspec.msgpack.decode(stored, type=kind)
    except msgspec.MsgspecError:
        return None


def _action(action: Action, digest: str, counts: tuple[int, int]) -> Iterator[str]:
    attempts, deliveries = counts
    if action.digest() != digest:
        yield "it is not what was accepted under its digest (I7)"
    if attempts > action.attempts_max or deliveries > action.deliveries_max:
        yield (
            f"{attempts} of {action.attempts_max} attempts, {deliveries} of "
            f"{action.deliveries_max} deliveries (I5)"
        )


def value_problems(value: Value | None, values: dict[str, int], whose: str) -> Iterator[str]:
    """Check inline content by its digest; note the address of any other in ``values``."""
    if value is None:
        return
    if value.inline is None:
        values[value.digest] = value.size_bytes
    elif len(value.inline) != value.size_bytes or content_digest(value.inline) != value.digest:
        yield f"{whose}: its content is not that of digest {value.digest}"
