-- Many runs on one ledger: queues and parked actions are kept run by run, so that the next of each
-- run is one look-up. What operators did. Which Stoker a file needs.
DROP INDEX action_queued;
CREATE INDEX action_queued ON action (class, holder, suspect, run_id, rank, place)
    WHERE state = 1;
DROP INDEX action_parked;
CREATE INDEX action_parked ON action (class, run_id, place)
    WHERE state = 0 AND parked_on = 'caps';
CREATE INDEX action_parked_run ON action (run_id, place)
    WHERE state = 0 AND parked_on = 'run';

CREATE TABLE audit (
    place     INTEGER PRIMARY KEY,
    at        REAL NOT NULL,                   -- wall clock
    who       TEXT NOT NULL,
    what      TEXT NOT NULL,                   -- requeued, dropped, restored
    run_id    TEXT NOT NULL,                   -- '' = the ledger as a whole
    action_id TEXT NOT NULL,
    detail    TEXT NOT NULL
);
CREATE INDEX audit_by_run ON audit (run_id, place);

CREATE TABLE migration (
    version INTEGER PRIMARY KEY,
    stoker  TEXT NOT NULL                      -- who applied it: reads this file for certain
);
