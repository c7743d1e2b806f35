"""Prepared statements over libpq's pipeline, without a cursor for each.

psycopg's own pipeline costs 50 µs of Python a statement, more than most of them cost the server.
Statements are sent as they are queued, so the server works while the next ones are packed; waiting
for their answers is one round trip. Values that are no columns travel as text and are what the
server makes of them.
"""

import select
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.adapt import Transformer
from psycopg.pq import DiagnosticField, ExecStatus, Format
from psycopg.pq.abc import PGresult

from stoker.broker.postgres.arrays import Column, packed
from stoker.broker.postgres.connection import Db

Result = list[tuple[Any, ...]]
_GOOD = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
_TEXT, _BINARY = Format


class Answer:
    """What the server said to one statement; empty until it has been waited for."""

    __slots__ = ("rows", "said")

    def __init__(self) -> None:
        self.rows: Result = []
        self.said = ""
        """The command's tag, such as ``COMMIT``."""


class Wire:
    """One connection's statements, in pipelines."""

    def __init__(self, db: Db) -> None:
        self._pg = db.pgconn
        self._loaded = Transformer.from_context(db)
        self._poll = select.poll()
        self._poll.register(self._pg.socket, select.POLLIN)
        self._names: dict[str, bytes] = {}
        self._prepared = 0
        self._asked = False
        self._due: list[tuple[Answer | None, str]] = []
        """What answers will come for; ``None``: the statement is being prepared."""

    def send(self, statement: str, parameters: Sequence[object] = ()) -> Answer:
        """Queue a statement; it is prepared the first time."""
        pg, name = self._pg, self._names.get(statement)
        values = [_packed(value) for value in parameters]
        formats = [_BINARY if isinstance(v, Column | bytes) else _TEXT for v in parameters]
        if not self._due:
            pg.enter_pipeline_mode()
        if name is None:
            self._prepared += 1
            name = self._names[statement] = b"s%d" % self._prepared
            pg.send_prepare(name, numbered(statement))
            self._due.append((None, statement))
        pg.send_query_prepared(name, values, formats, _BINARY)
        pg.flush()
        answer = Answer()
        self._due.append((answer, statement))
        return answer

    def ask(self) -> None:
        """Ask for the answers of all that was queued, and do not wait for them yet."""
        if not self._asked:
            self._pg.pipeline_sync()
            self._asked = True

    def wait(self) -> None:
        """Wait for the answers of all that was queued.

        Raises:
            psycopg.Error: the first thing that went wrong; what came behind it was not executed.
        """
        if not self._due:
            return
        due, self._due = self._due, []
        self.ask()
        self._asked = False
        wrong: psycopg.Error | None = None
        for answer, statement in due:
            result = self._next()
            if result is None or self._pg.status:
                raise _error(result)
            if result.status not in _GOOD:
                wrong = wrong or _error(result)
                if answer is None:
                    del self._names[statement]
            elif answer is not None:
                self._load(answer, result)
            if (more := self._next()) is not None:
                raise _error(more)
        synced = self._next()
        if synced is None or synced.status != ExecStatus.PIPELINE_SYNC:
            raise _error(synced)
        self._pg.exit_pipeline_mode()
        if wrong is not None:
            raise wrong

    def _load(self, answer: Answer, result: PGresult) -> None:
        answer.said = (result.command_status or b"").decode()
        if result.status == ExecStatus.TUPLES_OK and result.ntuples:
            self._loaded.set_pgresult(result)
            answer.rows = self._loaded.load_rows(0, result.ntuples, tuple)

    def _next(self) -> PGresult | None:
        pg = self._pg
        while pg.is_busy():
            unsent = pg.flush()
            self._poll.modify(pg.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            self._poll.poll()
            pg.consume_input()
        return pg.get_result()


def numbered(statement: str) -> bytes:
    """Return a statement with its places numbered as the server wants them."""
    first, *rest = statement.split("%s")
    return "".join([first, *(f"${i}{part}" for i, part in enumerate(rest, 1))]).encode()


def _packed(value: object) -> bytes | None:
    if isinstance(value, Column):
        return packed(value)
    if value is None or isinstance(value, bytes):
        return value
    return str(value).encode() if not isinstance(value, bool) else b"%d" % value


def _error(result: PGresult | None) -> psycopg.Error:
    if result is None:
        return psycopg.OperationalError("the connection is lost")
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    try:
        kind = errors.lookup(state)
    except KeyError:
        kind = psycopg.OperationalError
    return kind((result.error_message or b"the connection is lost").decode(errors="replace"))
