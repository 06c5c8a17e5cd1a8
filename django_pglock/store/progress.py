"""Writes what running tasks report: their progress, and the log records of successful attempts (``capture_logs``).

The log records of other outcomes are written with the outcome. The statement for successes is the most frequent of all,
so it has no column for log records.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from django_pglock.store.statements import run
from django_pglock.tasks.claim import Claim

#: The number of rows that one statement selects by an array and joins. The planner may compare each pair.
COMPARED_AT_ONCE = 200

# Writes the progress of running tasks, guarded by their claims. No index has the progress, so this is a HOT update.
# Locked rows are skipped, because the caller must not wait: it has requests to pass on, or other tasks to settle.
WRITE_PROGRESS = """
WITH reported AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS reported (id, attempt, progress)
), free AS MATERIALIZED (
    SELECT task.id, reported.progress FROM {task} AS task JOIN reported ON reported.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM reported))
      AND task.attempts = reported.attempt AND task.status || '' = 'RUNNING'
    FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {task} AS task SET progress = free.progress
FROM free WHERE task.id = free.id AND task.id = ANY (ARRAY(SELECT id FROM free)) RETURNING task.id
"""

# Writes the last progress of a task in the task's own transaction, right before its end. It waits for locked rows, as
# the statement that ends the task does.
WRITE_LAST_PROGRESS = """
WITH reported AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS reported (id, attempt, progress)
)
UPDATE {task} AS task SET progress = reported.progress
FROM reported
WHERE task.id = reported.id AND task.id = ANY (ARRAY(SELECT id FROM reported))
  AND task.attempts = reported.attempt AND task.status || '' = 'RUNNING'
RETURNING task.id
"""


def write_progress(using: str, claims: Sequence[Claim], *, is_last: bool = False) -> None:
    """Write the progress that these running tasks have reported, except for claims that were lost.

    Locked rows are skipped as well, unless the progress ``is_last``.
    """
    claims = sorted(claims, key=attrgetter("id"))
    for start in range(0, len(claims), COMPARED_AT_ONCE):
        _write(using, claims[start : start + COMPARED_AT_ONCE], is_last=is_last)


def _write(using: str, claims: Sequence[Claim], *, is_last: bool) -> None:
    # Read once, because the functions may report more at this moment.
    reported = [claim.progress for claim in claims]
    statement = WRITE_LAST_PROGRESS if is_last else WRITE_PROGRESS
    written = run(using, statement, [claim.id for claim in claims], [claim.attempt for claim in claims], reported)
    for claim, progress in zip(claims, reported, strict=True):
        if (claim.id,) in written:
            claim.written_progress = progress


# Also written if an attempt has logged nothing. Otherwise the log of the previous attempt would stay. The status is not
# compared, because an atomic task has already ended. Locked rows are skipped, because other outcomes wait.
WRITE_LOGS = """
WITH reported AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::text[]) AS reported (id, attempt, log)
), free AS MATERIALIZED (
    SELECT task.id, reported.log FROM {task} AS task JOIN reported ON reported.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM reported)) AND task.attempts = reported.attempt
    FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {task} AS task SET log = NULLIF(free.log, '') FROM free
WHERE task.id = free.id AND task.id = ANY (ARRAY(SELECT id FROM free))
"""


def write_logs(using: str, claims: Sequence[Claim]) -> None:
    """Write the log records of these claims into the rows of their tasks, except for claims that were lost."""
    run(
        using,
        WRITE_LOGS,
        [each.id for each in claims],
        [each.attempt for each in claims],
        [each.log for each in claims],
    )
