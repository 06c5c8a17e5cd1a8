"""The state of the archive in the database: whether finished tasks are moved there, and which days it has.

The switch is in the comment of the archive's table, so that all processes see it without a restart, and only the owner
of the table can change it. A process caches the state for some seconds. So a project without an archive only has the
cost of one catalog query in these seconds, and only when it looks up a task that does not exist.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple

from django.db import connections, transaction
from django.db.models import BooleanField, Func, Value
from django.utils.translation import gettext as _
from psycopg import sql

from django_pglock.errors import ConfigurationError
from django_pglock.store.statements import filled, run

#: Seconds for which a process caches the state.
CACHED_FOR = 10.0
#: Seconds from ``on`` to the first move. After that time no process has a cached state in which the archive is off.
UNTIL_FIRST_MOVE = 3 * CACHED_FOR

# The seconds since the archive was turned on, NULL if it is off; the schema; whether this role may read the archive;
# and the names of its partitions. No row if the table does not exist.
ARCHIVE_STATE = """
SELECT date_part('epoch', clock_timestamp())
           - substring(obj_description(archive.oid, 'pg_class') FROM 'archive on since ([0-9]+)')::float8,
       (SELECT nspname::text FROM pg_namespace WHERE oid = archive.relnamespace),
       has_table_privilege(archive.oid, 'SELECT'),
       ARRAY(SELECT part.relname::text FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
             WHERE inhparent = archive.oid AND NOT inhdetachpending)
FROM pg_class AS archive WHERE archive.oid = to_regclass('{archived_task}')
"""

ARCHIVE_RIGHTS = """
SELECT current_user::text, pg_get_userbyid(relowner)::text, pg_has_role(relowner, 'USAGE'),
       has_schema_privilege(relnamespace, 'CREATE')
FROM pg_class WHERE oid = to_regclass('{archived_task}')
"""

# Whether the archive has a partition. Each role may query this, also a role that may not read the table. It is a part
# of other statements, and its expression is the name of the table.
HAS_DAYS = "EXISTS (SELECT FROM pg_inherits WHERE inhparent = to_regclass(%(expressions)s))"

# The tables of the project that have a foreign key to the table of tasks.
REFERENCES_TO_TASKS = """
SELECT DISTINCT conrelid::regclass::text FROM pg_constraint
WHERE contype = 'f' AND confrelid = to_regclass('{task}')
  AND conrelid NOT IN (to_regclass('{attempt}'), to_regclass('{waiter}'))
ORDER BY 1
"""


@dataclass(frozen=True)
class ArchiveState:
    """The state of the archive at one moment."""

    #: Whether the database has the table.
    exists: bool = False
    #: Seconds since the archive was turned on; None: it is off.
    on_for: float | None = None
    schema: str = ""
    #: Whether this role may read the table.
    is_readable: bool = False
    #: The days that have a partition, the oldest first.
    days: tuple[date, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether finished tasks are moved to the archive."""
        return self.on_for is not None

    @property
    def may_have_rows(self) -> bool:
        """Whether a task that is missing in the table of tasks may be in the archive, and this role may read that."""
        return self.is_readable and (self.is_on or bool(self.days))


# The cache: for each database, the time of the last query and its answer.
_known: dict[str, tuple[float, ArchiveState]] = {}


def archive_state(using: str) -> ArchiveState:
    """Return the state as it is now. One statement."""
    state = ArchiveState()
    for on_for, schema, is_readable, parts in run(using, ARCHIVE_STATE):
        days = sorted(day for day in map(day_of, parts) if day is not None)
        state = ArchiveState(True, on_for, schema, is_readable, tuple(days))
    _known[using] = time.monotonic(), state
    return state


def existing_archive(using: str) -> ArchiveState:
    """Return the state as it is now. Raises ``ConfigurationError`` if the table is missing."""
    state = archive_state(using)
    if not state.exists:
        raise ConfigurationError(_("There is no table for the archive. Run: manage.py migrate django_pglock"))
    return state


