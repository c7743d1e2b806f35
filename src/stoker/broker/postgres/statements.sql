-- Every statement of a gateway, by name. Parameters are whole columns (arrays) where rows are many.
-- Locks are always taken in this order: caps, owners, workers, rollouts, actions, partitions,
-- buckets; what is not in order skips what is locked.
-- Steps of rows that were not locked name the version they are of (0: ours already) and divide by
-- nought when one of them has another.

-- name: caps
SELECT pg_advisory_xact_lock(%s, 1);
-- name: caps_shared
SELECT pg_advisory_xact_lock_shared(%s, 1);
-- name: moment
SELECT extract(epoch FROM clock_timestamp())::float8, (SELECT count(*) FROM gateway);
-- name: counters
SELECT class, run_id, state, parked_on, suspect, held, sum(n)::bigint FROM counter
GROUP BY 1, 2, 3, 4, 5, 6 HAVING sum(n) <> 0;
-- name: totals
SELECT name, sum(n)::bigint FROM total GROUP BY 1;
-- name: count
INSERT INTO counter SELECT %s::bigint, * FROM unnest(%s::text[], %s::text[], %s::bigint[],
    %s::text[], %s::bigint[], %s::bigint[], %s::bigint[])
ON CONFLICT (slot, class, run_id, state, parked_on, suspect, held)
DO UPDATE SET n = counter.n + excluded.n;
-- name: gather_counters
WITH gone AS (DELETE FROM counter RETURNING *)
INSERT INTO counter
SELECT %s::bigint, class, run_id, state, parked_on, suspect, held, sum(n)::bigint FROM gone
GROUP BY 2, 3, 4, 5, 6, 7 HAVING sum(n) <> 0;
-- name: count_total
INSERT INTO total SELECT %s::bigint, * FROM unnest(%s::text[], %s::bigint[])
ON CONFLICT (slot, name) DO UPDATE SET n = total.n + excluded.n;
-- name: draw
SELECT nextval('ids') FROM generate_series(1, %s::bigint);

-- name: lock_owners
SELECT run_id, part, fence, incarnation FROM owner
WHERE (run_id, part) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
ORDER BY run_id, part FOR UPDATE;
-- name: owner
SELECT run_id, part, fence, incarnation FROM owner WHERE run_id = %s AND part = %s;
-- name: owners
SELECT run_id, part, fence, incarnation FROM owner;
-- name: put_owner
INSERT INTO owner VALUES (%s, %s, %s, %s)
ON CONFLICT (run_id, part)
DO UPDATE SET fence = excluded.fence, incarnation = excluded.incarnation;

-- name: hear
INSERT INTO heartbeat SELECT w, %s::float8, 0, NULL, 0 FROM unnest(%s::text[]) w ORDER BY w
ON CONFLICT (worker_id) DO UPDATE SET seen = greatest(heartbeat.seen, excluded.seen)
RETURNING worker_id, seen, beat, missing, lost;
-- name: lock_replaced
SELECT worker_id, seen, beat, missing, lost FROM heartbeat
WHERE worker_id = ANY(%s::text[]) ORDER BY worker_id FOR UPDATE;
-- name: lock_polling
SELECT worker_id, seen, beat, missing, lost FROM heartbeat
WHERE worker_id = ANY(%s::text[]) ORDER BY worker_id FOR NO KEY UPDATE SKIP LOCKED;
-- name: lock_holders
SELECT worker_id, seen, beat, missing, lost FROM heartbeat
WHERE worker_id = ANY(%s::text[]) ORDER BY worker_id FOR KEY SHARE;
-- name: lock_silent
SELECT worker_id, seen, beat, missing, lost FROM heartbeat
WHERE lost = 0 AND seen <= %s ORDER BY worker_id FOR UPDATE SKIP LOCKED;
-- name: heartbeats
SELECT worker_id, seen, beat, missing, lost FROM heartbeat;
-- name: put_heartbeats
UPDATE heartbeat h SET beat = v.beat, missing = v.missing, lost = v.lost
FROM unnest(%s::text[], %s::float8[], %s::bytea[], %s::bigint[]) v (worker_id, beat, missing, lost)
WHERE h.worker_id = v.worker_id;
-- name: forgive
UPDATE heartbeat SET seen = %s WHERE lost = 0 AND seen <> %s;
-- name: expect_enrolled
INSERT INTO heartbeat SELECT worker_id, %s::float8, 0, NULL, ended FROM worker
ON CONFLICT (worker_id) DO NOTHING;
-- name: forget_workers
-- What was in their hands or theirs alone was decided when they were lost.
WITH gone AS (
    SELECT worker_id FROM heartbeat WHERE lost = 1 AND seen < %s
    ORDER BY worker_id LIMIT %s FOR UPDATE SKIP LOCKED
), names AS (DELETE FROM worker USING gone WHERE worker.worker_id = gone.worker_id)
DELETE FROM heartbeat USING gone WHERE heartbeat.worker_id = gone.worker_id;
-- name: expect_bearers
INSERT INTO heartbeat SELECT DISTINCT w, %s::float8, 0::float8, NULL::bytea, 0::smallint FROM (
    SELECT worker AS w FROM unfinished WHERE waits = 2
    UNION ALL SELECT reclaim_worker FROM action WHERE reclaim_fence <> 0) hands
