"""The statements about tasks that the ORM cannot say, one constant each, with the reason above it.

``{task}``, ``{attempt}`` and so on are replaced by quoted table names; every value is a parameter.
Statuses are literals, so that also a generic plan can use the partial indexes. Rows that are known by their ids are
asked for by an array of them, besides a join where one is needed: a table that was empty when it was last vacuumed is
expected to have one row, and a join alone may then read all of it. ``status || ''`` keeps servers before 17 from an
index of which they would read all that has the status, and look at the ids only then. Times are the server's:
``statement_timestamp()`` where one moment holds for all rows, never ``now()``, which in a long transaction is long ago.
"""

from __future__ import annotations

from django_pglock.keys.reserved import ADMISSION, WORKER

# When the row of a task that finishes now may go: keep_result after its end, and not before its unique key is free.
# NULL without keep_result. Stands in the statements as ``{expires_at}``.
EXPIRES_AT = """CASE WHEN keep_result IS NOT NULL
                           THEN GREATEST(clock_timestamp() + make_interval(secs => keep_result), unique_until) END"""

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

# For the rest of a transaction: walk an index in its order rather than to sort what is expected to be little. While the
# statistics do not know of a backlog yet, the planner expects a few rows where there are a hundred thousand. Compile no
# plan, either: one that has to sort all the same looks to servers before 18 as if it were worth it, for a quarter of a
# second.
OFF = ("enable_sort", "enable_bitmapscan", "jit")
BY_INDEX = ", ".join(f"set_config('{name}', 'off', true)" for name in OFF)

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

# Keys whose bucket has a token for somebody who waits. One whose waiters have gone meanwhile needs no alarm any more.
OPEN_RATES = """
UPDATE {rate_limit} SET opens_at = NULL
WHERE key IN (SELECT key FROM {rate_limit} WHERE opens_at <= clock_timestamp() ORDER BY opens_at LIMIT %s
              FOR UPDATE SKIP LOCKED)
RETURNING key
"""

# Buckets that have been full for a day, and for which nobody waits: one that is not there is full as well.
FORGET_RATES = """
DELETE FROM {rate_limit} WHERE key = ANY (ARRAY(
    SELECT key FROM {rate_limit}
    WHERE opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING key
"""

# The next keys at which somebody waits, from one key on: what a crash left to be admitted. One index probe a key.
BLOCKED_KEYS = """
WITH RECURSIVE found AS (
    (SELECT lock_key, 1 AS number FROM {task}
     WHERE lock_key > %s AND status = 'BLOCKED' AND finished_at IS NULL ORDER BY lock_key, status, id LIMIT 1)
    UNION ALL
    SELECT (SELECT task.lock_key FROM {task} AS task
            WHERE task.lock_key > found.lock_key AND task.status = 'BLOCKED' AND task.finished_at IS NULL
            ORDER BY task.lock_key, task.status, task.id LIMIT 1), number + 1
    FROM found WHERE found.lock_key IS NOT NULL AND number < %s
)
SELECT lock_key FROM found WHERE lock_key IS NOT NULL
"""

# Who has a key: what has been admitted, and what will be tried again, looked for among the first thousand of each
# status. ADMIT says why ranges, and UNKNOWN why the limit is a subquery.
HOLDERS = """
SELECT first.id FROM unnest(ARRAY['READY', 'RUNNING', 'SCHEDULED']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.started_at FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, wanted.status) AND (%s, wanted.status)
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key, task.status, task.id LIMIT (SELECT 1000)) AS first
WHERE first.status <> 'SCHEDULED' OR first.started_at IS NOT NULL
ORDER BY first.id LIMIT %s
"""

