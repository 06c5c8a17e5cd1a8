"""The statements about tasks that the ORM cannot say, one constant each, with the reason above it.

``{task}``, ``{attempt}`` and so on are replaced by quoted table names; every value is a parameter.
Statuses are literals, so that also a generic plan can use the partial indexes. Rows that are known by their ids are
asked for by an array of them, besides a join where one is needed: a table that was empty when it was last vacuumed is
expected to have one row, and a join alone may then read all of it. ``status || ''`` keeps servers before 17 from an
index of which they would read all that has the status, and look at the ids only then. Times are the server's:
``statement_timestamp()`` where one moment holds for all rows, never ``now()``, which in a long transaction is long ago.
"""

from __future__ import annotations

from django_pglock.keys.reserved import ADMISSION

# One call that is due at once.
ENQUEUE = """
INSERT INTO {task} (status, queue, priority, task_path, args, kwargs, backend, max_retries, meta)
VALUES ('READY', %s, %s, %s, %s, %s, %s, %s, %s)
RETURNING id, status, date_part('epoch', enqueued_at)
"""

# One call that asks for more: for a date, keys, or how long to keep its result. Returns nothing if its unique key is
# taken. A task with a key begins BLOCKED, whoever else has it: to look and to write it here would make every
# transaction that enqueues wait for the others of its key. ``ADMIT_OWN`` looks, right after the commit.
ENQUEUE_ONE = """
INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
    lock_key, group_key, fair_key, unique_key, concurrency, unique_scope, unique_until, keep_result)
SELECT CASE WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
            WHEN moment.lock_key IS NOT NULL THEN 'BLOCKED'
            ELSE 'READY' END,
       moment.due, %s, %s, %s, %s::jsonb, %s::jsonb, %s, %s, %s::jsonb,
       moment.lock_key, %s, %s, %s, %s::int, %s, statement_timestamp() + make_interval(secs => %s), %s::int
FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due, %s AS lock_key) AS moment
ON CONFLICT DO NOTHING
RETURNING id, status, date_part('epoch', enqueued_at), unique_key
"""

# The same, right behind ``LOCK_KEYS`` in a message that is a transaction of its own: a task that is alone at its key
# needs no second transaction to be admitted. Returns the status of another at the key, too: of one that has been
# admitted if there is one, as BLOCKED comes before all others. Not for a unique task, which may wait for somebody's
# transaction, and everybody else at the key would wait with it.
ENQUEUE_AT_KEY = f"""
WITH other AS MATERIALIZED (
    SELECT task.status FROM {{task}} AS task
    WHERE task.lock_key BETWEEN %s AND %s AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
)
{ENQUEUE_ONE.strip().replace("moment.lock_key IS NOT NULL", "EXISTS (SELECT FROM other)")},
    (SELECT status FROM other)
"""

# The same for one task that has been enqueued in a transaction, once that is committed.
ADMIT_OWN = """
WITH other AS MATERIALIZED (
    SELECT task.status FROM {task} AS task
    WHERE task.lock_key BETWEEN %s AND %s AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.id <> %s
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
), admitted AS (
    UPDATE {task} AS task SET status = 'READY'
    WHERE task.id = %s AND task.status || '' = 'BLOCKED' AND task.waits_for = 0 AND NOT EXISTS (SELECT FROM other)
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    RETURNING task.queue
)
SELECT (SELECT queue FROM admitted), (SELECT status FROM other)
"""

# The ids of calls that are not written in their order.
DRAW_IDS = """
SELECT nextval(serial.sequence) FROM (SELECT pg_get_serial_sequence('{task}', 'id') AS sequence) AS serial,
                                     generate_series(1, %s)
"""

