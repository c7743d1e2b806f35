"""One gateway's connection: transactions, named statements, ids.

A lost connection is ``StorageLost``: the open transaction may or may not have been committed, so
nobody is answered. Where another gateway was in the way (``StorageConflict``) nothing was kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files

import psycopg
from psycopg import errors

from stoker.broker.books import COUNTER_BITS
from stoker.broker.postgres.connection import Db, ledger_key
from stoker.broker.postgres.promises import advice
from stoker.broker.postgres.wire import Answer, Result, Wire
from stoker.broker.store import StorageConflict, StorageFull, StorageLost, StorageUnfit
from stoker.seams.faultpoints import declare, reach

COMMIT_BEFORE = declare("gateway.commit.before", "a gateway's group is about to commit")
COMMIT_AFTER = declare("gateway.commit.after", "a gateway's group has committed; nobody is told")

_HOT = """place action_id run_id part rollout_id class holder rank late digest accepted_wall
deadline_wall accepted_boot deadline_boot due_boot state parked_on deliveries attempts fence worker
alone suspect queue_seconds settled_status settled_fence reclaim_fence reclaim_worker history"""
HOT = _HOT.split()
"""Columns of a row as ``store_sqlite_rows`` knows them, in its order."""
HOT_KINDS = "qttttttqttdddddqtqqqtqqdtqqtb"
MUTABLE_KINDS = "dqtqqqtqqdtqqtbq"
_SQL_TYPES = {"q": "bigint", "d": "float8", "t": "text", "b": "bytea"}

_DRAWN_MIN = 32
_IN_THE_WAY = (
    errors.DeadlockDetected,
    errors.SerializationFailure,
    errors.UniqueViolation,
    errors.DivisionByZero,  # how a statement says that rows are not as they were taken to be
)


class Session:
    """A connection to one ledger's schema."""

    def __init__(self, db: Db, schema: str) -> None:
        self.schema = schema
        self.key = ledger_key(schema)
        self.commits = 0
        self.syncs = 0
        self.epoch = 0
        self._db = db
        self._wire = Wire(db)
        self._sql = _statements()
        self._ids: list[int] = []
        self._piped = False

    # --- transactions and statements

    def begin(self) -> None:
        """Open a transaction."""
        self.begin_with(())

    def begin_with(self, asked: Sequence[tuple[str, tuple[object, ...]]]) -> list[Result]:
        """Open a transaction and execute its first statements in the same go."""
        self._ids.clear()
        return self.together((("BEGIN", ()), *asked))[1:]

    def commit(self, *, sync: bool) -> None:
        """Close the transaction. **Durability:** as the server's settings say, with ``sync``."""
        self.commit_after(lambda: None, sync=sync)

    def commit_after(
        self,
        write: Callable[[], None],
        *,
        sync: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Close the transaction, what ``write`` sends and the commit in one go.

        ``meanwhile`` is called while the server is busy with that, and may yet fail.
        """
        reach(COMMIT_BEFORE)
        with self.pipelined():
            write()
            if not sync:
                self.run("SET LOCAL synchronous_commit = off")
            done = self.run("COMMIT")
            self._wire.ask()
            meanwhile()
        if done.said != "COMMIT":
            raise StorageConflict(f"the transaction ended with {done.said}")
        self.commits += 1
        self.syncs += sync
        reach(COMMIT_AFTER)

    def rollback(self) -> None:
        """Undo the transaction."""
        self._ids.clear()
        with suppress(psycopg.Error):  # what was streamed is undone, however it went
            self._wire.wait()
        if not self._db.closed and self._db.info.transaction_status:
            self.run("ROLLBACK")

    def advice(self) -> tuple[str, ...]:
        """Return what would make the server a better home for the ledger."""
        with _translated():
            self._wire.wait()  # what was streamed has its answers taken before psycopg asks
            return advice(self._db)

    def close(self) -> None:
        """Let go of the connection, and with it of every lock."""
        self._db.close()

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Send the statements inside in one go."""
        if self._piped:
            yield
            return
        self._piped = True
        try:
            with _translated():
                yield
                self._wire.wait()
        except BaseException:
            with suppress(psycopg.Error):
                self._wire.wait()
            raise
        finally:
            self._piped = False

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """Send the statements inside and go on: the server carries them out meanwhile.

        How they went is heard by whatever waits next, at the latest by the commit.
        """
        piped, self._piped = self._piped, True
        try:
            yield
        finally:
            self._piped = piped

    def run(self, name: str, parameters: Sequence[object] = ()) -> Answer:
        """Execute one named statement; when pipelined or streamed, its answer comes later."""
        with _translated():
            answer = self._wire.send(self._sql.get(name, name), parameters)
            if not self._piped:
                self._wire.wait()
        return answer

    def all(self, name: str, *parameters: object) -> Result:
        """Return every row of one named statement."""
        with _translated():
            answer = self._wire.send(self._sql.get(name, name), parameters)
            self._wire.wait()
        return answer.rows

    def together(self, asked: Sequence[tuple[str, tuple[object, ...]]]) -> list[Result]:
        """Execute statements in one go, in order, and return the rows of each."""
        with self.pipelined():
            answers = [self.run(name, parameters) for name, parameters in asked]
        return [answer.rows for answer in answers]

    def draw(self, at_least: int = 1) -> int:
        """Return an id above all that was drawn before the newest lock of this group."""
        if not self._ids:
            self.drawn(self.all("draw", max(at_least, _DRAWN_MIN)))
        return self._ids.pop()

    def drawn(self, numbers: Result) -> None:
        """Take ids that came with the newest lock, in the same go."""
        self._ids = [self.epoch << COUNTER_BITS | number for (number,) in reversed(numbers)]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except errors.DiskFull as error:
        raise StorageFull(str(error)) from error
    except _IN_THE_WAY as error:
        raise StorageConflict(str(error)) from error
    except errors.CharacterNotInRepertoire as error:
        raise StorageUnfit("PostgreSQL keeps no text with a NUL in it") from error
    except psycopg.OperationalError as error:
        raise StorageLost(" ".join(str(error).split())) from None


def _statements() -> dict[str, str]:
    text = (files("stoker.broker.postgres") / "statements.sql").read_text("utf-8")
    named = (part.partition("\n") for part in text.split("-- name: ")[1:])
    filled = {
        "{hot}": ", ".join(f"a.{name}" for name in HOT),
        "{unnest_hot}": _unnest(HOT_KINDS),
        "{unnest_mutable}": _unnest(MUTABLE_KINDS),
    }
    found: dict[str, str] = {}
    for name, _, body in named:
        statement = body.strip().rstrip(";")
        for mark, filling in filled.items():
            statement = statement.replace(mark, filling)
        found[name.strip()] = statement
    return found


def _unnest(kinds: str) -> str:
    return ", ".join(f"%s::{_SQL_TYPES[kind]}[]" for kind in kinds)
