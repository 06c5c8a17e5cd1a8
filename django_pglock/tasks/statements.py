"""The statements about tasks that the ORM cannot say, one constant each, with the reason above it.

``{task}``, ``{attempt}``, ``{waiter}`` and ``{worker}`` are replaced by quoted table names; every value is a parameter.
Statuses are literals, so that also a generic plan can use the partial indexes. Times are the server's:
``statement_timestamp()`` where one moment holds for all rows, never ``now()``, which in a long transaction is long ago.
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

# The same for many calls, which may differ in their arguments and keys. Ids are drawn in the order of the rows. A task
# with a key begins BLOCKED, whoever else has it: to look and to write it here would make every transaction that
# enqueues wait for the others of its key. ``ADMIT`` looks, right after the commit.
ENQUEUE_MANY = """
WITH new AS (
    INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
        lock_key, concurrency, group_key, fair_key, unique_key, unique_scope, unique_until, waits_for, keep_result)
    SELECT CASE WHEN moment.waits_for > 0 THEN 'BLOCKED'
                WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
                WHEN call.lock_key IS NOT NULL THEN 'BLOCKED'
                ELSE 'READY' END,
           moment.due, %s, %s, %s, call.args::jsonb, call.kwargs::jsonb, %s, %s, %s::jsonb,
           call.lock_key, %s, call.group_key, call.fair_key, call.unique_key, %s,
           statement_timestamp() + make_interval(secs => %s), moment.waits_for, %s
    FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due,
                 cardinality(%s::bigint[]) AS waits_for) AS moment,
         unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[]) WITH ORDINALITY
             AS call (args, kwargs, lock_key, group_key, fair_key, unique_key, number)
    ORDER BY call.number
    ON CONFLICT DO NOTHING
    RETURNING id, status, run_after, enqueued_at, unique_key
), waiters AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT new.id, awaited FROM new, unnest(%s::bigint[]) AS awaited
)
SELECT id, status, run_after, enqueued_at, unique_key FROM new ORDER BY id
"""

# A key that was taken for a period which is over is free again.
FREE_EXPIRED_UNIQUE = """
UPDATE {task} SET unique_key = NULL, unique_scope = NULL, unique_until = NULL
WHERE unique_key = ANY (%s::text[]) AND unique_scope = 'PERIOD' AND unique_until <= clock_timestamp()
"""

# Who has these unique keys.
FIND_UNIQUE = """
SELECT id, status, run_after, enqueued_at, unique_key FROM {task}
WHERE unique_key = ANY (%s::text[])
  AND (unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
       OR unique_scope = 'UNFINISHED' AND finished_at IS NULL OR unique_scope = 'PERIOD')
"""

# Gives a waiting task the new call's arguments, priority and date. One that is claimed meanwhile is no longer found.
REPLACE_UNIQUE = """
UPDATE {task} AS task
SET args = %s::jsonb, kwargs = %s::jsonb, priority = %s, run_after = moment.due, meta = %s::jsonb,
    lock_key = %s, group_key = %s, fair_key = %s, queue = %s,
    status = CASE WHEN task.waits_for > 0 THEN 'BLOCKED'
                  WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
                  WHEN %s::text IS NOT NULL THEN 'BLOCKED'
                  ELSE 'READY' END
FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due) AS moment
WHERE task.unique_key = %s AND task.unique_scope = 'WAITING' AND task.attempts = 0 AND task.finished_at IS NULL
RETURNING task.id, task.status, task.run_after, task.enqueued_at, task.unique_key
"""

# Admission, the first of two statements of one transaction: whoever admits to a key is alone with it. A transaction of
# its own, so that the second statement sees what the one before committed.
LOCK_KEYS = """
SELECT pg_advisory_xact_lock(hashtextextended('django_pglock ' || key, 0))
FROM (SELECT DISTINCT unnest(%s::text[]) COLLATE "C" AS key ORDER BY key) AS keys
"""

# Lets the first that wait at these keys through, as many as have room. What has been admitted and has not finished
# takes up room; so does, at a key that lets one through, what will be tried again: the others wait for it, because
# order is what they asked for.
ADMIT = """
WITH gate AS MATERIALIZED (
    SELECT head.lock_key, COALESCE(head.concurrency, CASE WHEN head.meta ? 'rate' THEN 32767 ELSE 1 END) - (
               SELECT count(*) FROM {task} AS busy
               WHERE busy.lock_key = head.lock_key AND busy.finished_at IS NULL
                 AND (busy.status IN ('READY', 'RUNNING')
                      OR busy.status = 'SCHEDULED' AND busy.started_at IS NOT NULL
                         AND COALESCE(busy.concurrency, 1) = 1 AND busy.group_key IS NULL AND NOT busy.meta ? 'rate')
           ) AS room
    FROM (SELECT DISTINCT unnest(%s::text[]) AS key) AS keys
    CROSS JOIN LATERAL (
        SELECT task.lock_key, task.concurrency, task.meta FROM {task} AS task
        WHERE task.lock_key = keys.key AND task.status = 'BLOCKED' AND task.waits_for = 0 AND task.finished_at IS NULL
        ORDER BY task.id LIMIT 1) AS head
), admitted AS MATERIALIZED (
    SELECT next.id FROM gate CROSS JOIN LATERAL (
        SELECT task.id FROM {task} AS task
        WHERE task.lock_key = gate.lock_key AND task.status = 'BLOCKED' AND task.waits_for = 0
          AND task.finished_at IS NULL
        ORDER BY task.id LIMIT GREATEST(0, gate.room)) AS next
)
UPDATE {task} AS task SET status = 'READY'
FROM admitted WHERE task.id = admitted.id AND task.status = 'BLOCKED'
RETURNING task.queue
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

# The distinct queues that have something ready, two index probes each: a DISTINCT would read every ready row.
READY_QUEUES = """
WITH RECURSIVE found AS (
    SELECT min(queue) AS queue FROM (
        (SELECT queue FROM {task} WHERE status = 'READY' AND fair_key IS NULL ORDER BY queue LIMIT 1)
        UNION ALL
        (SELECT queue FROM {task} WHERE status = 'READY' AND fair_key IS NOT NULL ORDER BY queue LIMIT 1)) AS first
    UNION ALL
    SELECT (SELECT min(queue) FROM (
        (SELECT queue FROM {task}
         WHERE status = 'READY' AND fair_key IS NULL AND queue > found.queue ORDER BY queue LIMIT 1)
        UNION ALL
        (SELECT queue FROM {task}
         WHERE status = 'READY' AND fair_key IS NOT NULL AND queue > found.queue ORDER BY queue LIMIT 1)) AS next)
    FROM found WHERE found.queue IS NOT NULL
)
SELECT queue FROM found WHERE queue IS NOT NULL
"""

# Seconds until the next scheduled task is due: zero or less when it is, NULL when there is none.
NEXT_DUE = """
SELECT EXTRACT(EPOCH FROM run_after - clock_timestamp())::float8
FROM {task} WHERE status = 'SCHEDULED' ORDER BY run_after LIMIT 1
"""
