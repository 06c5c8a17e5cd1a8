"""The tasks that belong to other tasks by ``after=``: what was cancelled because of a task, and the parts of a task.

A verb offers to change them, too: a retry those that were cancelled because of the retried tasks, and a cancel those
for which only the cancelled tasks wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django.utils.translation import ngettext

from django_pglock.store.children import unfinished_gathers
from django_pglock.store.release import DEPENDENCY_TEXT
from django_pglock.store.statements import array_of_numbers, run

#: At most this number of tasks is named.
MOST_NAMED = 10

# The tasks of the ``after=`` of a task that have failed or were cancelled.
_UNSUCCESSFUL = """
SELECT other.id FROM jsonb_array_elements_text(
    CASE WHEN jsonb_typeof(task.meta -> 'after') = 'array' THEN task.meta -> 'after' END) AS each (id)
CROSS JOIN LATERAL (SELECT other.id, other.status FROM {task} AS other WHERE other.id = each.id::bigint LIMIT 1)
    AS other
WHERE other.status IN ('FAILED', 'CANCELLED')
"""

# The tasks that were cancelled because of one of these, by their last attempt, each with all tasks of its ``after=``
# that did not succeed. The attempt is written after the task, in one statement: an older one is of an earlier end.
_CANCELLED = """
FROM {attempt} AS attempt CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.meta, task.finished_at, task.attempts - task.uncounted AS number
    FROM {task} AS task WHERE task.id = attempt.task_id LIMIT 1) AS task
WHERE attempt.cause = ANY (%s::bigint[]) AND task.status = 'CANCELLED' AND attempt.number = task.number
  AND attempt.finished_at >= task.finished_at
"""
CANCELLED_BECAUSE_OF = f"SELECT task.id, ARRAY({_UNSUCCESSFUL}) {_CANCELLED}"

# The unfinished tasks for which these tasks wait, each with all that wait for it: 0 is a process.
UNFINISHED_PARTS = """
SELECT task.id, ARRAY(
    SELECT COALESCE(other.task_id, 0) FROM {waiter} AS other
    WHERE other.awaited = task.id AND other.has_ended IS NOT TRUE)
FROM (SELECT awaited FROM {waiter} WHERE task_id = ANY (%s::bigint[]) AND has_ended IS NOT TRUE) AS waiter
CROSS JOIN LATERAL (
    SELECT task.id, task.finished_at FROM {task} AS task WHERE task.id = waiter.awaited LIMIT 1) AS task
WHERE task.finished_at IS NULL
"""

# A task that stays cancelled when one of these is retried, because another one of its ``after=`` did not succeed
# either, is cancelled because of that one from now on. So a retry of that one finds it.
PASS_CAUSE_ON = f"""
WITH stays AS MATERIALIZED (SELECT attempt.id, ({_UNSUCCESSFUL} LIMIT 1) AS cause {_CANCELLED})
UPDATE {{attempt}} AS attempt SET cause = stays.cause, traceback = format(%s, stays.cause) FROM stays
WHERE attempt.id = stays.id AND attempt.id = ANY (ARRAY(SELECT id FROM stays WHERE cause IS NOT NULL))
"""


class Related(NamedTuple):
    """Other tasks that can be changed with some tasks, and what to say of those that cannot."""

    ids: Sequence[int] = ()
    remark: str = ""


def cancelled_because_of(using: str, ids: Sequence[int]) -> Related:
    """Return what was cancelled because of these tasks, directly or not, and would run if they were retried.

    A task of which another dependency has failed as well would be cancelled again, so it stays.
    """
    found = _reached(using, CANCELLED_BECAUSE_OF, ids)
    complete = _complete(found, ids)
    left = found.keys() - complete
    causes = set().union(*(found[id_] for id_ in left)) - found.keys() - {*ids}
    return Related(sorted(complete), _stays(len(left), sorted(causes)))


def unfinished_parts(using: str, ids: Sequence[int]) -> Related:
    """Return the unfinished tasks for which these tasks wait, directly or not, and no other task or process."""
    complete = _complete(_reached(using, UNFINISHED_PARTS, ids), ids)
    # The cancel of a task that gathers cancels its children anyway.
    return Related(sorted(complete.difference(unfinished_gathers(using, [*ids, *complete]))))


def pass_cause_on(using: str, retried: Sequence[int]) -> None:
    """Note why tasks stay cancelled although what they were cancelled because of is retried."""
    run(using, PASS_CAUSE_ON, array_of_numbers(retried), DEPENDENCY_TEXT)


def _reached(using: str, statement: str, ids: Sequence[int]) -> dict[int, set[int]]:
    """Return what a statement finds for these tasks, and for what it has found: one statement for each level."""
    found: dict[int, set[int]] = {}
    level = set(ids)
    while level:
        rows = run(using, statement, array_of_numbers(level))
        level = {id_ for id_, _needs in rows}.difference(found, ids)
        found.update((id_, {*needs}) for id_, needs in rows if id_ in level)
    return found


def _complete(found: Mapping[int, set[int]], ids: Sequence[int]) -> set[int]:
    """Return the tasks that need nothing but each other and the tasks with these ids."""
    there = {*found, *ids}
    while lacking := {id_ for id_ in there.intersection(found) if not found[id_] <= there}:
        there -= lacking
    return there.difference(ids)


def _stays(count: int, causes: Sequence[int]) -> str:
    if not count:
        return ""
    text = ngettext(
        "%(count)d task stays cancelled, because it was to run after other tasks that did not succeed: %(tasks)s. "
        "Retry these as well.",
        "%(count)d tasks stay cancelled, because they were to run after other tasks that did not succeed: %(tasks)s. "
        "Retry these as well.",
        count,
    )
    some = ", ".join(f"#{each}" for each in causes[:MOST_NAMED])
    return text % {"count": count, "tasks": some + (" …" if len(causes) > MOST_NAMED else "")}