ON CONFLICT (worker_id) DO NOTHING;
-- name: workers_named
SELECT worker_id, name, slots, ended FROM worker WHERE worker_id = ANY(%s::text[]);
-- name: workers
SELECT worker_id, name, slots, ended FROM worker;
-- name: put_workers
INSERT INTO worker SELECT * FROM unnest(%s::text[], %s::text[], %s::bytea[], %s::bigint[])
ON CONFLICT (worker_id)
DO UPDATE SET name = excluded.name, slots = excluded.slots, ended = excluded.ended;

-- name: read_heads
-- Not locked: they change under their owner's row only.
SELECT head, run_id, rollout_id, part, seq, finished FROM rollout
WHERE (run_id, rollout_id) IN (SELECT * FROM unnest(%s::text[], %s::text[]));
-- name: heads
SELECT head, run_id, rollout_id, part, seq, finished FROM rollout
WHERE run_id = %s AND head > coalesce(
    (SELECT head FROM rollout WHERE run_id = %s AND rollout_id = %s), 0)
ORDER BY head LIMIT %s;
-- name: put_heads
INSERT INTO rollout
SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[])
ON CONFLICT (head) DO UPDATE SET seq = excluded.seq, finished = excluded.finished;
-- name: move_heads
WITH moved AS (
    UPDATE rollout r SET seq = v.seq, finished = v.finished
    FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) v (head, before, seq, finished)
    WHERE r.head = v.head AND r.seq = v.before
    RETURNING 1)
SELECT 1 / (count(*) = %s)::int FROM moved;
-- name: write
INSERT INTO journal SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[]);
-- name: entries
SELECT event FROM journal WHERE head = %s AND seq >= %s ORDER BY seq LIMIT %s;

-- name: make_claim
INSERT INTO claim VALUES (%s, %s, %s::float8, %s)
ON CONFLICT (run_id, part) DO UPDATE SET at = excluded.at, claim = excluded.claim;
-- name: forget_claims
DELETE FROM claim WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM claim WHERE at < %s OR at > %s FOR UPDATE SKIP LOCKED));
-- name: claims
-- One made later than now was made before the clock was set back.
SELECT claim FROM claim WHERE at > %s AND at < %s;
-- name: buckets
SELECT service, state FROM bucket;
-- name: add_buckets
INSERT INTO bucket SELECT s, NULL FROM unnest(%s::text[]) s ORDER BY s ON CONFLICT DO NOTHING;
-- name: lock_buckets
SELECT service, state FROM bucket WHERE service = ANY(%s::text[]) ORDER BY service FOR UPDATE;
-- name: put_bucket
UPDATE bucket SET state = %s WHERE service = %s;

-- name: version
SELECT pg_current_xact_id()::xid;
-- name: rows_at
SELECT {hot}, a.xmin FROM action a WHERE a.place = ANY(%s::bigint[]);
-- name: lock_rows
SELECT a.place, a.xmin FROM action a WHERE a.action_id = ANY(%s::text[]) ORDER BY a.place FOR UPDATE;
-- name: lock_in_hands
SELECT {hot}, a.xmin FROM action a
WHERE a.place IN (SELECT place FROM unfinished WHERE waits = 2 AND worker = %s
        UNION ALL SELECT place FROM action WHERE reclaim_fence <> 0 AND reclaim_worker = %s)
    AND ((a.fence <> 0 AND a.worker = %s) OR (a.reclaim_fence <> 0 AND a.reclaim_worker = %s))
