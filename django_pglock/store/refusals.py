"""Deletes tasks of which the database may refuse some, for example by a trigger of the project.

One refused task makes the whole statement fail. So the statement is repeated for each half of the tasks, until each
refused task is alone in its statement. The refused tasks stay, and all others are deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, IntegrityError
from psycopg.errors import RaiseException, TriggeredDataChangeViolation

from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, in_transaction

logger = get_logger(WORKER)

#: SQLSTATEs of triggers: a trigger has raised an error, or has changed the row that is being deleted.
FROM_TRIGGERS = {RaiseException.sqlstate, TriggeredDataChangeViolation.sqlstate}
#: The largest number of refused tasks that are searched among the tasks of one statement. After that, all tasks of a
#: statement that fails stay.
MOST = 10


class Refusals:
    """The refused tasks of one call. Log them at the end of the call."""

    def __init__(self) -> None:
        #: The id of a refused task, and the reason.
        self.example: tuple[int, str] | None = None

    def delete(self, verb: Callable[[Any, int | None], int], tasks: Any, limit: int | None = None) -> int:
        """Delete up to ``limit`` of these tasks (None: all) by ``verb``, without the refused ones. Returns how many.

        Inside a transaction of the caller the first refusal raises, because PostgreSQL then aborts the transaction.
        """
        return self._delete(verb, tasks, limit, [])

    def _delete(self, verb: Callable[[Any, int | None], int], tasks: Any, limit: int | None, refused: list[int]) -> int:
        try:
            return verb(tasks, limit)
        except DatabaseError as error:
            connection = connection_for(tasks.db)
            if not _is_refusal(error) or connection.in_atomic_block or in_transaction(connection):
                raise
            # Others may have deleted or locked some of them meanwhile.
            ids = list(tasks.values_list("pk", flat=True)[:limit])
            if len(ids) > 1 and len(refused) < MOST:
                middle = len(ids) // 2
                halves = (ids[:middle], ids[middle:])
                return sum(self._delete(verb, tasks.filter(pk__in=half), None, refused) for half in halves)
            refused += ids
            if ids and self.example is None:
                self.example = ids[0], one_line(error)
            return 0

    def log(self) -> None:
        """Log a warning if tasks were refused."""
        if self.example is not None:
            logger.warning(
                "Some finished tasks are not deleted: the database refuses it, as for task %d: %s", *self.example
            )


def _is_refusal(error: DatabaseError) -> bool:
    return isinstance(error, IntegrityError) or getattr(error.__cause__, "sqlstate", None) in FROM_TRIGGERS
