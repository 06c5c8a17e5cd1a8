"""The statements about tasks that the ORM cannot say, one constant each, with the reason above it.

``{task}``, ``{attempt}`` and ``{worker}`` are replaced by quoted table names; every value is a parameter. Statuses are
literals, so that also a generic plan can use the partial indexes. Times are the server's: ``statement_timestamp()``
where one moment holds for all rows, never ``now()``, which in a long transaction is long ago.
"""

from __future__ import annotations

# Decides by the server's clock whether the task is due, and returns what the server filled in.
ENQUEUE = """
INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta)
SELECT CASE WHEN due > statement_timestamp() THEN 'SCHEDULED' ELSE 'READY' END, due,
       %s, %s, %s, %s::jsonb, %s::jsonb, %s, %s, %s::jsonb
FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due) AS moment
RETURNING id, status, run_after, enqueued_at
"""

# The same for many calls that differ in their arguments only. Ids are drawn in the order of the rows.
ENQUEUE_MANY = """
INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta)
SELECT CASE WHEN due > statement_timestamp() THEN 'SCHEDULED' ELSE 'READY' END, due,
       %s, %s, %s, call.args::jsonb, call.kwargs::jsonb, %s, %s, %s::jsonb
FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due) AS moment,
     unnest(%s::text[], %s::text[]) WITH ORDINALITY AS call (args, kwargs, number)
ORDER BY call.number
RETURNING id, status
"""

# Wakes sleeping workers, if there are any. Sent after the commit, because before it a worker could look, see nothing
# and fall asleep between our look at its flag and our commit. Conditional, because each NOTIFY takes a lock that
# serialises the commits of the whole server.
WAKE = "SELECT pg_notify(%s, %s) WHERE EXISTS (SELECT FROM {worker} WHERE is_sleeping)"

# The common ending, with as few columns as it needs. The guard is the fence: a claim that was rescued, cancelled or
# reset meanwhile finds another number of attempts or another status, and its outcome is dropped.
SETTLE_SUCCESSES = """
UPDATE {task} AS task
SET status = 'SUCCESSFUL', finished_at = clock_timestamp(), result = NULLIF(outcome.result, 'null')
FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS outcome (id, attempt, result)
WHERE task.id = outcome.id AND task.attempts = outcome.attempt AND task.status = 'RUNNING'
RETURNING task.id, task.finished_at
"""

# All other endings, with the failed attempt written by the same statement: neither can exist without the other.
# A claim given back unused takes back its start, which it set itself when it was the first.
SETTLE_OTHERS = """
WITH outcome AS MATERIALIZED (
    SELECT * FROM unnest(
        %s::bigint[], %s::int[], %s::text[], %s::float8[], %s::int[], %s::int[], %s::text[], %s::text[], %s::text[])
        AS outcome (id, attempt, status, delay, retried, rescued, record, exception_path, traceback)
), settled AS (
    UPDATE {task} AS task
    SET status = outcome.status,
        retries = task.retries + outcome.retried,
        rescues = task.rescues + outcome.rescued,
        run_after = CASE WHEN outcome.status = 'SCHEDULED'
                         THEN clock_timestamp() + make_interval(secs => outcome.delay) ELSE task.run_after END,
        finished_at = CASE WHEN outcome.status NOT IN ('SCHEDULED', 'READY') THEN clock_timestamp() END,
        worker = CASE WHEN outcome.status NOT IN ('SCHEDULED', 'READY') THEN task.worker END,
        started_at = CASE WHEN outcome.record IS NULL AND task.started_at = task.last_attempted_at
                          THEN NULL ELSE task.started_at END
    FROM outcome
    WHERE task.id = outcome.id AND task.attempts = outcome.attempt AND task.status = 'RUNNING'
    RETURNING task.id, task.attempts, task.last_attempted_at, task.finished_at
), recorded AS (
    INSERT INTO {attempt} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT settled.id, settled.attempts, %s, settled.last_attempted_at, clock_timestamp(),
           outcome.record, outcome.exception_path, outcome.traceback
    FROM settled JOIN outcome ON outcome.id = settled.id
    WHERE outcome.record IS NOT NULL
)
SELECT id, finished_at FROM settled
"""

# Takes claims back from workers that are dead: no row, or no sign of life for the hard limit, or two missing beats and
# no session that holds the worker's lock. Which claims are meant is decided on one snapshot, by id and attempt: a row
# that was settled and claimed by a newer worker since then carries another attempt and is left alone. SKIP LOCKED:
# a row that is being settled at this moment needs no rescue.
RESCUE = """
WITH alive AS MATERIALIZED (
    SELECT worker.id FROM {worker} AS worker
    WHERE worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
       OR (worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
           AND worker.lock_key IN (
               SELECT (held.classid::bigint << 32) | held.objid::bigint FROM pg_locks AS held
               WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.granted
                 AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())))
), orphan AS MATERIALIZED (
    SELECT task.id, task.attempts, task.worker FROM {task} AS task
    WHERE task.status = 'RUNNING' AND NOT EXISTS (SELECT FROM alive WHERE alive.id = task.worker)
    ORDER BY task.id LIMIT %s
), mine AS MATERIALIZED (
    SELECT task.id, orphan.worker FROM {task} AS task JOIN orphan ON orphan.id = task.id
    WHERE task.attempts = orphan.attempts AND task.status = 'RUNNING'
    ORDER BY task.id FOR UPDATE OF task SKIP LOCKED
), rescued AS (
    UPDATE {task} AS task
    SET status = CASE WHEN task.rescues >= %s THEN 'FAILED' ELSE 'READY' END,
        rescues = task.rescues + 1,
        finished_at = CASE WHEN task.rescues >= %s THEN clock_timestamp() END,
        worker = CASE WHEN task.rescues >= %s THEN task.worker END
    FROM mine
    WHERE task.id = mine.id
    RETURNING task.id, task.attempts, mine.worker, task.last_attempted_at, task.status, task.queue, task.task_path
), recorded AS (
    INSERT INTO {attempt} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, attempts, worker, last_attempted_at, clock_timestamp(), 'LOST', %s, %s FROM rescued
)
SELECT id, attempts, worker, status, queue, task_path FROM rescued
"""

# Gives back what this worker owns in the table but not in its hands: claims whose answer was lost on the way. The
# heartbeat would keep them alive for ever.
RELEASE_UNKNOWN = """
UPDATE {task} AS task
SET status = 'READY', worker = NULL,
    started_at = CASE WHEN started_at = last_attempted_at THEN NULL ELSE started_at END
WHERE task.status = 'RUNNING' AND task.worker = %s AND task.id <> ALL (%s::bigint[])
  AND task.last_attempted_at < clock_timestamp() - make_interval(secs => %s)
RETURNING task.id
"""

# The distinct queues that have something ready, one index probe each: a DISTINCT would read every ready row.
READY_QUEUES = """
WITH RECURSIVE found AS (
    (SELECT queue FROM {task} WHERE status = 'READY' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT task.queue FROM {task} AS task
            WHERE task.status = 'READY' AND task.queue > found.queue ORDER BY task.queue LIMIT 1)
    FROM found WHERE found.queue IS NOT NULL
)
SELECT queue FROM found WHERE queue IS NOT NULL
"""

# Seconds until the next scheduled task is due: zero or less when it is, NULL when there is none.
NEXT_DUE = """
SELECT EXTRACT(EPOCH FROM run_after - clock_timestamp())::float8
FROM {task} WHERE status = 'SCHEDULED' ORDER BY run_after LIMIT 1
"""