ORDER BY a.place FOR UPDATE;
-- name: lock_queued
SELECT a.place, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits = 1 AND u.class = %s AND u.run_id = %s AND u.holder = %s AND u.suspect = %s
    AND (u.rank, u.place) > (%s, %s) AND a.state = 1 AND a.suspect = u.suspect
ORDER BY u.rank, u.place LIMIT %s FOR UPDATE OF a SKIP LOCKED;
-- name: queued
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits = 1 AND u.class = %s AND u.run_id = %s AND u.holder = %s AND u.suspect = %s
ORDER BY u.rank, u.place LIMIT %s;
-- name: parked
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits = 0 AND u.parked_on = 'caps' AND u.class = %s AND u.run_id = %s
    AND a.state = 0 AND a.parked_on = 'caps'
ORDER BY u.place LIMIT %s FOR UPDATE OF a SKIP LOCKED;
-- name: parked_run
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits = 0 AND u.parked_on = 'run' AND u.run_id = %s AND a.state = 0 AND a.parked_on = 'run'
ORDER BY u.place LIMIT %s FOR UPDATE OF a SKIP LOCKED;
-- name: parked_of
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits = 0 AND u.parked_on = 'rollout' AND u.rollout_id = %s
    AND a.state = 0 AND a.parked_on = 'rollout'
ORDER BY u.place LIMIT %s FOR UPDATE OF a SKIP LOCKED;
-- name: parked_rollouts
SELECT DISTINCT rollout_id FROM unfinished WHERE waits = 0 AND parked_on = 'rollout';
-- name: held_by
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.waits < 2 AND u.holder <> '' AND u.holder = %s AND a.state < 2
ORDER BY a.place FOR UPDATE OF a;
-- name: unfinished
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.rollout_id = %s AND a.state < 4 ORDER BY a.place FOR UPDATE OF a;
-- name: due
SELECT {hot}, a.xmin FROM unfinished u JOIN action a USING (place)
WHERE u.deadline_boot <= %s AND a.state < 4 AND a.due_boot <= %s
ORDER BY u.deadline_boot LIMIT %s FOR UPDATE OF a SKIP LOCKED;
-- name: inputs
SELECT place, action FROM input WHERE place = ANY(%s::bigint[]);
-- name: rows
SELECT {hot}, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE a.action_id = ANY(%s::text[]) ORDER BY a.place;
-- name: rollout_rows
SELECT {hot}, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) LEFT JOIN result r USING (place)
WHERE a.rollout_id = %s ORDER BY a.place;
-- name: dead
SELECT {hot}, i.action, r.completion
FROM action a LEFT JOIN input i USING (place) JOIN result r USING (place)
WHERE a.dead = 1 AND a.run_id = %s ORDER BY a.place;
-- name: revive
UPDATE action a SET accepted_wall = v.aw, deadline_wall = v.dw, accepted_boot = v.ab,
    deadline_boot = v.db
FROM unnest(%s::float8[], %s::float8[], %s::float8[], %s::float8[], %s::bigint[])
    v (aw, dw, ab, db, place)
WHERE a.place = v.place;
-- name: unsettled
SELECT {hot}, a.xmin FROM action a WHERE (a.state < 4 OR a.reclaim_fence <> 0) AND a.place > %s
ORDER BY a.place LIMIT %s FOR UPDATE;
-- name: note
INSERT INTO audit (at, who, what, run_id, action_id, detail) VALUES (%s, %s, %s, %s, %s, %s);
-- name: audit
SELECT at, who, what, run_id, action_id, detail FROM audit
WHERE run_id IN ('', %s) ORDER BY place;
-- name: outstanding
SELECT rollout_id, count(*) FROM unfinished
WHERE rollout_id = ANY(%s::text[]) AND parked_on <> 'rollout' GROUP BY 1;
-- name: held_counts
SELECT class, holder, count(*) FROM unfinished
WHERE waits < 2 AND waits = 1 AND holder <> '' AND holder = ANY(%s::text[]) GROUP BY 1, 2;
-- name: all_held
SELECT class, holder, count(*) FROM unfinished
WHERE waits < 2 AND waits = 1 AND holder <> '' GROUP BY 1, 2;
-- name: hands
SELECT u.worker, a.action_id FROM unfinished u JOIN action a USING (place) WHERE u.waits = 2
UNION ALL SELECT reclaim_worker, action_id FROM action WHERE fence = 0 AND reclaim_fence <> 0;
-- name: held_now
SELECT a.action_id, a.fence, a.reclaim_fence, a.accepted_boot + a.queue_seconds
FROM unfinished u JOIN action a USING (place) WHERE u.waits = 2 AND u.worker = %s
UNION ALL SELECT action_id, fence, reclaim_fence, accepted_boot + queue_seconds FROM action
WHERE reclaim_fence <> 0 AND reclaim_worker = %s AND worker IS DISTINCT FROM reclaim_worker;
-- name: untold
UPDATE action SET revoke_told = 1
WHERE reclaim_fence <> 0 AND revoke_told = 0 AND reclaim_worker = ANY(%s::text[])
RETURNING reclaim_worker, action_id, reclaim_fence;