# Takes the others of a group and backend along with the one that was claimed: those that wait for its key, and those
# that still gather. They have the same key, so nobody else can be doing it, unless this worker was frozen and its claim
# is lost. ADMIT says why ranges.
TAKE_ALONG = """
WITH leader AS MATERIALIZED (
    SELECT id, backend FROM {task} WHERE id = %s AND attempts = %s AND status || '' = 'RUNNING' FOR NO KEY UPDATE
), waiting AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, 'BLOCKED')
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0 AND task.task_path = %s
      AND task.backend = (SELECT backend FROM leader)
    ORDER BY task.lock_key, task.status, task.id LIMIT %s FOR NO KEY UPDATE OF task SKIP LOCKED
), gathering AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, 'SCHEDULED') AND (%s, 'SCHEDULED')
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0 AND task.task_path = %s
      AND task.backend = (SELECT backend FROM leader)
      AND task.started_at IS NULL AND task.run_after <= clock_timestamp() + make_interval(secs => %s)
    ORDER BY task.lock_key, task.status, task.id LIMIT %s FOR NO KEY UPDATE OF task SKIP LOCKED
), others AS MATERIALIZED (
    SELECT id FROM (SELECT id FROM waiting UNION ALL SELECT id FROM gathering) AS either ORDER BY id LIMIT %s
)
UPDATE {task} AS task
SET status = 'RUNNING', attempts = attempts + 1, worker = %s,
    started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
WHERE task.id = ANY (ARRAY(SELECT id FROM others)) AND EXISTS (SELECT FROM leader)
RETURNING {claim_columns}
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

# Wakes sleeping workers, if there are any. Sent after the commit, because before it a worker could look, see nothing
# and fall asleep between our look at its flag and our commit. Conditional, because each NOTIFY takes a lock that
# serialises the commits of the whole server. Nobody waits for its commit to be on the disk: what a crash takes is found
# by the poll.
WAKE = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, %s)
WHERE EXISTS (SELECT FROM {worker} WHERE is_sleeping)
"""

# The common ending, with as few columns as it needs. The guard is the fence: a claim that was rescued, cancelled or
# reset meanwhile finds another number of attempts or another status, and its outcome is dropped.
#
# Somebody's open transaction may have locked one of the rows, and all others would wait for its end. So this waits for
# a moment only, and fails; ``HELD`` then says which they are. To skip what is locked would be a second write of each
# row. The limit is set by the statement itself, before it locks anything: that is right behind a pooler, too.
SETTLE_SUCCESSES = """
UPDATE {task} AS task
SET status = 'SUCCESSFUL', finished_at = clock_timestamp(), result = NULLIF(outcome.result, 'null'),
    expires_at = {expires_at}
FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS outcome (id, attempt, result)
WHERE task.id = outcome.id AND task.attempts = outcome.attempt AND task.status = 'RUNNING'
  AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
RETURNING task.id, date_part('epoch', task.finished_at)
"""

# The success of one task in its function's own transaction. Fails when the claim is lost (division by zero), so that
# the COMMIT that follows in the same message does not happen.
SETTLE_OWN_SUCCESS = """
WITH settled AS (
    UPDATE {task} AS task
    SET status = 'SUCCESSFUL', finished_at = clock_timestamp(), result = NULLIF(%s::jsonb, 'null'),
        expires_at = {expires_at}
    WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING'
    RETURNING task.id)
SELECT 1 / count(*) FROM settled
"""

