-- A lease and a start leave settled_status alone: with it as their condition these indexes are not
-- written for each of them. It is NULL exactly while state < 4 (I2; ledger check).
DROP INDEX action_unfinished;
CREATE INDEX action_unfinished ON action (rollout_id, parked_on)
    WHERE settled_status IS NULL;
DROP INDEX action_due;
CREATE INDEX action_due ON action (due_boot)
    WHERE settled_status IS NULL;

-- Events are told from memory (unseen.py); whoever reads them here reads at most results_max.
DROP INDEX event_by_partition;
