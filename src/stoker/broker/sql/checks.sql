-- What ledger check asks of every row: the rows that break a rule of DESIGN §4.
-- After "check:" the invariant and a sentence; {0}, {1} … are the columns, {epoch} the ledger's own.

-- check: I3: {0} has a live fence and is not in a worker's hands, or the reverse
SELECT action_id FROM action WHERE (fence <> 0) <> (state IN (2, 3));

-- check: I3: {0} is in nobody's hands under a live fence
SELECT action_id FROM action WHERE fence <> 0 AND worker IS NULL;

-- check: I3: fence {0} is live for {1} actions
SELECT fence, count(*)
FROM (SELECT fence FROM action WHERE fence <> 0 UNION ALL SELECT reclaim_fence FROM action WHERE reclaim_fence <> 0)
GROUP BY 1
HAVING count(*) > 1;

-- check: I3: {0} bears a fence or a place of epoch {1}, and this ledger has only reached {epoch}
SELECT action_id, max(fence, settled_fence, reclaim_fence, place) >> 40 AS e
FROM action
WHERE e > :epoch;

-- check: I3: partition {1} of {0} has a fence of epoch {2}, and this ledger has only reached {epoch}
SELECT run_id, part, fence >> 40 AS e FROM owner WHERE e > :epoch;

-- check: I3: event {0} is of epoch {1}, and this ledger has only reached {epoch}
SELECT event_id, event_id >> 40 AS e FROM event WHERE e > :epoch;

-- check: I2: {0} is in state {1} and its result says {2}
SELECT action_id, state, coalesce(settled_status, 'nothing')
FROM action
WHERE (settled_status IS NULL) <> (state < 4);

-- check: I1: {0} is completed and its result is gone
SELECT action_id
FROM action a
WHERE state = 4 AND NOT EXISTS (SELECT 1 FROM result r WHERE r.place = a.place);

-- check: I1: {0} is not acknowledged and its input is gone
SELECT action_id
FROM action a
WHERE state < 5 AND NOT EXISTS (SELECT 1 FROM input i WHERE i.place = a.place);

-- check: I2: {0} has a result and is in state {1}
SELECT action_id, state
FROM action a JOIN result r USING (place)
WHERE state < 4 OR (state = 5 AND settled_status <> 'dead');

-- check: I8: {0} is completed and {1} events tell so, not one
SELECT action_id, (SELECT count(*) FROM event e WHERE e.place = a.place AND e.kind = 'completed') AS n
FROM action a
WHERE state = 4 AND n <> 1;

-- check: I8: event {0} tells that {1} is completed, and it is not waiting to be acknowledged
SELECT event_id, e.action_id
FROM event e LEFT JOIN action a USING (place)
WHERE e.kind = 'completed' AND coalesce(a.state, 0) <> 4;

-- check: I5: {0} has {1} attempts in {2} deliveries
SELECT action_id, attempts, deliveries
FROM action
WHERE attempts > deliveries OR attempts < 0;

-- check: I6: {0} is parked for {1!r} in state {2}
SELECT action_id, parked_on, state FROM action WHERE (parked_on <> '') <> (state = 0);

-- check: I7: the id {0} is there {1} times
SELECT action_id, count(*) FROM action GROUP BY 1 HAVING count(*) > 1;

-- check: I11: rollout {0} has {2} journal entries, from {3} to {4}, and its head says {1}
SELECT rollout_id, r.seq, count(j.seq) AS n, min(j.seq) AS first, max(j.seq) AS last
FROM rollout r LEFT JOIN journal j USING (head)
GROUP BY head
HAVING n <> r.seq OR (n > 0 AND (first <> 0 OR last <> n - 1));

-- check: I11: {1} journal entries belong to no rollout (head {0})
SELECT head, count(*)
FROM journal j
WHERE NOT EXISTS (SELECT 1 FROM rollout r WHERE r.head = j.head)
GROUP BY 1;

-- check: I11: {0} is in partition {1} and its rollout in {2}
SELECT action_id, a.part, r.part
FROM action a JOIN rollout r USING (run_id, rollout_id)
WHERE a.part <> r.part;

-- check: rows: an input or a result belongs to no action (place {0})
SELECT place
FROM (SELECT place FROM input UNION SELECT place FROM result)
WHERE place NOT IN (SELECT place FROM action);
