"""The partitions of the archive, one a day: created when they are needed, dropped when they are old enough.

No other session waits for these changes. A new partition is created as a table and then attached, because that takes a
weaker lock on the parent table than CREATE TABLE … PARTITION OF. An old one is detached concurrently, in a separate
session with a short ``lock_timeout``, and only while no other session uses the archive. A change that fails is tried
again later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any, NamedTuple

from django.db import DatabaseError, connections, transaction
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL
from psycopg import sql

from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.store.archive_state import ArchiveState, archive_state, bounds_of, day_of, table_of
from django_pglock.store.prune import DAY, ages_of
from django_pglock.store.statements import filled, rows_of, run
from django_pglock.tasks.states import TaskStatus

#: The limits of a session that drops partitions.
LIMITS = {"lock_timeout": "1s", "statement_timeout": "20s", "idle_in_transaction_session_timeout": "20s"}
#: SQLSTATEs that say that another session has just created the same table.
ALREADY_EXISTS = ("42P07", "23505", "42710")
#: SQLSTATEs after which a partition is dropped later: a lock timeout, a running transaction, or another worker that
#: drops the same partition.
RETRY_LATER = ("55P03", "57014", "55000", "42P01", "40P01")
#: The number of pages of a partition without statistics that are read to count its rows.
PAGES_COUNTED = 1000
#: The comment on a partition that a worker drops. It marks the partition, because a person may detach one to keep it.
EXPIRED = "django_pglock: dropped because it is older than PRUNE_AFTER allows"

# The partitions, and tables that were partitions: the schema, whether each is attached, whether it is being detached,
# and whether a worker has marked it as expired. Also the date, in UTC, of a number of seconds ago.
PARTITIONS_AND_DETACHED = """
SELECT part.relname::text, nspname::text, inhparent IS NOT NULL, COALESCE(inhdetachpending, false),
       COALESCE(obj_description(part.oid, 'pg_class') = %s, false),
       ((clock_timestamp() - make_interval(secs => %s)) AT TIME ZONE 'UTC')::date
FROM pg_class AS archive
JOIN pg_class AS part ON part.relnamespace = archive.relnamespace
JOIN pg_namespace ON pg_namespace.oid = archive.relnamespace
LEFT JOIN pg_inherits ON inhrelid = part.oid AND inhparent = archive.oid
WHERE archive.oid = to_regclass('{archived_task}') AND part.relkind = 'r'
  AND part.relname BETWEEN archive.relname || '_0' AND archive.relname || '_9999'
ORDER BY part.relname
"""

# The partitions, the oldest first: the table, its rows by the last statistics, its pages, and its bytes with indexes
# and TOAST. The rows are NULL before the first ANALYZE, and 0 if rows have come since an ANALYZE of the empty table.
SIZES_OF_DAYS = """
SELECT part.relname::text, CASE WHEN part.reltuples >= 0 THEN part.reltuples::bigint END,
       pg_relation_size(part.oid) / current_setting('block_size')::int, pg_total_relation_size(part.oid)
FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
WHERE inhparent = to_regclass('{archived_task}') AND NOT inhdetachpending
ORDER BY part.relname
"""

# Whether another session has a lock on the archive. Our session is outside of a transaction, so it has none.
ARCHIVE_IS_USED = """
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'relation'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND relation = to_regclass('{archived_task}'))
"""

CREATE = sql.SQL("CREATE TABLE {part} (LIKE {archive} INCLUDING DEFAULTS)")
ATTACH = sql.SQL("ALTER TABLE {archive} ATTACH PARTITION {part} FOR VALUES FROM ({start}) TO ({end})")
MARK = sql.SQL("COMMENT ON TABLE {part} IS {expired}")
DETACH = sql.SQL("ALTER TABLE {archive} DETACH PARTITION {part} CONCURRENTLY")
FINISH_DETACH = sql.SQL("ALTER TABLE {archive} DETACH PARTITION {part} FINALIZE")
DROP = sql.SQL("DROP TABLE {part}")


def create_days(using: str, days: Collection[date]) -> ArchiveState:
    """Create the partitions of these days that are missing; return the state after that.

    A day may still have no partition: a person may have detached the partition and kept its table.
    """
    state = archive_state(using)
    missing = set(days) - set(state.days)
    for day in sorted(missing):
        _create(using, state.schema, day)
    return archive_state(using) if missing else state


def drop_days(using: str, older_than: float) -> list[date]:
    """Drop the partitions of the days that ended more than ``older_than`` days ago; return these days.

    Also finishes a drop that was interrupted. Partitions that another session uses at the moment may stay.
    """
    if not expired_days(using, older_than):
        return []
    with _session(using) as cursor:
        cursor.execute(filled(PARTITIONS_AND_DETACHED), (EXPIRED, older_than * DAY))
        return [each.day for each in _expired(cursor.fetchall()) if _drop(cursor, each)]


def prune_archive(
    using: str, *, older_than: float | None = None, statuses: Collection[str] = (), dry_run: bool = False
) -> int:
    """Drop the days whose tasks ``prune`` with these arguments would delete. Returns how many days.

    ``prune`` itself leaves the archive, because its tasks may be selected by filters, and a day is dropped as a whole.
    ``dry_run``: drop nothing, only count. Call it outside of a transaction. Raises ``ValueError``.
    """
    # The archive has only tasks that have succeeded.
    days = ages_of(older_than, statuses).get(TaskStatus.SUCCESSFUL)
    if days is None or not archive_state(using).days:
        return 0
    return len(expired_days(using, days) if dry_run else drop_days(using, days))


def expired_days(using: str, older_than: float) -> list[date]:
    """Return the days that ``drop_days`` would drop."""
    return [each.day for each in _expired(run(using, PARTITIONS_AND_DETACHED, EXPIRED, older_than * DAY))]


class DaySize(NamedTuple):
    """A day of the archive: about how many rows it has, and its bytes."""

    day: date
    rows: int
    size: int


def sizes_of_days(using: str) -> list[DaySize]:
    """Return the days of the archive, the oldest first. The rows of a day without statistics are counted."""
    found = ((day_of(name), *sizes) for name, *sizes in run(using, SIZES_OF_DAYS))
    return [
        DaySize(day, rows or _counted(using, day, pages), size) for day, rows, pages, size in found if day is not None
    ]


def _counted(using: str, day: date, pages: int) -> int:
    """Count the rows of a day in its first pages; estimate the others by them.

    ANALYZE has not seen these rows yet. Autovacuum never analyzes a table that gets fewer than 50 rows.
    """
    start, end = bounds_of(day)
    is_read = RawSQL("ctid < %s::tid", (f"({PAGES_COUNTED},0)",), output_field=BooleanField())
    rows: int = rows_of("ArchivedTask", using).filter(is_read, finished_at__gte=start, finished_at__lt=end).count()
    return round(rows * max(1.0, pages / PAGES_COUNTED))


class _Part(NamedTuple):
    day: date
    schema: str
    is_attached: bool
    is_leaving: bool


def _expired(rows: Iterable[tuple[Any, ...]]) -> list[_Part]:
    """Return the partitions that are old enough, and those that a worker has begun to drop."""
    found = []
    for name, schema, is_attached, is_leaving, is_marked, before in rows:
        day, is_whole = day_of(name), is_attached and not is_leaving
        if day is not None and (day < before if is_whole else is_marked):
            found.append(_Part(day, schema, is_attached, is_leaving))
    return found


def _create(using: str, schema: str, day: date) -> None:
    start, end = bounds_of(day)
    names = {**_names(schema, day), "start": sql.Literal(start.isoformat()), "end": sql.Literal(end.isoformat())}
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [LIMITS["lock_timeout"]])
            cursor.execute(_text(CREATE, **names))
            cursor.execute(_text(ATTACH, **names))
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) not in ALREADY_EXISTS:
            raise


def _drop(cursor: Any, part: _Part) -> bool:
    """Drop one partition; return whether it is gone. Each statement is a transaction of its own."""
    names = _names(part.schema, part.day)
    if part.is_attached:
        cursor.execute(filled(ARCHIVE_IS_USED))
        if cursor.fetchone() == (True,):
            return False
    try:
        if part.is_leaving:
            cursor.execute(_text(FINISH_DETACH, **names))
        elif part.is_attached:
            cursor.execute(_text(MARK, **names, expired=sql.Literal(EXPIRED)))
            cursor.execute(_text(DETACH, **names))
        cursor.execute(_text(DROP, **names))
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) in RETRY_LATER:
            return False
        raise
    return True


def _text(statement: sql.SQL, **names: sql.Composable) -> str:
    # As text, because the project's wrappers around execute() expect text.
    return statement.format(**names).as_string(None)


def _names(schema: str, day: date) -> dict[str, sql.Composable]:
    return {"archive": sql.SQL(filled("{archived_task}")), "part": sql.Identifier(schema, table_of(day))}


@contextmanager
def _session(using: str) -> Iterator[Any]:
    """Yield a cursor of a session in autocommit, whose statements have short time limits."""
    connection = dedicated_connection(using, application_name="django_pglock archive")
    try:
        set_limits(connection, LIMITS)
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()