# All other endings, with the failed attempt written by the same statement: neither can exist without the other.
# A claim given back unused takes back its start, which it set itself when it was the first. What has a key and is to
# run again waits for it again. What somebody asked to end does not run again. Snoozes are counted in the row's meta,
# because hardly any task has a limit of them, and a column would be read by each claim.
SETTLE_OTHERS = """
WITH outcome AS MATERIALIZED (
    SELECT * FROM unnest(
        %s::bigint[], %s::int[], %s::text[], %s::float8[], %s::int[], %s::int[], %s::text[], %s::text[], %s::text[])
        AS outcome (id, attempt, status, delay, retried, snoozes, record, exception_path, traceback)
), settled AS (
    UPDATE {task} AS task
    SET status = CASE WHEN outcome.status IN ('SCHEDULED', 'READY') AND task.cancel_requested_at IS NOT NULL
                      THEN 'CANCELLED'
                      WHEN outcome.status = 'READY' AND task.lock_key IS NOT NULL THEN 'BLOCKED'
                      ELSE outcome.status END,
        retries = task.retries + outcome.retried,
        meta = CASE WHEN outcome.snoozes > 0 THEN jsonb_set(task.meta, '{{snoozes}}', to_jsonb(outcome.snoozes))
                    ELSE task.meta END,
        uncounted = task.uncounted
            + CASE WHEN outcome.record IS NULL AND outcome.status IN ('SCHEDULED', 'READY') THEN 1 ELSE 0 END,
        run_after = CASE WHEN outcome.status = 'SCHEDULED'
                         THEN clock_timestamp() + make_interval(secs => outcome.delay) ELSE task.run_after END,
        finished_at = CASE WHEN outcome.status NOT IN ('SCHEDULED', 'READY') OR task.cancel_requested_at IS NOT NULL
                           THEN clock_timestamp() END,
        expires_at = CASE WHEN outcome.status NOT IN ('SCHEDULED', 'READY') OR task.cancel_requested_at IS NOT NULL
                          THEN {expires_at} END,
        worker = CASE WHEN outcome.status NOT IN ('SCHEDULED', 'READY') OR task.cancel_requested_at IS NOT NULL
                      THEN task.worker END,
        started_at = CASE WHEN outcome.record IS NULL AND outcome.status = 'READY'
                               AND task.started_at = task.last_attempted_at
                          THEN NULL ELSE task.started_at END
    FROM outcome
    WHERE task.id = outcome.id AND task.attempts = outcome.attempt AND task.status = 'RUNNING'
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    RETURNING task.id, task.attempts - task.uncounted AS number, task.last_attempted_at, task.finished_at
), recorded AS (
    INSERT INTO {attempt} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT settled.id, settled.number, %s, settled.last_attempted_at, clock_timestamp(),
           outcome.record, outcome.exception_path, outcome.traceback
    FROM settled JOIN outcome ON outcome.id = settled.id
    WHERE outcome.record IS NOT NULL
)
SELECT id, date_part('epoch', finished_at) FROM settled
"""

# Which of these claims cannot be settled now, because somebody has locked their rows. A claim that is lost is not among
# them: its row is there and free, or has been taken by somebody else.
HELD = """
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[]) AS claim (id, attempt)
), free AS MATERIALIZED (
    SELECT task.id FROM {task} AS task WHERE task.id = ANY (ARRAY(SELECT id FROM claim))
    ORDER BY task.id FOR NO KEY UPDATE SKIP LOCKED
)
SELECT task.id FROM {task} AS task JOIN claim ON claim.id = task.id
WHERE task.id = ANY (ARRAY(SELECT id FROM claim)) AND task.id <> ALL (ARRAY(SELECT id FROM free))
  AND task.attempts = claim.attempt AND task.status || '' = 'RUNNING'
"""

# Whether a session holds the lock of a worker, or its row says that none does.
LOCK_IS_HELD = f"""(worker.lock_key IS NULL OR ({WORKER}::bigint << 32) | worker.lock_key IN (
               SELECT (held.classid::bigint << 32) | held.objid::bigint FROM pg_locks AS held
               WHERE held.locktype = 'advisory' AND held.objsubid = 2 AND held.granted
                 AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())))"""