# The same for many calls, which may differ in their arguments and keys, or for one that runs after others. Ids are
# drawn in the order of the rows.
ENQUEUE_MANY = """
WITH new AS (
    INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
        lock_key, concurrency, group_key, fair_key, unique_key, unique_scope, unique_until, waits_for, keep_result)
    SELECT CASE WHEN moment.waits_for > 0 THEN 'BLOCKED'
                WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
                WHEN call.lock_key IS NOT NULL THEN 'BLOCKED'
                ELSE 'READY' END,
           moment.due, %s, %s, %s, call.args, call.kwargs, %s, %s, %s::jsonb,
           call.lock_key, %s, call.group_key, call.fair_key, call.unique_key, %s,
           statement_timestamp() + make_interval(secs => %s), moment.waits_for, %s
    FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due,
                 cardinality(%s::bigint[]) AS waits_for) AS moment,
         ROWS FROM (jsonb_array_elements(%s::jsonb), jsonb_array_elements(%s::jsonb),
                    unnest(%s::text[]), unnest(%s::text[]), unnest(%s::text[]), unnest(%s::text[])) WITH ORDINALITY
             AS call (args, kwargs, lock_key, group_key, fair_key, unique_key, number)
    ORDER BY call.number
    ON CONFLICT DO NOTHING
    RETURNING id, status, enqueued_at, unique_key
), waiters AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT new.id, awaited FROM new, unnest(%s::bigint[]) AS awaited
)
SELECT id, status, date_part('epoch', enqueued_at), unique_key FROM new ORDER BY id
"""

# The same with ids that have been drawn, so that the rows can be written in another order than that of the calls: in
# that of their unique keys. Two transactions that write the same keys in different orders would wait for each other.
ENQUEUE_DRAWN = (
    ENQUEUE_MANY.replace("INSERT INTO {task} (", "INSERT INTO {task} (id, ")
    .replace("    SELECT CASE", "    SELECT call.id, CASE")
    .replace("ROWS FROM (", "ROWS FROM (unnest(%s::bigint[]), ")
    .replace("AS call (", "AS call (id, ")
)

# A key that was taken for a period which is over is free again.
FREE_EXPIRED_UNIQUE = """
UPDATE {task} SET unique_key = NULL, unique_scope = NULL, unique_until = NULL
WHERE unique_key = ANY (%s::text[]) AND unique_scope = 'PERIOD' AND unique_until <= clock_timestamp()
"""

# Who has these unique keys, and for as long as what.
FIND_UNIQUE = """
SELECT id, status, date_part('epoch', enqueued_at), unique_key, unique_scope FROM {task}
WHERE unique_key = ANY (%s::text[])
  AND (unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
       OR unique_scope = 'UNFINISHED' AND finished_at IS NULL
       OR unique_scope = 'PERIOD' AND unique_until > clock_timestamp())
"""

# Makes a waiting task the new call: every column that a call fills in is written, and the task no longer waits for what
# the first call named with after=. One that is claimed meanwhile is no longer found. Returns its lock key as it was,
# too: if it has another now, it has left its place at that one.
REPLACE_UNIQUE = """
WITH old AS MATERIALIZED (
    SELECT id, lock_key FROM {task}
    WHERE unique_key = %s AND unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
    FOR NO KEY UPDATE
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
)
UPDATE {task} AS task
SET args = %s::jsonb, kwargs = %s::jsonb, queue = %s, priority = %s, backend = %s, max_retries = %s, meta = %s::jsonb,
    lock_key = call.lock_key, concurrency = %s, group_key = %s, fair_key = %s, keep_result = %s, waits_for = 0,
    run_after = call.due,
    status = CASE WHEN call.due > statement_timestamp() THEN 'SCHEDULED'
                  WHEN call.lock_key IS NOT NULL THEN 'BLOCKED'
                  ELSE 'READY' END
FROM (SELECT %s::text AS lock_key, COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due) AS call, old
WHERE task.id = old.id AND task.id = ANY (ARRAY(SELECT id FROM old))
RETURNING task.id, task.status, date_part('epoch', task.enqueued_at), task.unique_key, old.lock_key
"""

# Admission, the first of two statements of one message: whoever admits to a key is alone with it. A transaction of
# its own, so that the second statement sees what the one before committed. In the order of the numbers, not of the
# keys: two keys may have the same number, and those who take them in another order could wait for each other in a
# circle.
LOCK_KEYS = f"""
SELECT pg_advisory_xact_lock({ADMISSION}, number), {{by_index}}
FROM (SELECT DISTINCT ('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::int AS number
      FROM unnest(%s::text[]) AS key ORDER BY number) AS keys
"""

