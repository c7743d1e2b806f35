-- Every statement the owner prepares, by name. `:name` parameters are given by the store.

-- name: meta
SELECT record FROM meta WHERE one = 1;
-- name: put_meta
INSERT OR REPLACE INTO meta (one, record) VALUES (1, ?);

-- name: insert
INSERT INTO action VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?);
-- name: insert_input
INSERT INTO input VALUES (?, ?);
-- name: update
UPDATE action SET due_boot = ?, state = ?, parked_on = ?, deliveries = ?, attempts = ?, fence = ?,
    worker = ?, alone = ?, suspect = ?, queue_seconds = ?, settled_status = ?, settled_fence = ?,
    reclaim_fence = ?, reclaim_worker = ?, history = ?
WHERE place = ?;
-- name: lease
UPDATE action SET state = 2, deliveries = ?, fence = ?, worker = ?, alone = ?, queue_seconds = ?
WHERE place = ?;
-- name: start
UPDATE action SET state = 3, attempts = ?, due_boot = ? WHERE place = ?;
-- name: acknowledge
UPDATE action SET state = 5 WHERE place = ?;
-- name: settle
INSERT INTO result VALUES (?, ?);
-- name: bury_input
DELETE FROM input WHERE place = ?;
-- name: bury_result
DELETE FROM result WHERE place = ?;
-- name: bury_events
DELETE FROM event WHERE place = ?;

-- name: row
SELECT a.*, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE a.action_id = ?;
-- name: rollout_rows
SELECT a.*, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE a.rollout_id = ? ORDER BY a.place;
-- name: unfinished
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_unfinished JOIN input i USING (place)
WHERE a.settled_status IS NULL AND a.rollout_id = ?;
-- name: outstanding
SELECT count(*) FROM action INDEXED BY action_unfinished
WHERE settled_status IS NULL AND rollout_id = ? AND parked_on <> 'rollout';
-- name: queued
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_queued JOIN input i USING (place)
WHERE a.state = 1 AND a.class = ? AND a.holder = ? AND a.suspect = ? AND a.run_id = ?
ORDER BY a.rank, a.place LIMIT ?;
-- name: parked
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_parked JOIN input i USING (place)
WHERE a.state = 0 AND a.parked_on = 'caps' AND a.class = ? AND a.run_id = ?
ORDER BY a.place LIMIT ?;
-- name: parked_run
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_parked_run JOIN input i USING (place)
WHERE a.state = 0 AND a.parked_on = 'run' AND a.run_id = ? ORDER BY a.place LIMIT ?;
-- name: parked_of
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_parked_of JOIN input i USING (place)
WHERE a.state = 0 AND a.parked_on = 'rollout' AND a.rollout_id = ? ORDER BY a.place LIMIT ?;
-- name: held_by
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_held JOIN input i USING (place)
WHERE a.state < 2 AND a.holder <> '' AND a.holder = ?;
-- name: due
SELECT a.*, i.action, NULL
FROM action a INDEXED BY action_due JOIN input i USING (place)
WHERE a.settled_status IS NULL AND a.due_boot <= ? ORDER BY a.due_boot LIMIT ?;
-- name: next_due
SELECT due_boot FROM action INDEXED BY action_due WHERE settled_status IS NULL
ORDER BY due_boot LIMIT 1;
-- name: in_hands
SELECT a.*, i.action, r.completion
FROM action a INDEXED BY action_in_hands
    LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE a.fence <> 0 OR a.reclaim_fence <> 0;
-- name: counts
SELECT class, run_id, holder, suspect, state, parked_on, count(*) FROM action
WHERE state < 4 GROUP BY 1, 2, 3, 4, 5, 6;
-- name: results
SELECT count(*) FROM result
WHERE NOT EXISTS (SELECT 1 FROM action a WHERE a.place = result.place AND a.state = 5);
-- name: dead
SELECT a.*, i.action, r.completion
FROM action a INDEXED BY action_dead
    LEFT JOIN input i USING (place) JOIN result r USING (place)
WHERE a.settled_status = 'dead' AND a.run_id = ? ORDER BY a.place;
-- name: revive
UPDATE action SET accepted_wall = ?, deadline_wall = ?, accepted_boot = ?, deadline_boot = ?
WHERE place = ?;
-- name: unsettled
SELECT a.*, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE (a.state < 4 OR a.reclaim_fence <> 0) AND a.place > ? ORDER BY a.place LIMIT ?;
-- name: rebase
UPDATE action SET
    deadline_boot = :boot + min(max(deadline_wall - :wall, 0.0), deadline_wall - accepted_wall),
    due_boot = :boot + min(max(deadline_wall - :wall, 0.0), deadline_wall - accepted_wall),
    accepted_boot = :boot - max(:wall - accepted_wall, 0.0)
WHERE state < 4;
-- name: defer
UPDATE action SET due_boot = max(due_boot, ?) WHERE fence <> 0 AND state = 3;

-- name: tell
INSERT INTO event VALUES (?,?,?,?,?,?,?,?,?);
-- name: told
SELECT e.event_id, e.kind, e.action_id, e.rollout_id, e.detail,
    CASE e.kind WHEN 'completed' THEN r.completion ELSE e.completion END
FROM event e LEFT JOIN result r USING (place)
WHERE +e.run_id = ? AND +e.part = ? AND e.event_id > ? ORDER BY e.event_id LIMIT ?;
-- name: forget_passed
DELETE FROM event INDEXED BY event_passing
WHERE run_id = ? AND part = ? AND event_id <= ? AND kind IN ('requeued', 'reclaimed');

-- name: head
SELECT head, run_id, rollout_id, part, seq, finished FROM rollout
WHERE run_id = ? AND rollout_id = ?;
-- name: put_head
INSERT INTO rollout VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (head) DO UPDATE SET seq = excluded.seq, finished = excluded.finished;
-- name: heads
SELECT head, run_id, rollout_id, part, seq, finished FROM rollout
WHERE run_id = :run AND head > coalesce(
    (SELECT head FROM rollout WHERE run_id = :run AND rollout_id = :after), 0)
ORDER BY head LIMIT :limit;
-- name: write
INSERT INTO journal (head, seq, event) VALUES (?, ?, ?);
-- name: entries
SELECT event FROM journal INDEXED BY journal_by_rollout
WHERE head = ? AND seq >= ? ORDER BY seq LIMIT ?;

-- name: owner
SELECT run_id, part, fence, incarnation FROM owner WHERE run_id = ? AND part = ?;
-- name: put_owner
INSERT OR REPLACE INTO owner VALUES (?, ?, ?, ?);
-- name: owners
SELECT run_id, part, fence, incarnation FROM owner;
-- name: workers
SELECT worker_id, name, slots, ended FROM worker;
-- name: put_worker
INSERT OR REPLACE INTO worker VALUES (?, ?, ?, ?);

-- name: note
INSERT INTO audit (at, who, what, run_id, action_id, detail) VALUES (?, ?, ?, ?, ?, ?);
-- name: audit
SELECT at, who, what, run_id, action_id, detail FROM audit
WHERE run_id IN ('', ?) ORDER BY place;
