-- One ledger in one schema. Nothing but these rows is shared by its gateways.
-- Hot tables: room on their pages for new versions, and vacuumed long before a fifth has died.

CREATE TABLE meta (
    one     smallint PRIMARY KEY CHECK (one = 1),
    lineage text NOT NULL,
    epoch   bigint NOT NULL,                    -- upper part of every id and fence
    limits  bytea NOT NULL,                     -- msgpack of base.LedgerLimits: one for all gateways
    history text NOT NULL                       -- system identifier and timeline that wrote last
);

-- Lower part of every id and fence. A crash may take numbers back; then `opened` is empty and the
-- epoch rises before anybody draws again.
CREATE SEQUENCE ids AS bigint;

-- Emptied by every crash, kept by a clean shutdown: that is what unlogged tables do.
CREATE UNLOGGED TABLE opened (one smallint PRIMARY KEY CHECK (one = 1));

CREATE TABLE gateway (
    slot bigint PRIMARY KEY,                    -- its counters; an advisory lock says that it lives
    name text NOT NULL
);

-- Sums over all slots count; a gateway writes only rows of its own slot.
CREATE TABLE counter (
    slot      bigint NOT NULL,
    class     text NOT NULL,
    run_id    text NOT NULL,
    state     bigint NOT NULL,                  -- of action; without a class: see books.GAUGES
    parked_on text NOT NULL,
    suspect   bigint NOT NULL,
    held      bigint NOT NULL,                  -- only one worker may take them
    n         bigint NOT NULL,
    PRIMARY KEY (slot, class, run_id, state, parked_on, suspect, held)
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE TABLE total (
    slot bigint NOT NULL,
    name text NOT NULL,
    n    bigint NOT NULL,
    PRIMARY KEY (slot, name)
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE TABLE owner (
    run_id      text NOT NULL,
    part        text NOT NULL,
    fence       bigint NOT NULL,
    incarnation text NOT NULL,
    PRIMARY KEY (run_id, part)
) WITH (fillfactor = 50);

CREATE TABLE worker (
    worker_id text PRIMARY KEY,
    name      text NOT NULL,
    slots     bytea NOT NULL,                   -- msgpack of {class: slots}
    ended     smallint NOT NULL                 -- known to be dead for good
);

-- Silence is counted from here. Emptied by a crash: everybody then has a fresh lease's time.
CREATE UNLOGGED TABLE heartbeat (
    worker_id text PRIMARY KEY,
    seen      double precision NOT NULL,        -- last sign of life
    beat      double precision NOT NULL,        -- last heartbeat, which named all but `missing`
    missing   bytea,                            -- msgpack of {action: when last named}
    lost      smallint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Hot columns only, in the order of the SQLite engine's table.
CREATE TABLE action (
    place           bigint PRIMARY KEY,         -- order of acceptance
    action_id       text NOT NULL,
    run_id          text NOT NULL,
    part            text NOT NULL,
    rollout_id      text NOT NULL,
    class           text NOT NULL,
    holder          text NOT NULL,              -- '' = any worker
    rank            bigint NOT NULL,            -- minus priority
    late            text NOT NULL,
    digest          text NOT NULL,
    accepted_wall   double precision NOT NULL,
    deadline_wall   double precision NOT NULL,
    accepted_boot   double precision NOT NULL,
    deadline_boot   double precision NOT NULL,
    due_boot        double precision NOT NULL,
    state           smallint NOT NULL,          -- 0 parked 1 accepted 2 leased 3 started 4 completed 5 acknowledged
    parked_on       text NOT NULL,
    deliveries      bigint NOT NULL,
    attempts        bigint NOT NULL,
    fence           bigint NOT NULL,            -- 0 = none
    worker          text,
    alone           smallint NOT NULL,
    suspect         smallint NOT NULL,
    queue_seconds   double precision NOT NULL,
    settled_status  text,
    settled_fence   bigint NOT NULL,
    reclaim_fence   bigint NOT NULL,
    reclaim_worker  text,
    history         bytea,                      -- msgpack of causes and fences
    revoke_told     smallint NOT NULL DEFAULT 0 -- the worker of reclaim_fence has been told
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2);

CREATE UNIQUE INDEX action_by_id ON action (action_id);
CREATE INDEX action_by_rollout ON action (rollout_id, place);
CREATE INDEX action_queued ON action (class, holder, suspect, run_id, rank, place)
    WHERE state = 1;
CREATE INDEX action_parked ON action (class, run_id, place)
    WHERE state = 0 AND parked_on = 'caps';
CREATE INDEX action_parked_run ON action (run_id, place) WHERE state = 0 AND parked_on = 'run';
CREATE INDEX action_parked_of ON action (rollout_id, place)
    WHERE state = 0 AND parked_on = 'rollout';
CREATE INDEX action_held ON action (holder) WHERE state < 2 AND holder <> '';
CREATE INDEX action_unfinished ON action (rollout_id) WHERE state < 4;
CREATE INDEX action_due ON action (due_boot) WHERE state < 4;
CREATE INDEX action_in_hands ON action (worker) WHERE fence <> 0;
CREATE INDEX action_reclaim ON action (reclaim_worker) WHERE reclaim_fence <> 0;
CREATE INDEX action_dead ON action (run_id, place) WHERE settled_status = 'dead';

-- Kept apart from the hot columns, so that a change of state does not rewrite it.
CREATE TABLE input (
    place  bigint PRIMARY KEY,
    action bytea NOT NULL                       -- msgpack of model.Action
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE result (
    place      bigint PRIMARY KEY,
    completion bytea NOT NULL                   -- msgpack of model.Completion
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE event (
    event_id   bigint PRIMARY KEY,
    run_id     text NOT NULL,
    part       text NOT NULL,
    kind       text NOT NULL,
    place      bigint NOT NULL,
    action_id  text NOT NULL,
    rollout_id text NOT NULL,
    detail     text NOT NULL,
    completion bytea                            -- of a reconciled late result only
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX event_by_partition ON event (run_id, part, event_id);
CREATE INDEX event_by_place ON event (place);
CREATE INDEX event_passing ON event (run_id, part, event_id)
    WHERE kind IN ('requeued', 'reclaimed');

CREATE TABLE rollout (
    head       bigint PRIMARY KEY,              -- order of admission
    run_id     text NOT NULL,
    rollout_id text NOT NULL,
    part       text NOT NULL,
    seq        bigint NOT NULL,                 -- entries in its journal
    finished   smallint NOT NULL,
    UNIQUE (run_id, rollout_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX rollout_by_run ON rollout (run_id, head);

-- What operators did.
CREATE TABLE audit (
    place     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        double precision NOT NULL,
    who       text NOT NULL,
    what      text NOT NULL,
    run_id    text NOT NULL,                    -- '' = the ledger as a whole
    action_id text NOT NULL,
    detail    text NOT NULL
);
CREATE INDEX audit_by_run ON audit (run_id, place);

CREATE TABLE journal (
    head  bigint NOT NULL,
    seq   bigint NOT NULL,
    event bytea NOT NULL,
    PRIMARY KEY (head, seq)
);