# Lets the first that waits at each of these keys through, where nobody has been admitted. At keys that let one through
# at a time, which is what most of them do, admission is no more than that. To plan it takes a fifth of the time that
# ``ADMIT`` takes. Where there may be more to think of, nothing is done, and the key is returned, for ``ADMIT``: where
# the first lets others run beside it, or waits for others itself, and where a task of the key is SCHEDULED, perhaps to
# be tried again.
#
# The notes at ``ADMIT`` say why a row that somebody has locked is left alone, and why ranges.
ADMIT_NEXT = """
WITH first AS MATERIALIZED (
    SELECT keys.key, waiting.id, busy.status, waiting.waits_for = 0 AND COALESCE(waiting.concurrency, 1) = 1 AS is_alone
    FROM unnest(%s::text[]) AS keys (key)
    CROSS JOIN LATERAL (
        SELECT task.id, task.waits_for, task.concurrency FROM {task} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'BLOCKED') AND (keys.key, 'BLOCKED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS waiting
    LEFT JOIN LATERAL (
        SELECT task.status FROM {task} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'READY') AND (keys.key, 'SCHEDULED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS busy ON true
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM first WHERE is_alone AND status IS NULL))
      AND task.status || '' = 'BLOCKED'
    FOR NO KEY UPDATE SKIP LOCKED
), admitted AS (
    UPDATE {task} AS task SET status = 'READY'
    WHERE task.id = ANY (ARRAY(SELECT id FROM locked)) AND task.status || '' = 'BLOCKED'
    RETURNING task.queue
)
SELECT queue, NULL FROM admitted
UNION ALL
SELECT NULL, key FROM first WHERE NOT is_alone OR status = 'SCHEDULED'
"""

