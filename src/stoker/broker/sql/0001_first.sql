-- One ledger. Ids are drawn by the owner (epoch << 40 | counter), never by SQLite: an id lost with
-- an unsynced commit must not come back for something else (facts: the ABA failure).
CREATE TABLE meta (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    record BLOB NOT NULL                       -- msgpack of store.Meta
);

CREATE TABLE owner (
    run_id      TEXT NOT NULL,
    part        TEXT NOT NULL,
    fence       INTEGER NOT NULL,
    incarnation TEXT NOT NULL,
    PRIMARY KEY (run_id, part)
) WITHOUT ROWID;

CREATE TABLE worker (
    worker_id TEXT PRIMARY KEY,
    name      TEXT NOT NULL,
    slots     BLOB NOT NULL,                   -- msgpack of {class: slots}
    ended     INTEGER NOT NULL                 -- known to be dead for good
) WITHOUT ROWID;

-- Hot columns only. A row outlives its input and result: acknowledged, it is the tombstone that
-- keeps ids from coming back (I7).
CREATE TABLE action (
    place           INTEGER PRIMARY KEY,       -- order of acceptance
    action_id       TEXT NOT NULL,
    run_id          TEXT NOT NULL,
    part            TEXT NOT NULL,
    rollout_id      TEXT NOT NULL,
    class           TEXT NOT NULL,
    holder          TEXT NOT NULL,             -- '' = any worker
    rank            INTEGER NOT NULL,          -- minus priority
    late            TEXT NOT NULL,
    digest          TEXT NOT NULL,
    accepted_wall   REAL NOT NULL,
    deadline_wall   REAL NOT NULL,
    accepted_boot   REAL NOT NULL,
    deadline_boot   REAL NOT NULL,
    due_boot        REAL NOT NULL,
    state           INTEGER NOT NULL,          -- 0 parked 1 accepted 2 leased 3 started 4 completed 5 acknowledged
    parked_on       TEXT NOT NULL,
    deliveries      INTEGER NOT NULL,
    attempts        INTEGER NOT NULL,
    fence           INTEGER NOT NULL,          -- 0 = none
    worker          TEXT,
    alone           INTEGER NOT NULL,
    suspect         INTEGER NOT NULL,
    queue_seconds   REAL NOT NULL,
    settled_status  TEXT,
    settled_fence   INTEGER NOT NULL,
    reclaim_fence   INTEGER NOT NULL,
    reclaim_worker  TEXT,
    history         BLOB                       -- msgpack of causes and fences; NULL in ordinary lives
);

CREATE UNIQUE INDEX action_by_id ON action (action_id);
CREATE INDEX action_by_rollout ON action (rollout_id, place);
CREATE INDEX action_queued ON action (class, holder, suspect, rank, place)
    WHERE state = 1;
CREATE INDEX action_parked ON action (class, place)
    WHERE state = 0 AND parked_on = 'caps';
CREATE INDEX action_parked_of ON action (rollout_id, place)
    WHERE state = 0 AND parked_on = 'rollout';
CREATE INDEX action_held ON action (holder)
    WHERE state < 2 AND holder <> '';
CREATE INDEX action_unfinished ON action (rollout_id, parked_on)
    WHERE state < 4;
CREATE INDEX action_due ON action (due_boot)
    WHERE state < 4;
CREATE INDEX action_in_hands ON action (place)
    WHERE fence <> 0 OR reclaim_fence <> 0;
CREATE INDEX action_dead ON action (run_id, place)
    WHERE settled_status = 'dead';

-- Kept apart from the hot columns, so that a change of state does not rewrite it.
CREATE TABLE input (
    place  INTEGER PRIMARY KEY,
    action BLOB NOT NULL                       -- msgpack of model.Action
);
CREATE TABLE result (
    place      INTEGER PRIMARY KEY,
    completion BLOB NOT NULL                   -- msgpack of model.Completion
);

CREATE TABLE event (
    event_id   INTEGER PRIMARY KEY,
    run_id     TEXT NOT NULL,
    part       TEXT NOT NULL,
    kind       TEXT NOT NULL,
    place      INTEGER NOT NULL,
    action_id  TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    detail     TEXT NOT NULL,
    completion BLOB                            -- of a reconciled late result only
);
CREATE INDEX event_by_partition ON event (run_id, part, event_id);
CREATE INDEX event_by_place ON event (place);
CREATE INDEX event_passing ON event (run_id, part, event_id)
    WHERE kind IN ('requeued', 'reclaimed');

CREATE TABLE rollout (
    head       INTEGER PRIMARY KEY,            -- order of admission
    run_id     TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    part       TEXT NOT NULL,
    seq        INTEGER NOT NULL,               -- entries in its journal
    finished   INTEGER NOT NULL
);
CREATE UNIQUE INDEX rollout_by_id ON rollout (run_id, rollout_id);
CREATE INDEX rollout_by_run ON rollout (run_id, head);

-- Entries lie in order of arrival, so that a group of small appends fills few pages.
CREATE TABLE journal (
    place INTEGER PRIMARY KEY,
    head  INTEGER NOT NULL,
    seq   INTEGER NOT NULL,
    event BLOB NOT NULL
);
CREATE UNIQUE INDEX journal_by_rollout ON journal (head, seq);
