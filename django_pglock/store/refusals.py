"""Tasks that something in the database keeps from being deleted, such as a trigger of the project.

One of them makes the deletion of all tasks of its statement fail. So the statement is repeated for each half of these
tasks, until the ones that are refused are alone. They stay, and all others are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, IntegrityError
from psycopg.errors import RaiseException, TriggeredDataChangeViolation

from django_pglock.postgres.connections import connection_for, in_transaction

logger = logging.getLogger("django_pglock.worker")

#: A trigger has raised an error, or has changed the row that is being deleted.
FROM_TRIGGERS = {RaiseException.sqlstate, TriggeredDataChangeViolation.sqlstate}
#: So many refused tasks are looked for among the tasks of one statement. After that, the parts that fail stay.
MOST = 10


class Refusals:
    """What was refused in one call of a verb. Log it at the end of the call."""

    def __init__(self) -> None:
        #: A task that was refused, and the reason.
        self.example: tuple[int, str] | None = None

    def delete(self, verb: Callable[[Any, int | None], int], tasks: Any, limit: int | None = None) -> int:
        """Delete the first of these tasks by ``verb``, ``limit`` at most (None: all), but not those that are refused.

        Returns how many. In a transaction of the caller the first refusal raises, as PostgreSQL ends the transaction.
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
                self.example = ids[0], str(error).strip()
            return 0

    def log(self) -> None:
        """Warn if something was refused."""
        if self.example is not None:
            logger.warning(
                "Some finished tasks are not deleted: the database refuses it, as for task %d: %s", *self.example
            )


def _is_refusal(error: DatabaseError) -> bool:
    return isinstance(error, IntegrityError) or getattr(error.__cause__, "sqlstate", None) in FROM_TRIGGERS