# Lets the first that wait at these keys through, as many as have room. What has been admitted and has not finished
# takes up room; so does, at a key that lets one through, what will be tried again: the others wait for it, because
# order is what they asked for. Where functions that share a key differ in their concurrency, nobody is let in beside
# one that has less room for company. At a rated key each one through takes a token from its bucket; those that nobody
# has begun yet count against the burst, so that a busy worker cannot save them up. When no token is what they wait for,
# there is a look all the same, the rarer the longer that lasts.
#
# Nobody is let through before an older task whose wait for others (after=) is over, only that ``RELEASE`` has not said
# so yet: it will, and admit to the key again. The first hundred such tasks are looked at, to bound it.
#
# Whoever keeps the row of one that waits locked, in a transaction that may be long, holds up that key and nothing else:
# the row and what is behind it are left alone. Who has changed it admits after the commit; upkeep does in any case.
#
# The first that wait are asked for by a range of the index of keys, in its order: with "=" the planner may walk another
# index, through all that waits for other keys, in the hope to meet them soon. They are updated by an array, which it
# takes for a few; a LIMIT that it does not know it takes for a tenth of all.
ADMIT = """
WITH head AS MATERIALIZED (
    SELECT first.*, (first.meta -> 'rate' ->> 0)::float8 AS interval, (first.meta -> 'rate' ->> 1)::int AS burst,
           COALESCE(first.concurrency, keys.otherwise) AS most, keys.otherwise
    FROM (SELECT DISTINCT key, CASE WHEN starts_with(key, '%%rate ') THEN 32767 ELSE 1 END AS otherwise
          FROM unnest(%s::text[]) AS key) AS keys
    CROSS JOIN LATERAL (
        SELECT task.lock_key AS key, task.id, task.concurrency, task.group_key, task.meta FROM {task} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'BLOCKED') AND (keys.key, 'BLOCKED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS first
    WHERE NOT EXISTS (
        SELECT FROM (
            SELECT task.id FROM {task} AS task
            WHERE (task.lock_key, task.status) BETWEEN (first.key, 'BLOCKED') AND (first.key, 'BLOCKED')
              AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.id < first.id AND task.waits_for > 0
            ORDER BY task.lock_key, task.status, task.id LIMIT 100) AS older
        WHERE (SELECT bool_and(awaited.finished_at IS NOT NULL) FROM {waiter} AS waiter
               JOIN {task} AS awaited ON awaited.id = waiter.awaited WHERE waiter.task_id = older.id))
), gate AS MATERIALIZED (
    SELECT head.key, head.otherwise, head.interval, head.burst, busy.ready, busy.admitted,
           LEAST(head.most, busy.least) - busy.admitted
               - CASE WHEN head.most = 1 AND head.group_key IS NULL AND (
                   SELECT task.lock_key FROM {task} AS task
                   WHERE task.lock_key BETWEEN head.key AND head.key
                     AND task.status = 'SCHEDULED' AND task.started_at IS NOT NULL
                   ORDER BY task.lock_key LIMIT 1) IS NOT NULL THEN 1 ELSE 0 END AS room,
           EXTRACT(EPOCH FROM clock_timestamp() - bucket.arrives_at) AS idle,
           GREATEST(bucket.arrives_at, clock_timestamp()) AS arrives_at
    FROM head LEFT JOIN {rate_limit} AS bucket ON bucket.key = head.key
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE task.status = 'READY')::int AS ready, count(*)::int AS admitted,
               min(COALESCE(task.concurrency, head.otherwise)) AS least
        FROM {task} AS task
        WHERE (task.lock_key, task.status) BETWEEN (head.key, 'READY') AND (head.key, 'RUNNING')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL) AS busy
), allowed AS MATERIALIZED (
    SELECT gate.*, GREATEST(0, CASE
               WHEN burst IS NULL THEN room
               ELSE LEAST(room, burst - ready, floor(
                   burst - EXTRACT(EPOCH FROM arrives_at - clock_timestamp()) / interval + 0.000001)::int)
               END) AS count
    FROM gate
), next AS MATERIALIZED (
    SELECT first.id, allowed.key FROM allowed CROSS JOIN LATERAL (
        SELECT waiting.id, row_number() OVER earlier AS place,
               min(COALESCE(waiting.concurrency, allowed.otherwise)) OVER earlier AS least
        FROM (SELECT task.lock_key, task.status, task.id, task.concurrency FROM {task} AS task
              WHERE (task.lock_key, task.status) BETWEEN (allowed.key, 'BLOCKED') AND (allowed.key, 'BLOCKED')
                AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
              ORDER BY task.lock_key, task.status, task.id LIMIT allowed.count) AS waiting
        WINDOW earlier AS (ORDER BY waiting.lock_key, waiting.status, waiting.id ROWS UNBOUNDED PRECEDING)) AS first
    WHERE allowed.admitted + first.place <= first.least
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM next)) AND task.status || '' = 'BLOCKED'
    FOR NO KEY UPDATE SKIP LOCKED
), admitted AS MATERIALIZED (
    SELECT id, key FROM (
        SELECT id, key, bool_and(id IN (SELECT id FROM locked)) OVER (PARTITION BY key ORDER BY id) AS is_free
        FROM next) AS each
    WHERE is_free
), bucket AS (
    INSERT INTO {rate_limit} AS bucket (key, arrives_at, opens_at)
    SELECT allowed.key, moment.arrives_at,
           CASE WHEN gate_has_more.more THEN GREATEST(
               moment.arrives_at - make_interval(secs => (burst - 1) * interval),
               clock_timestamp() + make_interval(secs => GREATEST(LEAST(interval, 0.05),
                   CASE WHEN through.taken = 0 THEN LEAST(1, allowed.idle / 10) END))) END
    FROM allowed
    CROSS JOIN LATERAL (SELECT count(*) AS taken FROM admitted WHERE admitted.key = allowed.key) AS through
    CROSS JOIN LATERAL (
        SELECT allowed.arrives_at + make_interval(secs => through.taken * interval) AS arrives_at) AS moment
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT FROM {task} AS task
            WHERE (task.lock_key, task.status) BETWEEN (allowed.key, 'BLOCKED') AND (allowed.key, 'BLOCKED')
              AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
            ORDER BY task.lock_key, task.status, task.id OFFSET through.taken) AS more) AS gate_has_more
    WHERE burst IS NOT NULL
    ON CONFLICT (key) DO UPDATE SET arrives_at = EXCLUDED.arrives_at, opens_at = EXCLUDED.opens_at
)
UPDATE {task} AS task SET status = 'READY'
WHERE task.id = ANY (ARRAY(SELECT id FROM admitted)) AND task.status || '' = 'BLOCKED'
RETURNING task.queue
"""