# Takes claims back from workers that are dead: no row, or no sign of life for the hard limit, or two missing beats and
# no session that holds the worker's lock, unless its row says that none does. While there is no witness (liveness.py)
# only those without a row are dead. Which claims are meant is decided on one snapshot, by id and attempt: a row that
# was settled and claimed by a newer worker since then carries another attempt and is left alone. SKIP LOCKED: a row
# that is being settled at this moment needs no rescue. What somebody asked to end does not run again.
RESCUE = f"""
WITH witness AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
      AND worker.beating_since <= clock_timestamp() - make_interval(secs => %s) LIMIT 1
), alive AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE NOT EXISTS (SELECT FROM witness)
       OR worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
       OR (worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
           AND {LOCK_IS_HELD})
), orphan AS MATERIALIZED (
    SELECT task.id, task.attempts, task.worker FROM {{task}} AS task
    WHERE task.status = 'RUNNING' AND NOT EXISTS (SELECT FROM alive WHERE alive.id = task.worker)
    ORDER BY task.id LIMIT %s
), mine AS MATERIALIZED (
    SELECT task.id, orphan.worker,
           CASE WHEN task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                WHEN task.rescues >= %s THEN 'FAILED'
                WHEN task.lock_key IS NOT NULL THEN 'BLOCKED' ELSE 'READY' END AS status
    FROM {{task}} AS task JOIN orphan ON orphan.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM orphan)) AND task.attempts = orphan.attempts AND task.status = 'RUNNING'
    ORDER BY task.id FOR NO KEY UPDATE OF task SKIP LOCKED
), rescued AS (
    UPDATE {{task}} AS task
    SET status = mine.status,
        rescues = task.rescues + 1,
        finished_at = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN clock_timestamp() END,
        expires_at = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN {{expires_at}} END,
        worker = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN task.worker END
    FROM mine
    WHERE task.id = mine.id AND task.id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING task.id, task.attempts, task.attempts - task.uncounted AS number, mine.worker, task.last_attempted_at,
              task.status, task.queue, task.task_path, task.lock_key
), recorded AS (
    INSERT INTO {{attempt}} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, number, worker, last_attempted_at, clock_timestamp(), 'LOST', %s, %s FROM rescued
)
SELECT id, attempts, worker, status, queue, task_path, lock_key FROM rescued
"""

# How many tasks of each queue run on workers that may be dead: no row, a missing beat, or a lock that nobody holds.
DOUBTFUL = f"""
SELECT task.queue, count(*) FROM {{task}} AS task
WHERE task.status = 'RUNNING' AND task.backend = COALESCE(%s::text, task.backend) AND NOT EXISTS (
    SELECT FROM {{worker}} AS worker WHERE worker.id = task.worker
       AND worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s) AND {LOCK_IS_HELD})
GROUP BY task.queue
"""

# Claims from tasks that take turns: one of each key behind the last one served, then a second, and so on, as many as
# are asked for. Walks from key to key by index probes, so neither the number of keys nor of their tasks matters. Keys
# at which nothing waits but functions that this worker does not know take nobody's turn; of all, a thousand are walked
# at most. Returns also behind which key the next claim goes on, in each row, and in one without a claim if there is
# none: empty when the walk came to the end.
CLAIM_FAIR = """
WITH RECURSIVE keys AS (
    SELECT %s::text AS fair_key, 0 AS number, 0 AS found, false AS is_known
    WHERE NOT EXISTS (SELECT FROM {queue} WHERE name = %s AND paused_at IS NOT NULL)
    UNION ALL
    SELECT next.fair_key, number + 1, found + next.is_known::int, next.is_known
    FROM keys CROSS JOIN LATERAL (
        SELECT first.fair_key, (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = first.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id LIMIT 1) IS NOT NULL AS is_known
        FROM (SELECT task.fair_key::text FROM {task} AS task
              WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
                AND task.fair_key > keys.fair_key ORDER BY task.fair_key LIMIT 1) AS first
    ) AS next
    WHERE number < 1000 AND found < %s
), turn AS MATERIALIZED (
    SELECT next.id, row_number() OVER (ORDER BY next.rank, keys.fair_key) AS place
    FROM keys CROSS JOIN LATERAL (
        SELECT locked.id, row_number() OVER () AS rank FROM (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = keys.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id
            LIMIT ceil(%s::numeric / (SELECT max(found) FROM keys))
            FOR NO KEY UPDATE OF task SKIP LOCKED) AS locked
    ) AS next
    WHERE keys.is_known
    ORDER BY next.rank, keys.fair_key LIMIT %s
), claimed AS (
    UPDATE {task} AS task
    SET status = 'RUNNING', attempts = attempts + 1, worker = %s,
        started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
    FROM turn WHERE task.id = turn.id AND task.id = ANY (ARRAY(SELECT id FROM turn))
    RETURNING turn.place, {claim_columns}
)
SELECT walk.ended_at, claimed.*
FROM (SELECT CASE WHEN max(number) = 1000 OR max(found) = %s THEN max(fair_key) ELSE '' END AS ended_at
      FROM keys) AS walk
LEFT JOIN claimed ON true
ORDER BY claimed.place
"""

