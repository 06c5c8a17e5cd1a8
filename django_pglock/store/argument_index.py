"""The index on arguments and metadata, for projects that ask for it: ``manage.py locktasks index --arguments``.

No migration creates it, because each change of a task adds index entries for each argument. With the index, the filters
of the admin find tasks of any age. Without it, they search only the newest tasks.
"""

from __future__ import annotations

import time
from typing import Any

from django_pglock.store.statements import run, run_together

#: Seconds for which a process caches whether the index exists.
CACHED_FOR = 10.0
#: The largest number of tasks that are found by the index. If more tasks have a value, only the newest are searched.
MOST_FOUND = 10_000

# Whether the index is valid: an interrupted build leaves an invalid one.
ARGUMENT_INDEX = """
SELECT index.indisvalid FROM pg_index AS index JOIN pg_class AS class ON class.oid = index.indexrelid
WHERE index.indrelid = '{task}'::regclass AND class.relname = 'pglock_task_arguments'
"""
CREATE_ARGUMENT_INDEX = """
CREATE INDEX CONCURRENTLY pglock_task_arguments ON {task}
USING gin (args jsonb_path_ops, kwargs jsonb_path_ops, meta jsonb_path_ops)
"""
DROP_ARGUMENT_INDEX = "DROP INDEX CONCURRENTLY pglock_task_arguments"

# Until the end of the transaction. The planner does not know how many tasks have a value. Without these settings it
# would rather read the whole table than the index.
_ONLY_BITMAPS = "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_indexscan', 'off', true)"

# The cache: for each database, the time of the last query, and whether the index existed.
_known: dict[str, tuple[float, bool]] = {}


def has_argument_index(using: str) -> bool:
    """Return whether a valid index exists, as of a query a few seconds ago at most."""
    looked_at, is_there = _known.get(using, (0.0, False))
    if not looked_at or time.monotonic() - looked_at > CACHED_FOR:
        is_there = run(using, ARGUMENT_INDEX) == [(True,)]
        _known[using] = time.monotonic(), is_there
    return is_there


def create_argument_index(using: str) -> bool:
    """Create the index without blocking writes. Return whether it did not exist. Call it outside of a transaction.

    An invalid index of an interrupted build is dropped first.
    """
    found = run(using, ARGUMENT_INDEX)
    if found == [(True,)]:
        return False
    if found:
        run(using, DROP_ARGUMENT_INDEX)
    run(using, CREATE_ARGUMENT_INDEX)
    _known.clear()
    return True


def drop_argument_index(using: str) -> bool:
    """Drop the index. Return whether it existed. Call it outside of a transaction."""
    is_there = bool(run(using, ARGUMENT_INDEX))
    if is_there:
        run(using, DROP_ARGUMENT_INDEX)
        _known.clear()
    return is_there


def ids_by_arguments(tasks: Any) -> list[int] | None:
    """Return the ids of these tasks, the newest first. The queryset is filtered by arguments or metadata.

    Returns None if there is no index, or if more than ``MOST_FOUND`` tasks match. Sends one message.
    """
    if not has_argument_index(tasks.db):
        return None
    found, values = tasks.order_by().values_list("pk")[: MOST_FOUND + 1].query.get_compiler(tasks.db).as_sql()
    rows = run_together(tasks.db, (_ONLY_BITMAPS, ()), (found.replace("{", "{{").replace("}", "}}"), values))
    return sorted((id_ for (id_,) in rows), reverse=True) if len(rows) <= MOST_FOUND else None