# Tasks that others are to run after. Until that is committed nobody sees that they are waited for, so they are locked:
# pruning skips what is locked. As by a foreign key, beside which all else may happen to a task, its claim and its end:
# no statement here but the pruning locks the key of a row.
LOCK_AWAITED = "SELECT id FROM {task} WHERE id = ANY (%s::bigint[]) ORDER BY id FOR KEY SHARE"

# Which of these tasks were enqueued to run after others.
HAVE_AWAITED = "SELECT id FROM {task} WHERE id = ANY (%s::bigint[]) AND meta ? 'after'"

# Lets tasks that are retried wait again for those of their after= that have not succeeded, whatever has become of
# these: ``RELEASE`` looks after the commit, as it does for new ones. What is gone is not waited for: it was pruned, so
# it had ended long ago. The waiters of a task that was cancelled while it waited are still there, and would count
# twice. IN within an expression is looked up in a hash table; a join may compare each with each.
WAIT_AGAIN = """
WITH named AS MATERIALIZED (
    SELECT task.id AS task_id, after.id::bigint AS awaited FROM {task} AS task CROSS JOIN LATERAL
        jsonb_array_elements_text(CASE WHEN jsonb_typeof(task.meta -> 'after') = 'array' THEN task.meta -> 'after' END)
        AS after (id)
    WHERE task.id = ANY (%s::bigint[])
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT awaited FROM named)) AND task.status || '' <> 'SUCCESSFUL'
    ORDER BY task.id FOR KEY SHARE
), waits AS MATERIALIZED (
    SELECT task_id, awaited FROM named WHERE (awaited IN (SELECT id FROM locked)) IS TRUE
), gone AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT task_id FROM named))
), new AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT task_id, awaited FROM waits
), blocked AS (
    UPDATE {task} AS task SET status = 'BLOCKED', waits_for = counted.waits
    FROM (SELECT task_id, count(*)::int AS waits FROM waits GROUP BY task_id) AS counted
    WHERE task.id = counted.task_id AND task.id = ANY (ARRAY(SELECT task_id FROM waits))
)
SELECT DISTINCT awaited FROM waits
"""

# For which tasks between two somebody waits. Asked first: hardly ever is there anybody, and to plan ``RELEASE`` takes
# the server longer than to settle a task. What is settled together is mostly close together, and one walk of an index
# is cheaper than a probe for each.
AWAITED_BETWEEN = "SELECT awaited FROM {waiter} WHERE awaited BETWEEN %s AND %s ORDER BY awaited LIMIT %s"

# The same of these tasks, where many others between them are waited for.
AWAITED = "SELECT DISTINCT awaited FROM {waiter} WHERE awaited = ANY (%s::bigint[])"