-- name: insert
WITH fresh AS (INSERT INTO action SELECT * FROM unnest({unnest_hot})
    RETURNING place, rollout_id, run_id, class, holder, rank, deadline_boot, state, parked_on,
    suspect, worker)
INSERT INTO unfinished
SELECT place, rollout_id, run_id, class, holder, rank, deadline_boot, least(state, 2), parked_on,
    suspect, worker
FROM fresh WHERE state < 4;
-- name: insert_input
INSERT INTO input SELECT * FROM unnest(%s::bigint[], %s::bytea[]);
-- name: update
-- Any change, however many steps were made at once.
WITH changed AS (
    UPDATE action a SET due_boot = v.due_boot, state = v.state, parked_on = v.parked_on,
        deliveries = v.deliveries, attempts = v.attempts, fence = v.fence, worker = v.worker,
        alone = v.alone, suspect = v.suspect, queue_seconds = v.queue_seconds,
        settled_status = v.settled_status, settled_fence = v.settled_fence,
        reclaim_fence = v.reclaim_fence, reclaim_worker = v.reclaim_worker, history = v.history,
        revoke_told = CASE WHEN a.reclaim_fence = v.reclaim_fence THEN a.revoke_told ELSE 0 END,
        dead = coalesce(v.settled_status = 'dead', false)::int
    FROM unnest({unnest_mutable}) v (due_boot, state, parked_on, deliveries, attempts, fence,
        worker, alone, suspect, queue_seconds, settled_status, settled_fence, reclaim_fence,
        reclaim_worker, history, place)
    WHERE a.place = v.place
    RETURNING a.place, a.rollout_id, a.run_id, a.class, a.holder, a.rank, a.deadline_boot, a.state,
        a.parked_on, a.suspect, a.worker
), gone AS (
    DELETE FROM unfinished
    WHERE place = ANY(ARRAY(SELECT place FROM changed WHERE state > 3)))
INSERT INTO unfinished
SELECT place, rollout_id, run_id, class, holder, rank, deadline_boot, least(state, 2), parked_on,
    suspect, worker
FROM changed WHERE state < 4
ON CONFLICT (place) DO UPDATE SET deadline_boot = excluded.deadline_boot, waits = excluded.waits,
    parked_on = excluded.parked_on, suspect = excluded.suspect, worker = excluded.worker;
-- name: lease
WITH given AS (
    UPDATE action a SET state = 2, deliveries = v.deliveries, fence = v.fence, worker = v.worker,
        alone = v.alone, queue_seconds = v.queue_seconds
    FROM unnest(%s::bigint[], %s::xid[], %s::bigint[], %s::bigint[], %s::text[], %s::bigint[],
            %s::float8[])
        v (place, version, deliveries, fence, worker, alone, queue_seconds)
    WHERE a.place = v.place AND (v.version = '0' OR a.xmin = v.version)
    RETURNING a.place, a.rollout_id, a.run_id, a.class, a.holder, a.rank, a.deadline_boot,
        a.parked_on, a.suspect, a.worker
), apart AS (
    INSERT INTO unfinished
    SELECT place, rollout_id, run_id, class, holder, rank, deadline_boot, 2, parked_on, suspect,
        worker
    FROM given
    ON CONFLICT (place) DO UPDATE SET waits = 2, worker = excluded.worker)
