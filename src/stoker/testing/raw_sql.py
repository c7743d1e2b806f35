"""The floor of the PostgreSQL bench: the same rows by plain batched SQL, which promises little.

One Python client is coordinator and worker in turn. It passes whole batches through, with the syncs
of a gateway and the same rows: journal and its end, checked against what was expected; action with
run, partition, rollout, digest and times; input and result, encoded and decoded; event; heartbeat;
and all of it removed again as the ledger does. It has the indexes its own statements need. No caps,
priorities, expiry, parking, losses, counters, or requests over a socket.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg import Connection

from stoker.broker.postgres.arrays import Blobs, Floats, Ints, Texts
from stoker.model.action import Action, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId
from stoker.model.value import inline_value

_TABLES = """
CREATE SEQUENCE raw_fence;
CREATE TABLE raw_action (id bigint PRIMARY KEY, action_id text NOT NULL UNIQUE,
    run_id text NOT NULL, part text NOT NULL, rollout_id text NOT NULL, class text NOT NULL,
    digest text NOT NULL,
    accepted double precision NOT NULL, deadline double precision NOT NULL, state smallint NOT NULL,
    attempts bigint NOT NULL, fence bigint NOT NULL, worker text, status text)
    WITH (fillfactor = 70);
CREATE INDEX raw_queued ON raw_action (class, id) WHERE state = 1;
CREATE TABLE raw_input (id bigint PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE raw_result (id bigint PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE raw_event (id bigint PRIMARY KEY, run_id text NOT NULL, part text NOT NULL,
    action bigint NOT NULL, action_id text NOT NULL, rollout_id text NOT NULL);
CREATE INDEX raw_event_action ON raw_event (action);
CREATE TABLE raw_rollout (run_id text, rollout_id text, part text NOT NULL, seq bigint NOT NULL,
    PRIMARY KEY (run_id, rollout_id)) WITH (fillfactor = 70);
CREATE TABLE raw_journal (rollout_id text, seq bigint, event bytea NOT NULL,
    PRIMARY KEY (rollout_id, seq));
CREATE TABLE raw_beat (worker text PRIMARY KEY, seen double precision NOT NULL);
"""
_HEADS = """
INSERT INTO raw_rollout SELECT 'run_bench', r, '0', s + 2
FROM unnest(%s::text[], %s::bigint[]) v (r, s)
ON CONFLICT (run_id, rollout_id) DO UPDATE SET seq = excluded.seq
WHERE raw_rollout.seq = excluded.seq - 2"""
_JOURNAL = "INSERT INTO raw_journal SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bytea[])"
_SUBMIT = """
INSERT INTO raw_action
SELECT i, n, 'run_bench', '0', r, 'fast', d, t, t + 86400, 1, 0, 0, NULL, NULL
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::float8[]) v (i, n, r, d, t)"""
_LEASE = """
WITH head AS (SELECT id FROM raw_action WHERE state = 1 AND class = 'fast' ORDER BY id LIMIT %s
    FOR UPDATE SKIP LOCKED)
UPDATE raw_action a SET state = 2, fence = nextval('raw_fence'), worker = 'w' FROM head, raw_input i
WHERE a.id = head.id AND i.id = head.id RETURNING a.id, a.fence, i.value"""
_START = """
UPDATE raw_action a SET state = 3, attempts = attempts + 1
FROM unnest(%s::bigint[], %s::bigint[]) v (id, fence)
WHERE a.id = v.id AND a.fence = v.fence AND a.state = 2"""
_BEAT = """
INSERT INTO raw_beat VALUES ('w', extract(epoch FROM clock_timestamp()))
ON CONFLICT (worker) DO UPDATE SET seen = excluded.seen"""
_COMPLETE = """
WITH done AS (
    UPDATE raw_action a SET state = 4, status = 'ok', fence = 0, worker = NULL
    FROM unnest(%s::bigint[], %s::bigint[]) v (id, fence)
    WHERE a.id = v.id AND a.fence = v.fence AND a.state = 3
    RETURNING a.id, a.action_id, a.rollout_id)
INSERT INTO raw_event
SELECT nextval('raw_fence'), 'run_bench', '0', id, action_id, rollout_id FROM done"""
_RESULT = "INSERT INTO raw_result SELECT * FROM unnest(%s::bigint[], %s::bytea[])"
_INPUT = "INSERT INTO raw_input SELECT * FROM unnest(%s::bigint[], %s::bytea[])"
_TOLD = """
SELECT e.id, e.action, r.value FROM raw_event e JOIN raw_result r ON r.id = e.action
ORDER BY e.id LIMIT %s"""
_GONE = (
    "UPDATE raw_action SET state = 5 WHERE id = ANY(%s::bigint[])",
    "DELETE FROM raw_input WHERE id = ANY(%s::bigint[])",
    "DELETE FROM raw_result WHERE id = ANY(%s::bigint[])",
    "DELETE FROM raw_event WHERE action = ANY(%s::bigint[])",
)

_encode = msgspec.msgpack.Encoder().encode
_decode_action = msgspec.msgpack.Decoder(Action).decode
_decode_completion = msgspec.msgpack.Decoder(Completion).decode


class RawSql:
    """Batches of cycles over one connection, in the schema it searches first."""

    def __init__(self, db: Connection[Any], payload_bytes: int, row_bytes: int) -> None:
        self._db = db
        self._input = inline_value(b"i" * payload_bytes)
        self._result = inline_value(b"r" * payload_bytes)
        self._row = b"j" * row_bytes
        self._next = 1
        db.execute(_TABLES.encode())

    def cycles(self, total: int, outstanding: int) -> None:
        """Pass ``total`` actions through, ``outstanding`` at once."""
        first = self._next
        done: list[int] = []
        for turn in range(0, total, outstanding):
            ids = list(range(self._next, self._next + outstanding))
            self._next += outstanding
            self._append(first, turn // outstanding, ids, done)
            done = self._work(outstanding)

    def _append(self, first: int, turn: int, ids: list[int], done: Sequence[int]) -> None:
        db, count, seq = self._db, len(ids), 2 * turn
        rollouts = Texts([f"rol_{first + i}" for i in range(count)])
        actions = [self._action(i, r, seq) for i, r in zip(ids, rollouts.values, strict=True)]
        digests = Texts([action.digest() for action in actions])
        with db.transaction(), db.pipeline():
            moved = db.execute(_HEADS.encode(), (rollouts, Ints([seq] * count)))
            entries = Blobs([self._row] * 2 * count)
            seqs = Ints([seq] * count + [seq + 1] * count)
            db.execute(_JOURNAL.encode(), (Texts([*rollouts.values] * 2), seqs, entries))
            names, times = Texts([f"act_{i}" for i in ids]), Floats([0.0] * count)
            db.execute(_SUBMIT.encode(), (Ints(ids), names, rollouts, digests, times))
            db.execute(_INPUT.encode(), (Ints(ids), Blobs([_encode(one) for one in actions])))
            for statement in _GONE:
                db.execute(statement.encode(), (Ints(done),))
        assert moved.rowcount == count, "somebody else wrote these journals"

    def _action(self, number: int, rollout: str, seq: int) -> Action:
        return Action(
            action_id=ActionId(f"act_{number}"),
            run_id=RunId("run_bench"),
            rollout_id=RolloutId(rollout),
            path=CallPath(str(seq)),
            step=seq,
            worker_class="fast",
            tool="call",
            input=self._input,
            effect=Effect.PURE,
            timeout_seconds=60.0,
            deadline_seconds=86_400.0,
        )

    def _work(self, slots: int) -> list[int]:
        db = self._db
        leased = self._lazily(_LEASE, (slots,)).fetchall()
        held = (Ints([row[0] for row in leased]), Ints([row[1] for row in leased]))
        self._lazily(_START, held)
        self._lazily(_BEAT)
        results = [_encode(self._completion(row[1], _decode_action(row[2]))) for row in leased]
        with db.transaction(), db.pipeline():
            db.execute(_COMPLETE.encode(), held)
            db.execute(_RESULT.encode(), (held[0], Blobs(results)))
        told = db.execute(_TOLD.encode(), (slots,), binary=True).fetchall()
        for _, _, value in told:
            assert _decode_completion(value).status is CompletionStatus.OK, "a result is read"
        return [row[1] for row in told]

    def _completion(self, fence: int, action: Action) -> Completion:
        return Completion(
            action_id=action.action_id,
            fence=Fence(fence),
            status=CompletionStatus.OK,
            observation=self._result,
        )

    def _lazily(self, statement: str, parameters: tuple[object, ...] = ()) -> Any:  # noqa: ANN401 - psycopg's cursor
        """Execute one statement in a transaction that does not wait for the disk."""
        db = self._db
        with db.transaction(), db.pipeline():
            db.execute("SET LOCAL synchronous_commit = off")
            return db.execute(statement.encode(), parameters or None, binary=True)
