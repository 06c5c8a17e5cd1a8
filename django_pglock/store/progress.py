"""Writing the progress that running tasks report."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from django_pglock.store.statements import run
from django_pglock.tasks.claim import Claim

#: Rows that one statement selects by an array and joins with: the planner may compare each with each.
COMPARED_AT_ONCE = 200

# The progress of running tasks, guarded by their claims. It is in no index, so this is a HOT update. Locked rows are
# skipped, because the caller has requests to pass on, or other tasks to settle.
NOTE_PROGRESS = """
WITH said AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS said (id, attempt, progress)
), told AS MATERIALIZED (
    SELECT task.id, said.progress FROM {task} AS task JOIN said ON said.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM said)) AND task.attempts = said.attempt AND task.status || '' = 'RUNNING'
    FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {task} AS task SET progress = told.progress
FROM told WHERE task.id = told.id AND task.id = ANY (ARRAY(SELECT id FROM told)) RETURNING task.id
"""

# The last progress of a task, written in its own transaction right before its end. It waits for locked rows, as the
# statement of the end does.
NOTE_LAST_PROGRESS = """
UPDATE {task} AS task SET progress = said.progress
FROM unnest(%s::bigint[], %s::int[], %s::jsonb[]) AS said (id, attempt, progress)
WHERE task.id = said.id AND task.attempts = said.attempt AND task.status || '' = 'RUNNING'
RETURNING task.id
"""


def note_progress(using: str, claims: Sequence[Claim], *, is_last: bool = False) -> None:
    """Write the progress that these running tasks have reported, except for claims that were lost.

    Locked rows are left out as well, unless the progress ``is_last``.
    """
    claims = sorted(claims, key=attrgetter("id"))
    for start in range(0, len(claims), COMPARED_AT_ONCE):
        _note(using, claims[start : start + COMPARED_AT_ONCE], is_last=is_last)


def _note(using: str, claims: Sequence[Claim], *, is_last: bool) -> None:
    # Read once: the functions may be reporting more at this moment.
    reported = [claim.progress for claim in claims]
    statement = NOTE_LAST_PROGRESS if is_last else NOTE_PROGRESS
    noted = run(using, statement, [claim.id for claim in claims], [claim.attempt for claim in claims], reported)
    for claim, progress in zip(claims, reported, strict=True):
        if (claim.id,) in noted:
            claim.noted_progress = progress
