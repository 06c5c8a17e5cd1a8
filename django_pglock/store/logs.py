"""Writes the log records of successful attempts, for functions with ``capture_logs``.

The log records of other outcomes are written with the outcome. The statement for successes is the most frequent of all,
so it has no column for log records.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_pglock.store.statements import run
from django_pglock.tasks.claim import Claim

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