SELECT 1 / (count(*) = %s)::int FROM given;
-- name: start
WITH begun AS (
    UPDATE action a SET state = 3, attempts = v.attempts, due_boot = v.due_boot
    FROM unnest(%s::bigint[], %s::xid[], %s::bigint[], %s::float8[])
        v (place, version, attempts, due_boot)
    WHERE a.place = v.place AND (v.version = '0' OR a.xmin = v.version)
    RETURNING 1)
SELECT 1 / (count(*) = %s)::int FROM begun;
-- name: complete
WITH ended AS (
    UPDATE action a SET state = 4, fence = 0, worker = NULL, alone = 0, suspect = 0,
        settled_status = v.settled_status, settled_fence = v.settled_fence,
        dead = (v.settled_status = 'dead')::int
    FROM unnest(%s::bigint[], %s::xid[], %s::text[], %s::bigint[])
        v (place, version, settled_status, settled_fence)
    WHERE a.place = v.place AND (v.version = '0' OR a.xmin = v.version)
    RETURNING a.place
), gone AS (
    DELETE FROM unfinished WHERE place = ANY(ARRAY(SELECT place FROM ended)))
SELECT 1 / (count(*) = %s)::int FROM ended;
-- name: acknowledge
WITH passed AS (
    UPDATE action a SET state = 5
    FROM unnest(%s::bigint[], %s::xid[]) v (place, version)
    WHERE a.place = v.place AND (v.version = '0' OR a.xmin = v.version)
    RETURNING 1)
SELECT 1 / (count(*) = %s)::int FROM passed;
-- name: verify
WITH seen AS (
    SELECT 1 FROM unnest(%s::bigint[], %s::xid[]) v (place, version) JOIN action a USING (place)
    WHERE a.xmin = v.version FOR UPDATE OF a)
SELECT 1 / (count(*) = %s)::int FROM seen;
-- name: settle
INSERT INTO result SELECT * FROM unnest(%s::bigint[], %s::bytea[]);
-- name: bury_inputs
DELETE FROM input WHERE place = ANY(%s::bigint[]);
-- name: bury_results
DELETE FROM result WHERE place = ANY(%s::bigint[]);
-- name: bury_events
DELETE FROM event WHERE place = ANY(%s::bigint[]);
-- name: defer
UPDATE action a SET due_boot = greatest(due_boot, %s)
FROM unfinished u WHERE u.waits = 2 AND a.place = u.place AND a.fence <> 0 AND a.state = 3;

-- name: lock_partitions
SELECT pg_advisory_xact_lock(k) FROM unnest(%s::bigint[]) k;
-- name: tell
INSERT INTO event SELECT %s::bigint + nextval('ids'), *
FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::bytea[]);
-- name: told
SELECT event_id, kind, action_id, rollout_id, detail, completion, place FROM event
WHERE run_id = %s AND part = %s AND event_id > %s ORDER BY event_id LIMIT %s;
-- name: results
SELECT place, completion FROM result WHERE place = ANY(%s::bigint[]);
-- name: forget_passed
DELETE FROM event
WHERE run_id = %s AND part = %s AND event_id <= %s AND kind IN ('requeued', 'reclaimed');

-- name: meta
SELECT lineage, epoch, limits, history, replicated FROM meta;
-- name: put_meta
INSERT INTO meta VALUES (1, %s, %s, %s, %s, %s) ON CONFLICT (one) DO UPDATE
SET lineage = excluded.lineage, epoch = excluded.epoch, limits = excluded.limits,
    history = excluded.history, replicated = excluded.replicated;
-- name: renew
UPDATE meta SET lineage = %s, history = %s;
-- name: opened
SELECT count(*) FROM opened;
-- name: mark_opened
INSERT INTO opened VALUES (1) ON CONFLICT DO NOTHING;
-- name: server_history
-- The timeline by the file that is written now: the control file's lags behind a promotion.
SELECT system_identifier || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
FROM pg_control_system();
-- name: try_lock
SELECT pg_try_advisory_lock(%s, %s);
-- name: unlock
SELECT pg_advisory_unlock(%s, %s);
-- name: gateways
SELECT slot FROM gateway;
-- name: join
INSERT INTO gateway VALUES (%s, %s) ON CONFLICT (slot) DO UPDATE SET name = excluded.name;
-- name: leave
DELETE FROM gateway WHERE slot = %s;