# Gives back what this worker owns in the table but not in its hands: claims whose answer was lost on the way. The
# heartbeat would keep them alive for ever. Left alone are claims after a moment before which the worker looked into its
# hands, and those of keys for which its threads are claiming groups.
RELEASE_UNKNOWN = """
UPDATE {task} AS task
SET status = CASE WHEN task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                  WHEN task.lock_key IS NOT NULL THEN 'BLOCKED' ELSE 'READY' END,
    finished_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN clock_timestamp() END, worker = NULL,
    uncounted = uncounted + 1,
    expires_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN {expires_at} END,
    started_at = CASE WHEN started_at = last_attempted_at THEN NULL ELSE started_at END
WHERE task.status = 'RUNNING' AND task.worker = %s AND task.id <> ALL (%s::bigint[])
  AND task.last_attempted_at < LEAST(clock_timestamp() - make_interval(secs => %s), %s::timestamptz)
  AND COALESCE(task.lock_key <> ALL (%s::text[]), true)
RETURNING task.id, task.status, task.lock_key
"""

# Which running tasks of a worker somebody has asked to end.
CANCEL_REQUESTS = """
SELECT id, attempts FROM {task} WHERE status = 'RUNNING' AND worker = %s AND cancel_requested_at IS NOT NULL
"""

# Tells the workers, who all listen, to look for such requests.
NOTIFY_CANCEL = "SELECT pg_notify(%s, id::text) FROM unnest(%s::bigint[]) AS id"

# What running tasks tell of their progress, guarded by their claims. Touches no column of an index, so it is written
# beside the old version of the row. Skips what is locked: who writes it has a pulse to keep, or others to settle.
NOTE_PROGRESS = """
WITH said AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS said (id, attempt, progress)
), told AS MATERIALIZED (
    SELECT task.id, said.progress FROM {task} AS task JOIN said ON said.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM said)) AND task.attempts = said.attempt AND task.status || '' = 'RUNNING'
    ORDER BY task.id FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {task} AS task SET progress = told.progress
FROM told WHERE task.id = told.id AND task.id = ANY (ARRAY(SELECT id FROM told)) RETURNING task.id
"""

# The same, by a task of its own transaction right before its end: its last word, for which it waits as the end does.
NOTE_LAST_PROGRESS = """
UPDATE {task} AS task SET progress = said.progress
FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS said (id, attempt, progress)
WHERE task.id = said.id AND task.attempts = said.attempt AND task.status = 'RUNNING'
RETURNING task.id
"""

# The distinct queues that have something ready, two index probes each: a DISTINCT would read every ready row.
_READY_QUEUES = """
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
"""
READY_QUEUES = f"{_READY_QUEUES}SELECT queue FROM found WHERE queue IS NOT NULL"

# The first of what is ready in each queue. What nobody claims comes to be among the first by itself, so nothing need be
# read beyond them. The limits are subqueries: a planner that sees a number above what it takes for an average queue
# would read and sort all of the one queue that is not average.
_FIRST_READY = """found CROSS JOIN LATERAL (
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = found.queue
     ORDER BY task.priority DESC, task.id LIMIT (SELECT %s::bigint))
    UNION ALL
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = found.queue
     ORDER BY task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS first"""

# What is ready and known to no living worker, or not to one of them.
UNKNOWN = f"""
{_READY_QUEUES.rstrip()}, known AS MATERIALIZED (
    SELECT jsonb_array_elements_text(worker.task_paths) AS path FROM {{worker}} AS worker
    WHERE worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
      AND worker.id = COALESCE(%s::uuid, worker.id)
)
SELECT first.task_path, found.queue, count(*), min(first.enqueued_at) AS oldest
FROM {_FIRST_READY}
WHERE first.task_path NOT IN (SELECT path FROM known)
  AND first.backend = COALESCE(%s::text, first.backend)
GROUP BY first.task_path, found.queue
ORDER BY oldest, first.task_path
"""

# Which functions are called by what is ready.
READY_PATHS = f"{_READY_QUEUES}SELECT DISTINCT found.queue, first.task_path FROM {_FIRST_READY}"

