-- What is looked for by state lies apart, one row for each action without a result: a change of
-- state then moves no index entry of `action`, and finds room on the row's own page.
CREATE TABLE unfinished (
    place         bigint PRIMARY KEY,           -- of action; changed under that row's lock only
    rollout_id    text NOT NULL,
    run_id        text NOT NULL,
    class         text NOT NULL,
    holder        text NOT NULL,
    rank          bigint NOT NULL,
    deadline_boot double precision NOT NULL,    -- due_boot is this, or later
    waits         smallint NOT NULL,            -- 0 parked 1 queued 2 in a worker's hands
    parked_on     text NOT NULL,
    suspect       smallint NOT NULL,
    worker        text                          -- in whose hands
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

INSERT INTO unfinished
SELECT place, rollout_id, run_id, class, holder, rank, deadline_boot, least(state, 2), parked_on,
    suspect, worker
FROM action WHERE state < 4;

CREATE INDEX unfinished_queued ON unfinished (class, run_id, holder, suspect, rank, place)
    WHERE waits = 1;
CREATE INDEX unfinished_parked ON unfinished (class, run_id, place)
    WHERE waits = 0 AND parked_on = 'caps';
CREATE INDEX unfinished_parked_run ON unfinished (run_id, place)
    WHERE waits = 0 AND parked_on = 'run';
CREATE INDEX unfinished_of ON unfinished (rollout_id);
CREATE INDEX unfinished_held ON unfinished (holder) WHERE waits < 2 AND holder <> '';
CREATE INDEX unfinished_due ON unfinished (deadline_boot);
CREATE INDEX unfinished_in_hands ON unfinished (worker) WHERE waits = 2;

DROP INDEX action_queued, action_parked, action_parked_run, action_parked_of, action_held,
    action_unfinished, action_due, action_in_hands, action_dead;
ALTER TABLE action ADD COLUMN dead smallint NOT NULL DEFAULT 0;  -- ended as a dead letter
UPDATE action SET dead = 1 WHERE settled_status = 'dead';
CREATE INDEX action_dead ON action (run_id, place) WHERE dead = 1;
-- Half of a page: one commit may change every row on it.
ALTER TABLE action SET (fillfactor = 45);