# Tells those who wait for tasks that are finished or gone. Other tasks are let through when nothing is left that they
# wait for, or cancelled when what they waited for did not succeed; processes that listen are notified. A waiter counts
# down in its row, so that two that finish at once cannot miss each other; locked in order, they cannot deadlock. Begins
# with the waiters, who are few, so that it costs next to nothing when there are none. Only so many at once: the planner
# expects one child and compares each with each, which for twenty thousand takes a minute. Each row says how many were
# told; if they are as many as were asked for, there may be more.
#
# Somebody's open transaction may have locked a task that waits, so this waits for a moment only, and fails. The second
# one leaves such a task where it is, with its waiters, for upkeep to find. It is not the first, because most of those
# who have it locked do this very thing, for another that it waits for.
RELEASE = """
WITH done AS MATERIALIZED (
    SELECT waiter.id, waiter.awaited, waiter.task_id, task.status IS DISTINCT FROM 'SUCCESSFUL' AS has_failed
    FROM {waiter} AS waiter LEFT JOIN {task} AS task ON task.id = waiter.awaited
    WHERE waiter.awaited = ANY (%s::bigint[]) AND (task.id IS NULL OR task.finished_at IS NOT NULL)
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    ORDER BY waiter.awaited, waiter.task_id LIMIT %s
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task WHERE task.id = ANY (ARRAY(SELECT task_id FROM done))
    ORDER BY task.id FOR NO KEY UPDATE OF task
), gone AS MATERIALIZED (
    DELETE FROM {waiter} AS waiter USING done
    WHERE waiter.id = done.id AND (done.task_id IS NULL OR done.task_id = ANY (ARRAY(SELECT id FROM locked)))
    RETURNING done.awaited, done.task_id, done.has_failed
), child AS MATERIALIZED (
    SELECT task_id AS id, count(*)::int AS done, bool_or(has_failed) AS has_failed,
           min(awaited) FILTER (WHERE has_failed) AS failed
    FROM gone WHERE task_id IS NOT NULL GROUP BY task_id
), moved AS (
    UPDATE {task} AS task
    SET waits_for = GREATEST(0, task.waits_for - child.done),
        status = CASE WHEN child.has_failed THEN 'CANCELLED'
                      WHEN task.waits_for > child.done THEN 'BLOCKED'
                      WHEN task.run_after > clock_timestamp() THEN 'SCHEDULED'
                      WHEN task.lock_key IS NOT NULL THEN 'BLOCKED'
                      ELSE 'READY' END,
        finished_at = CASE WHEN child.has_failed THEN clock_timestamp() END,
        expires_at = CASE WHEN child.has_failed THEN {expires_at} END
    FROM child
    WHERE task.id = child.id AND task.id = ANY (ARRAY(SELECT id FROM locked))
      AND task.status || '' = 'BLOCKED' AND task.waits_for > 0
    RETURNING task.id, task.status, task.queue, task.lock_key, task.attempts - task.uncounted AS number, task.waits_for,
              child.failed
), recorded AS (
    INSERT INTO {attempt} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, number, NULL, clock_timestamp(), clock_timestamp(), 'FAILED', %s, format(%s, failed)
    FROM moved WHERE status = 'CANCELLED'
    ON CONFLICT DO NOTHING
), told AS MATERIALIZED (
    SELECT count(pg_notify(%s, awaited::text)) FROM (SELECT DISTINCT awaited FROM gone WHERE task_id IS NULL) AS heard
)
SELECT moved.id, moved.status, moved.queue, moved.lock_key, moved.waits_for, (SELECT count(*) FROM gone)
FROM told LEFT JOIN moved ON true
"""
RELEASE_UNLOCKED = RELEASE.replace("OF task\n", "OF task SKIP LOCKED\n")

# Notes that this process waits for tasks, and no longer for others. Rows of others that ``RELEASE`` deletes at this
# moment are skipped: two that delete several rows in different orders could wait for each other in a circle.
NOTE_WAITS = """
WITH gone AS (
    DELETE FROM {waiter} WHERE id = ANY (ARRAY(
        SELECT id FROM {waiter} WHERE id = ANY (%s::bigint[]) FOR UPDATE SKIP LOCKED))
)
INSERT INTO {waiter} (awaited) SELECT unnest(%s::bigint[]) RETURNING awaited, id
"""

# Which of these tasks have ended.
LOOK_AT_AWAITED = "SELECT id, finished_at IS NOT NULL FROM {task} WHERE id = ANY (%s::bigint[])"

# Waiters, some at a time, whose tasks are finished or gone: what a crash left untold.
STRAY_WAITERS = """
SELECT waiter.id, CASE WHEN task.id IS NULL OR task.finished_at IS NOT NULL THEN waiter.awaited END
FROM (SELECT id, awaited FROM {waiter} WHERE id > %s ORDER BY id LIMIT %s) AS waiter
LEFT JOIN {task} AS task ON task.id = waiter.awaited
ORDER BY waiter.id
"""