def may_be_archived(using: str) -> bool:
    """Return whether a task that is not in the table of tasks may be in the archive, by the cached state."""
    looked_at, state = _known.get(using, (0.0, None))
    if state is None or time.monotonic() - looked_at > CACHED_FOR:
        state = archive_state(using)
    return state.may_have_rows


def has_days() -> Func:
    """Return an expression for a query of a caller: whether the archive has a day."""
    return Func(Value(filled("{archived_task}")), template=HAS_DAYS, output_field=BooleanField())


def references_to_tasks(using: str) -> list[str]:
    """Return the tables of the project with a foreign key to tasks.

    A move deletes the task from the table of tasks. The foreign key would refuse this, or would delete the row as well.
    """
    return [table for (table,) in run(using, REFERENCES_TO_TASKS)]


class Rights(NamedTuple):
    """The rights of this role. To move tasks, it must own the archive and may create tables in the schema."""

    role: str
    owner: str
    is_owner: bool
    may_create: bool


def rights_in_archive(using: str) -> Rights:
    """Return the rights of this role. The table has to exist."""
    [row] = run(using, ARCHIVE_RIGHTS)
    return Rights(*row)


def turn_on(using: str) -> bool:
    """Let workers move successful tasks to the archive. Returns False if they do so already.

    Raises ``ConfigurationError`` if workers could not move tasks, or if rows of the project would be lost. Its message
    is translated, because ``locktasks archive on`` prints it.
    """
    state = existing_archive(using)
    if state.is_on:
        return False
    _check(using, state)
    [(now,)] = run(using, "SELECT floor(date_part('epoch', clock_timestamp()))::bigint")
    at = datetime.fromtimestamp(now, timezone.utc)
    _write_comment(using, sql.Literal(f"archive on since {now} ({at:%Y-%m-%d %H:%M:%S} UTC)"))
    return True


def turn_off(using: str) -> bool:
    """Stop workers from moving tasks. Returns False if they do not. Only the owner of the table may do this.

    Archived tasks stay until their day is old enough to be dropped. Raises ``ConfigurationError`` if there is no table.
    """
    if not existing_archive(using).is_on:
        return False
    _write_comment(using, sql.SQL("NULL"))
    return True


def _check(using: str, state: ArchiveState) -> None:
    """Raise ``ConfigurationError`` if workers could not move tasks, or if rows of the project would be lost."""
    if tables := references_to_tasks(using):
        raise ConfigurationError(
            _("Tasks cannot be moved, because %s has a foreign key to them. Store the id of the task instead.")
            % ", ".join(tables)
        )
    rights = rights_in_archive(using)
    if not rights.is_owner:
        raise ConfigurationError(
            _("The role %(role)s does not own the archive; %(owner)s does. docs/security.md has the rights of workers.")
            % {"role": rights.role, "owner": rights.owner}
        )
    if not rights.may_create:
        raise ConfigurationError(
            _("The role %(role)s may not create tables in the schema %(schema)s, and each day of the archive is one.")
            % {"role": rights.role, "schema": state.schema}
        )


def _write_comment(using: str, comment: sql.Composable) -> None:
    statement = sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.SQL(filled("{archived_task}")), comment)
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute(statement.as_string(None))
    _known.clear()


def table_of(day: date) -> str:
    """Return the name of the partition of a day."""
    return f"{_prefix()}{day:%Y%m%d}"


def day_of(table: str) -> date | None:
    """Return the day of a partition; None for a table that this package has not created."""
    try:
        found = datetime.strptime(table.removeprefix(_prefix()), "%Y%m%d").date()
    except ValueError:
        return None
    return found if table == table_of(found) else None


def bounds_of(day: date) -> tuple[datetime, datetime]:
    """Return the first moment of a day and of the next day, in UTC."""
    start = datetime(day.year, day.month, day.day, tzinfo=timezone.utc)
    return start, start + timedelta(days=1)


def _prefix() -> str:
    return f"{filled('{archived_task}')[1:-1]}_"
