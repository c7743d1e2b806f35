"""The floor of the PostgreSQL bench: the same rows by plain batched SQL, which promises little.

One Python client passes whole batches through seven statements' worth of phases with the syncs of
a gateway: fences are checked, journal, input, result and event are written and removed again. No
caps, priorities, deadlines, expiry, partitions, or requests over a socket.
"""

from typing import Any

from psycopg import Connection

from stoker.broker.postgres.arrays import Blobs, Ints, Texts

_TABLES = """
CREATE SEQUENCE raw_fence;
CREATE TABLE raw_action (id bigint PRIMARY KEY, action_id text NOT NULL UNIQUE, class text NOT NULL,
    state smallint NOT NULL, fence bigint NOT NULL, worker text) WITH (fillfactor = 70);
CREATE INDEX raw_queued ON raw_action (class, id) WHERE state = 1;
CREATE TABLE raw_input (id bigint PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE raw_result (id bigint PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE raw_event (id bigint PRIMARY KEY, action bigint NOT NULL);
CREATE TABLE raw_journal (head bigint, seq bigint, event bytea NOT NULL, PRIMARY KEY (head, seq));
CREATE TABLE raw_beat (worker text PRIMARY KEY, seen double precision NOT NULL);
"""
_LEASE = """
WITH head AS (SELECT id FROM raw_action WHERE state = 1 AND class = 'fast' ORDER BY id LIMIT %s
    FOR UPDATE SKIP LOCKED)
UPDATE raw_action a SET state = 2, fence = nextval('raw_fence'), worker = 'w' FROM head, raw_input i
WHERE a.id = head.id AND i.id = head.id RETURNING a.id, a.fence, i.value"""
_START = """
UPDATE raw_action a SET state = 3 FROM unnest(%s::bigint[], %s::bigint[]) v (id, fence)
WHERE a.id = v.id AND a.fence = v.fence AND a.state = 2"""
_COMPLETE = """
UPDATE raw_action a SET state = 4 FROM unnest(%s::bigint[], %s::bigint[]) v (id, fence)
WHERE a.id = v.id AND a.fence = v.fence AND a.state = 3"""


class RawSql:
    """Batches of cycles over one connection, in the schema it searches first."""

    def __init__(self, db: Connection[Any], payload_bytes: int, row_bytes: int) -> None:
        self._db = db
        self._payload = b"p" * payload_bytes
        self._row = b"j" * row_bytes
        self._next = 1
        db.execute(_TABLES.encode())

    def cycles(self, total: int, outstanding: int) -> None:
        """Pass ``total`` actions through, ``outstanding`` at once."""
        done: list[int] = []
        for _ in range(0, total, outstanding):
            ids = list(range(self._next, self._next + outstanding))
            self._next += outstanding
            self._append(ids, done)
            done = self._work(outstanding)

    def _append(self, ids: list[int], done: list[int]) -> None:
        db, count = self._db, len(ids)
        with db.transaction(), db.pipeline():
            names = Texts([f"act_{i}" for i in ids])
            db.execute(
                "INSERT INTO raw_journal SELECT * FROM unnest(%s::bigint[], %s::bigint[], "
                "%s::bytea[])",
                (
                    Ints([*ids, *ids]),
                    Ints([0] * count + [1] * count),
                    Blobs([self._row] * 2 * count),
                ),
            )
            db.execute(
                "INSERT INTO raw_action SELECT i, n, 'fast', 1, 0, NULL "
                "FROM unnest(%s::bigint[], %s::text[]) v (i, n)",
                (Ints(ids), names),
            )
            self._blobs("raw_input", ids)
            gone = (Ints(done),)
            db.execute("UPDATE raw_action SET state = 5 WHERE id = ANY(%s::bigint[])", gone)
            for table, column in (("input", "id"), ("result", "id"), ("event", "action")):
                statement = f"DELETE FROM raw_{table} WHERE {column} = ANY(%s::bigint[])"  # noqa: S608 - our own names
                db.execute(statement.encode(), gone)

    def _blobs(self, table: str, ids: list[int]) -> None:
        statement = f"INSERT INTO {table} SELECT * FROM unnest(%s::bigint[], %s::bytea[])"  # noqa: S608 - our own names
        self._db.execute(statement.encode(), (Ints(ids), Blobs([self._payload] * len(ids))))

    def _work(self, slots: int) -> list[int]:
        db = self._db
        leased = self._lazily(_LEASE, (slots,)).fetchall()
        held = (Ints([row[0] for row in leased]), Ints([row[1] for row in leased]))
        self._lazily(_START, held)
        self._lazily(
            "INSERT INTO raw_beat VALUES ('w', extract(epoch FROM clock_timestamp())) "
            "ON CONFLICT (worker) DO UPDATE SET seen = excluded.seen"
        )
        with db.transaction(), db.pipeline():
            db.execute(_COMPLETE.encode(), held)
            self._blobs("raw_result", [row[0] for row in leased])
            db.execute(
                "INSERT INTO raw_event SELECT nextval('raw_fence'), i FROM unnest(%s::bigint[]) i",
                held[:1],
            )
        told = db.execute(
            "SELECT e.id, e.action, r.value FROM raw_event e JOIN raw_result r ON r.id = e.action "
            "ORDER BY e.id LIMIT %s",
            (slots,),
            binary=True,
        )
        return [row[1] for row in told.fetchall()]

    def _lazily(self, statement: str, parameters: tuple[object, ...] = ()) -> Any:  # noqa: ANN401 - psycopg's cursor
        """Execute one statement in a transaction that does not wait for the disk."""
        db = self._db
        with db.transaction(), db.pipeline():
            db.execute("SET LOCAL synchronous_commit = off")
            return db.execute(statement.encode(), parameters or None, binary=True)
