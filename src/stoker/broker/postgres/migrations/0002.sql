-- Whether every synced commit so far was on a standby too: then a standby that takes over has lost
-- nothing, and the ledger stays what it is. Set while every gateway promises that.
ALTER TABLE meta ADD COLUMN replicated smallint NOT NULL DEFAULT 0;