# Seconds until the next task is due, or the next token of a rate: zero or less when it is, NULL when there is none.
NEXT_DUE = """
SELECT EXTRACT(EPOCH FROM LEAST(
    (SELECT run_after FROM {task} WHERE status = 'SCHEDULED' ORDER BY run_after LIMIT 1),
    (SELECT opens_at FROM {rate_limit} WHERE opens_at IS NOT NULL ORDER BY opens_at LIMIT 1)
) - clock_timestamp())::float8
"""

# Where the next stretch of a walk along the key ends, and whether all in it are younger than so many seconds: ids are
# drawn in the order in which tasks are enqueued, so nothing behind it can have been finished for longer.
NEXT_WINDOW = """
SELECT max(id), bool_and(enqueued_at > clock_timestamp() - make_interval(secs => %s))
FROM (SELECT id, enqueued_at FROM {task} WHERE id > %s ORDER BY id LIMIT %s) AS page
"""

# Deletes the tasks that a selection before it has locked, with what belongs to them: their attempts, and what they
# waited for when they were cancelled. By an array, so that no estimate can make the planner read a table to its end.
PRUNE = """, attempts AS (
    DELETE FROM {attempt} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), gone AS (
    DELETE FROM {task} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT count(*) FROM gone
"""

# How many tasks of each queue are ready, and for how many seconds the first of them have been: only so many rows of a
# queue are read, in the order of the two indexes of what is ready. The limits are subqueries as in UNKNOWN.
COUNT_READY = """
SELECT name.queue, count(*), EXTRACT(EPOCH FROM clock_timestamp() - min(ready.since))::float8
FROM unnest(%s::text[]) AS name (queue) CROSS JOIN LATERAL (
    (SELECT GREATEST(task.enqueued_at, task.run_after) AS since FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = name.queue
     ORDER BY task.queue, task.priority DESC, task.id LIMIT (SELECT %s::bigint))
    UNION ALL
    (SELECT GREATEST(task.enqueued_at, task.run_after) FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = name.queue
     ORDER BY task.queue, task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS ready
GROUP BY name.queue
"""

# The newest tasks of each other status that somebody may have to look after, by queue: no index knows their queues. A
# range of statuses, in its order: with "=" the planner may walk the key, through all that succeeded, in the hope to
# meet them soon.
COUNT_OTHERS = """
SELECT newest.status, newest.queue, count(*)
FROM unnest(ARRAY['BLOCKED', 'SCHEDULED', 'RUNNING', 'FAILED']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.status, task.queue FROM {task} AS task
    WHERE task.status BETWEEN wanted.status AND wanted.status AND task.status <> 'SUCCESSFUL'
    ORDER BY task.status DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS newest
GROUP BY newest.status, newest.queue
"""

# The clock's and the schedules' dates as UTC without a zone, which Django hands out as they are, with USE_TZ and
# without. Functions that this process does not know are somebody else's.
SCHEDULES = """
SELECT task_path, expression, timezone, is_enabled, next_at AT TIME ZONE 'UTC', clock_timestamp() AT TIME ZONE 'UTC'
FROM {schedule} WHERE task_path = ANY (%s::text[]) ORDER BY next_at, task_path
"""

# What is new, and what has changed in the code; a row that is as it should be keeps its date. In one order, so that
# workers that start together cannot deadlock.
REGISTER_SCHEDULES = """
INSERT INTO {schedule} AS schedule (task_path, expression, timezone, next_at)
SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::timestamptz[]) AS code (task_path) ORDER BY task_path
ON CONFLICT (task_path) DO UPDATE
SET expression = EXCLUDED.expression, timezone = EXCLUDED.timezone, next_at = EXCLUDED.next_at
WHERE (schedule.expression, schedule.timezone) <> (EXCLUDED.expression, EXCLUDED.timezone)
RETURNING task_path
"""

# A worker that freezes while it has a tick must not keep it from the others, nor wait for ever behind somebody's open
# transaction. Only for this transaction, so it is right behind a pooler as well.
LIMIT_TICK = """
SELECT set_config('idle_in_transaction_session_timeout', '10s', true), set_config('lock_timeout', '1s', true)
"""
