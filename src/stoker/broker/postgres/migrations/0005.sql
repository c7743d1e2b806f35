-- What coordinators use of model servers: made anew every second, and forgotten soon.
CREATE UNLOGGED TABLE claim (
    run_id text NOT NULL,
    part   text NOT NULL,
    at     double precision NOT NULL,
    claim  bytea NOT NULL,                      -- msgpack of claims.Claim
    PRIMARY KEY (run_id, part)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
