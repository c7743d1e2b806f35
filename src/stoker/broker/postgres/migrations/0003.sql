-- Rates of remote services: shared by every worker, hence by every gateway.
CREATE TABLE bucket (
    service text PRIMARY KEY,
    state   bytea                               -- msgpack of rates.Bucket; NULL = never used
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
