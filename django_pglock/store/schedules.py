"""The rows of schedules: they follow the code of the living workers, and each of their ticks becomes one task.

A tick is one date at which a schedule is due. To take ticks, a worker moves ``next_at`` of their schedules to the
following ticks, guarded by the dates that it has read, in the transaction that enqueues the tasks. If several workers
try, one succeeds. The others find later dates, or locked rows.

Code and people write schedules. One of the code has the name of its function, and calls it without arguments. To the
times that people have written, a worker computes the next tick when it first reads them, and notes for which times it
has done so.

A row keeps the versions of its schedule that code has had, the newest first. Code with a version that the row never had
is newer, and changes the row at once. Code with an earlier version is older: an old process that starts once more
during a deploy. It changes the row only when no running worker has had the row's version for ``HEARTBEAT_LIMIT``
seconds: the deploy was rolled back. Meanwhile a worker of the later version may have been started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, transaction
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.errors import DuplicateTask, LockKeyError, TaskError, TaskOptionError
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import connection_for
from django_pglock.store.liveness import is_recent
from django_pglock.store.marking import first_free, mark
from django_pglock.store.statements import rows_of, run
from django_pglock.store.wake import wake_parents
from django_pglock.tasks import registry
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.call_keys import keys_of
from django_pglock.tasks.compat import InvalidTask
from django_pglock.tasks.schedules import Timing, check_timing, is_scheduled, timing_of

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")

#: The key in ``meta`` for the id of the task that the previous tick has enqueued.
PREVIOUS_RUN = "previous_run"
#: The key in ``meta`` for the name of a schedule of people. A schedule of the code has the name of the function.
SCHEDULE_NAME = "schedule_name"
#: The largest number of ticks in one transaction, and of versions in a row.
MOST_TICKS, MOST_VERSIONS = 200, 20
#: How many successful runs of a schedule are kept, and the least number of seconds for which each is kept.
KEPT_RUNS, LEAST_KEPT = 100, 3600
#: The key in ``meta`` of a run that expires only if it succeeds. ``SETTLE_OTHERS`` and ``RESCUE`` read it.
KEEPS_FAILURES = "keeps_failures"
#: Seconds for which one call enqueues ticks one by one. The same thread promotes due tasks and rescues those of dead
#: workers, so it continues with the next call.
TIME_FOR_TICKS = 0.2

# The server's clock, and the dates of the schedules in UTC without a zone. Django returns such dates unchanged, with
# and without USE_TZ. Schedules of functions that this process does not know are not read.
SCHEDULES = """
SELECT name, task_path, expression, timezone, versions, is_enabled,
       next_at AT TIME ZONE 'UTC', clock_timestamp() AT TIME ZONE 'UTC'
FROM {schedule} WHERE task_path = ANY (%s::text[]) ORDER BY next_at, name
"""

# The versions that the code of a running worker has. A worker that stops ends its tasks, but its code leaves.
LIVING_VERSIONS = f"""
SELECT given FROM unnest(%s::text[]) AS given WHERE EXISTS (
    SELECT FROM {{worker}} AS worker
    WHERE worker.task_paths @> to_jsonb(given) AND NOT worker.is_stopping AND {is_recent("worker.heartbeat_at")})
"""

# If a worker freezes while it takes ticks, another worker must get them. And a worker must not wait forever for another
# open transaction. The limits are valid for this transaction only, so they work behind a pooler, too.
LIMIT_TICK = """
SELECT set_config('idle_in_transaction_session_timeout', '10s', true), set_config('lock_timeout', '1s', true)
"""

# Moves the schedules whose rows are free, and have not changed since they were read, to their following ticks. The
# arguments are read here, so that a tick never has those from before an edit.
TAKE_TICKS = """
WITH due AS MATERIALIZED (
    SELECT schedule.name, given.following
    FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::timestamptz[]) AS given (name, path, tick, following)
    JOIN {schedule} AS schedule ON schedule.name = given.name AND schedule.task_path = given.path
    WHERE schedule.is_enabled AND schedule.next_at = given.tick
    FOR UPDATE OF schedule SKIP LOCKED
)
UPDATE {schedule} AS schedule SET next_at = due.following FROM due WHERE schedule.name = due.name
RETURNING schedule.name, schedule.last_task, schedule.args, schedule.kwargs
"""

# Notes the tasks of ticks in their schedules.
NOTE_TASKS = """
UPDATE {schedule} AS schedule SET last_at = given.tick, last_task = given.task
FROM unnest(%s::text[], %s::timestamptz[], %s::bigint[]) AS given (name, tick, task) WHERE schedule.name = given.name
"""

# The runs of a schedule are a linked list, because an index of the tasks of a function would have to be updated by each
# enqueue of any task. Each tick writes the id of the previous tick's task into the ``meta`` of its own task. So each
# run costs one probe of the primary key. The list ends at a task that was deleted.
#
# A program may have written any value into ``meta``. A value that is not an id ends the list. So does an id that is not
# smaller than the one before, so that the list cannot be a circle. LATERAL with LIMIT, because otherwise the planner
# may read the whole table for the join.
SCHEDULE_RUNS = f"""
WITH RECURSIVE run AS (
    SELECT id, meta ->> '{PREVIOUS_RUN}' AS previous, 1 AS place FROM {{task}} WHERE id = %s AND task_path = %s
    UNION ALL
    SELECT task.id, task.previous, run.place + 1
    FROM run CROSS JOIN LATERAL (
        SELECT id, meta ->> '{PREVIOUS_RUN}' AS previous FROM {{task}}
        WHERE id = CASE WHEN run.previous ~ '^[0-9]{{{{1,18}}}}$' THEN run.previous::bigint END AND id < run.id
          AND task_path || '' = %s
        LIMIT 1
    ) AS task
    WHERE run.place < %s
)
SELECT id FROM run
"""


class Row(NamedTuple):
    """A schedule, and the time at which it was read. Dates are in UTC."""

    name: str
    task_path: str
    timing: Timing
    #: The versions that code has had, the newest first; of a schedule of people, the one that ``next_at`` belongs to.
    versions: tuple[str, ...]
    is_enabled: bool
    next_at: datetime
    now: datetime

    @property
    def is_of_code(self) -> bool:
        """Whether the schedule stands in the code."""
        return self.name == self.task_path

    @property
    def is_edited(self) -> bool:
        """Whether people have written these times, and no worker has computed the next tick yet."""
        return not self.is_of_code and self.versions[:1] != (self.timing.text,)


class Tick(NamedTuple):
    """A date at which a schedule is due, and the first tick after now. All ticks that were missed are run once."""

    schedule: Row
    at: datetime
    following: datetime


class Taken(NamedTuple):
    """A tick that this worker has taken: the id of the previous task, and the arguments as JSON texts."""

    tick: Tick
    previous: int | None
    args: str
    kwargs: str


#: A function and the arguments with which its tick calls it.
TaskCall = tuple["TaskFields", tuple[Any, ...], dict[str, Any]]


class Ticks(NamedTuple):
    """The result of one check of the schedules: the ids of the new tasks, and the seconds until the next tick."""

    tasks: list[int]
    next_in: float | None


class ScheduleKeeper:
    """Keeps the schedules of the functions that this process knows: compares them with the code, and enqueues ticks."""

    def __init__(self, using: str) -> None:
        self.using = using
        # The schedules whose ticks are enqueued one by one, because something failed. The last ones have waited least.
        self._alone: dict[str, None] = {}
        # Since when no running worker has the version of a row, by its schedule and version.
        self._gone_since: dict[tuple[str, Timing], float] = {}
        # What was logged, so that each line is logged once.
        self._logged: set[tuple[str, ...]] = set()

    def keep(self) -> Ticks:
        """Write what differs from the code, and enqueue the due ticks. Do not call this inside ``atomic()``."""
        tasks = known(self.using)
        rows = _read_rows(self.using, tasks)
        if self.register(tasks, rows):
            rows = _read_rows(self.using, tasks)
        return self.enqueue_due(tasks, rows)

    def register(self, tasks: dict[str, TaskFields], rows: Sequence[Row]) -> bool:
        """Write the schedules of the code that have no row, or an older version. Return whether there were any.

        Their ticks count from now: the first tick is the first one after it. Disabled schedules stay disabled.
        """
        wanted = {path: timing_of(task) for path, task in tasks.items() if is_scheduled(task)}
        names, found = {row.name for row in rows}, {row.name: row for row in rows if row.is_of_code}
        new = {path: timing for path, timing in wanted.items() if path not in names}
        for path in [path for path in wanted if path in names - found.keys()]:
            self._log_once("The schedule of %s has no row, because people have given its name to theirs.", path)
        if new:
            _insert(self.using, new)
        edited = [row for row in rows if row.is_edited and self._begin(row)]
        near = [row for row in rows if _bring_near(self.using, row)]
        others = [row for name, row in found.items() if name in wanted and row.timing != wanted[name]]
        living = _living_versions(self.using, others)
        changed = [row for row in others if not self._is_older(wanted[row.name], row, living)]
        for row in changed:
            if _change(self.using, row, timing := wanted[row.name]):
                logger.info("The schedule of %s was %r, and is %r now.", row.name, row.timing.text, timing.text)
        return bool(new or changed or near or edited)

    def _begin(self, row: Row) -> bool:
        """Compute the first tick of times that people have written. Return whether this worker did."""
        is_readable = self._following(row._replace(next_at=row.now)) is not None
        return is_readable and _change(self.using, row, row.timing)

    def _is_older(self, timing: Timing, row: Row, living: set[str]) -> bool:
        """Return whether the code of this process is older than the row, which the code of other workers has."""
        if timing.text not in row.versions:
            return False
        since = self._gone_since.pop((row.name, row.timing), time.monotonic())
        if row.name not in living:
            if time.monotonic() - since >= get_settings().HEARTBEAT_LIMIT:
                return False
            self._gone_since[row.name, row.timing] = since
            return True
        self._log_once(
            "The schedule of %s is %r in the code of this worker, and %r in newer code that other workers run. The "
            "newer one applies. Stop the workers of the older version.",
            *(row.name, timing.text, row.timing.text),
        )
        return True

    def enqueue_due(self, tasks: dict[str, TaskFields], rows: Sequence[Row]) -> Ticks:
        """Enqueue one task for each of these schedules that is due, however many ticks were missed.

        Call it again at once if ``next_in`` is 0: more ticks are due than one call enqueues. If a task is refused, for
        example by ``unique=`` with ``"raise"``, its tick is skipped and logged. A tick that failed because of the
        database is still due at the next call.
        """
        began, following = time.monotonic(), {}
        for row in rows:
            has_ticks = is_scheduled(tasks[row.task_path]) if row.is_of_code else not row.is_edited
            if row.is_enabled and has_ticks and (date := self._following(row)) is not None:
                following[row] = date
        due = [Tick(row, row.next_at, date) for row, date in following.items() if _is_due(row)]
        enqueued, are_left = self._enqueue(tasks, due)
        if are_left:
            return Ticks(enqueued, 0.0)
        # The following tick, also if this tick failed or if another worker is taking it. A new check at once would be a
        # busy loop.
        waits = [(date - row.now).total_seconds() for row, date in following.items()]
        return Ticks(enqueued, min(waits) - (time.monotonic() - began) if waits else None)

    def _following(self, row: Row) -> datetime | None:
        try:
            return _following(row)
        except Exception as error:  # noqa: BLE001 - another version of the code, with another cronsim, may have written it
            text = "The schedule of %s, %r in %r, cannot be read by this worker and is not changed: %s"
            self._log_once(text, row.name, *row.timing, str(error))
            return None

    def _log_once(self, text: str, *values: str) -> None:
        if (text, *values) not in self._logged:
            self._logged.add((text, *values))
            logger.warning(text, *values)

    def _enqueue(self, tasks: dict[str, TaskFields], due: list[Tick]) -> tuple[list[int], bool]:
        """Enqueue ticks, most of them together. Return the ids of the tasks, and whether ticks are left.

        If ticks fail together, it is not known which one failed, so each is tried alone. One that has failed remains
        alone, behind those that have waited longer.
        """
        together = [each for each in due if each.schedule.name not in self._alone]
        enqueued = self._enqueue_or_log(tasks, together[:MOST_TICKS])
        alone = {each.schedule.name: each for each in due}
        until = time.monotonic() + TIME_FOR_TICKS
        for number, name in enumerate([name for name in self._alone if name in alone]):
            if number and time.monotonic() > until:
                return enqueued, True
            del self._alone[name]
            enqueued += self._enqueue_or_log(tasks, [alone[name]], is_alone=True)
        return enqueued, len(together) > MOST_TICKS

    def _enqueue_or_log(self, tasks: dict[str, TaskFields], ticks: list[Tick], *, is_alone: bool = False) -> list[int]:
        """Enqueue ticks in one transaction. If it fails, each is tried alone later, and then a failure is logged."""
        if not ticks:
            return []
        session, tick = connection_for(self.using).connection, ticks[0]
        try:
            with transaction.atomic(using=self.using, durable=True):
                return _enqueue_ticks(self.using, tasks, ticks)
        except Exception as error:
            self._alone |= dict.fromkeys(each.schedule.name for each in ticks)
            if connection_for(self.using).connection is not session:
                raise
            if is_alone and isinstance(error, (OperationalError, InterfaceError)):
                text = "The tick of %s at %s was not enqueued. The worker tries again: %s"
                logger.warning(text, tick.schedule.name, tick.at, one_line(error))
            elif is_alone:
                with transaction.atomic(using=self.using, durable=True):
                    _take(self.using, [tick])
                text = "The tick of %s at %s cannot be enqueued. It is skipped."
                logger.exception(text, tick.schedule.name, tick.at)
            return []


def known(using: str) -> dict[str, TaskFields]:
    """Return the functions of the project that this process knows and whose tasks are in this database, by path."""
    aliases = {backend.alias for backend in our_backends(using)}
    return {each.module_path: each for each in registry.definitions() if each.backend in aliases and not each.is_own}


def problems_of(schedule: Any, using: str) -> dict[str, str]:
    """Return what is wrong with a schedule that people write into this database, by the names of its fields."""
    tasks = known(using)
    checks: dict[str, Callable[[], None]] = {
        "name": lambda: _check_name(schedule, tasks),
        "task_path": lambda: _check_function(schedule, tasks),
        "expression": lambda: check_timing(Timing(schedule.expression, schedule.timezone), "expression"),
        "args": lambda: _check_arguments(schedule, tasks),
    }
    return {field: problem for field, check in checks.items() if (problem := _problem(check))}


def _problem(check: Callable[[], None]) -> str:
    try:
        check()
    except (TaskError, LockKeyError, InvalidTask, ImproperlyConfigured, ValueError, RecursionError) as error:
        return str(error)
    return ""


def _check_name(schedule: Any, tasks: dict[str, TaskFields]) -> None:
    if schedule.name == schedule.task_path or schedule.name in tasks:
        raise ValueError(
            _("A schedule with the name of a task function stands in the code. Change it there, or give another name.")
        )


def _check_function(schedule: Any, tasks: dict[str, TaskFields]) -> None:
    if schedule.task_path not in tasks:
        raise ValueError(
            _("This process knows no task function %(path)r. Is its module imported, as tasks.py of each app is?")
            % {"path": schedule.task_path}
        )


def _check_arguments(schedule: Any, tasks: dict[str, TaskFields]) -> None:
    if not isinstance(schedule.args, list) or not isinstance(schedule.kwargs, dict):
        raise ValueError(_("Positional arguments are a list, and keyword arguments a dict."))  # noqa: TRY004 - of a form
    if (task := tasks.get(schedule.task_path)) is not None:
        backend: Any = task.get_backend()
        backend.check_call(task, schedule.args, schedule.kwargs)


def enable(schedules: Any) -> int:
    """Enable those of these schedules that are disabled. Returns how many. Ticks that have passed are not run."""
    disabled = dict(schedules.filter(is_enabled=False).values_list("pk", "task_path"))
    rows = [row for row in _read_rows(schedules.db, disabled.values()) if row.name in disabled]
    # The next tick may come before the parents of idle workers look again.
    wake_parents(schedules.db)
    return sum(
        schedules.filter(pk=row.name, is_enabled=False, next_at=row.next_at).update(
            is_enabled=True, next_at=_following(row)
        )
        for row in rows
    )


def disable(schedules: Any) -> int:
    """Disable those of these schedules that are enabled. Returns how many. They enqueue no tasks until ``enable``."""
    return int(schedules.filter(is_enabled=True).update(is_enabled=False))


def run_now(schedules: Any) -> list[int]:
    """Enqueue each function of these schedules that this process knows once, whatever its dates are.

    The schedules are not changed. Returns the ids of the tasks. A task that ``unique=`` has refused is missing.
    """
    tasks = known(schedules.db)
    chosen = schedules.filter(task_path__in=tasks).order_by("pk").values_list("task_path", "args", "kwargs")
    enqueued = [_enqueue_scheduled(tasks[path], args, kwargs) for path, args, kwargs in chosen]
    return [id_ for id_ in enqueued if id_ is not None]


def last_runs(using: str, task_path: str, last_task: int | None, *, limit: int = 20) -> list[Any]:
    """Return up to ``limit`` tasks that the ticks of a schedule have enqueued, the newest first, without arguments.

    ``last_task`` is from the schedule's row. Tasks of ``run_now`` are not in the list. Sends two statements, which read
    by the primary key.
    """
    if last_task is None:
        return []
    ids = [id_ for (id_,) in run(using, SCHEDULE_RUNS, last_task, task_path, task_path, limit)]
    found = rows_of("Task", using).filter(pk__in=ids).defer("args", "kwargs", "result", "stack")
    return sorted(found, key=attrgetter("pk"), reverse=True)


def with_last_status(schedules: Any) -> Any:
    """Add ``last_status`` to rows of schedules. It is None before the first tick, and if the task has been deleted."""
    last = rows_of("Task", schedules.db).filter(pk=OuterRef("last_task")).order_by().values("status")
    return schedules.annotate(last_status=Subquery(last))


# Rows and code


def _read_rows(using: str, paths: Iterable[str]) -> list[Row]:
    """Return the schedules of these functions, the longest due first."""
    if not (wanted := list(paths)):
        return []
    return [
        Row(name, path, Timing(expression, zone), (*json.loads(versions),), is_enabled, _utc(next_at), _utc(now))
        for name, path, expression, zone, versions, is_enabled, next_at, now in run(using, SCHEDULES, wanted)
    ]


def _insert(using: str, timings: dict[str, Timing]) -> None:
    [(now,)] = run(using, "SELECT clock_timestamp() AT TIME ZONE 'UTC'")
    schedules = rows_of("Schedule", using)
    new = [
        schedules.model(name=path, task_path=path, **_columns(timing, [timing.text], _utc(now)))
        for path, timing in sorted(timings.items())
    ]
    # Another worker may write the same rows at this moment, in the same order.
    schedules.bulk_create(new, ignore_conflicts=True)


def _change(using: str, row: Row, timing: Timing) -> bool:
    """Write a version of the code, unless somebody has changed or locked the row since it was read."""
    versions = [timing.text, *(each for each in row.versions if each != timing.text)][:MOST_VERSIONS]
    # One transaction for each row, and no wait for its lock: a deadlock with ticks, or with a person who deletes
    # schedules, is impossible.
    same = rows_of("Schedule", using).filter(pk=row.name, expression=row.timing.expression, timezone=row.timing.zone)
    return bool(mark(first_free(same, 1), _columns(timing, versions, row.now), "name"))


def _bring_near(using: str, row: Row) -> bool:
    """Let a schedule with ``every`` tick after its interval, if the server's clock was put back, as by a failover.

    A tick of cron has a date, at which it has run or will run.
    """
    try:
        is_far = row.timing.is_every and row.next_at > row.now + timedelta(seconds=row.timing.interval + 1)
    except TaskOptionError:
        # Another program has written it. ``_following`` says so.
        return False
    if is_far:
        near = row.timing.following(row.now, row.now)
        rows_of("Schedule", using).filter(pk=row.name, next_at=row.next_at).update(next_at=near)
    return is_far


def _columns(timing: Timing, versions: list[str], now: datetime) -> dict[str, Any]:
    """Return the columns of a schedule that begins now."""
    expression, zone = timing
    first = timing.following(now, now)
    return {"expression": expression, "timezone": zone, "versions": versions, "next_at": first}


def _living_versions(using: str, rows: Sequence[Row]) -> set[str]:
    """Return the names of those schedules whose version is that of a running worker."""
    names = {registry.version_of(row.name, row.timing): row.name for row in rows}
    if not names:
        return set()
    limit = get_settings().HEARTBEAT_LIMIT
    return {names[version] for (version,) in run(using, LIVING_VERSIONS, list(names), limit)}


# Ticks


def _is_due(row: Row) -> bool:
    return row.next_at <= row.now


def _following(row: Row) -> datetime:
    return row.timing.following(row.next_at, row.now) if _is_due(row) else row.next_at


def _enqueue_ticks(using: str, tasks: dict[str, TaskFields], ticks: Sequence[Tick]) -> list[int]:
    """Take ticks, and enqueue their tasks in the same transaction. Return the ids of the tasks."""
    calls: dict[Tick, TaskCall] = {}
    for each in _take(using, ticks):
        task = _ticked(tasks[each.tick.schedule.task_path], each)
        calls[each.tick] = (task, (*json.loads(each.args),), json.loads(each.kwargs))
    ids: dict[Tick, int | None] = {}
    plain = sorted((tick for tick in calls if calls[tick][0].unique is None), key=lambda tick: calls[tick][0].backend)
    for _backend, some in groupby(plain, key=lambda tick: calls[tick][0].backend):
        alike = list(some)
        backend: Any = calls[alike[0]][0].get_backend()
        ids |= zip(alike, backend.enqueue_each([calls[tick] for tick in alike]), strict=True)
    # Each transaction takes unique keys in the order of ``IN_ORDER_OF_KEYS``.
    keys = {tick: keys_of(*call).unique or "" for tick, call in calls.items() if call[0].unique is not None}
    for tick in sorted(keys, key=lambda tick: (len(keys[tick]), keys[tick])):
        ids[tick] = _enqueue_scheduled(*calls[tick])
    noted = [(tick.schedule.name, tick.at, id_) for tick, id_ in ids.items() if id_ is not None]
    if noted:
        run(using, NOTE_TASKS, *map(list, zip(*noted, strict=True)))
    return [id_ for _name, _at, id_ in noted]


def _take(using: str, ticks: Sequence[Tick]) -> list[Taken]:
    """Take ticks. Return those that no other worker takes or has taken."""
    run(using, LIMIT_TICK)
    moves = [(each.schedule.name, each.schedule.task_path, each.at, each.following) for each in ticks]
    taken = {name: about for name, *about in run(using, TAKE_TICKS, *map(list, zip(*moves, strict=True)))}
    return [Taken(tick, *taken[tick.schedule.name]) for tick in ticks if tick.schedule.name in taken]


def _ticked(task: TaskFields, taken: Taken) -> TaskFields:
    """Return the function as its tick calls it."""
    meta: dict[str, Any] = {**task.meta, "schedule": taken.tick.at.isoformat()}
    if not taken.tick.schedule.is_of_code:
        meta[SCHEDULE_NAME] = taken.tick.schedule.name
    if taken.previous is not None:
        meta[PREVIOUS_RUN] = taken.previous
    seconds = _seconds_kept(task, taken.tick.schedule.timing)
    return task.using(meta=meta if seconds is None else {**meta, KEEPS_FAILURES: True}, keep_result=seconds)


def _seconds_kept(task: TaskFields, timing: Timing) -> float | None:
    """Return the time after which successful runs are deleted, if they would be many until the usual time."""
    days = get_settings().PRUNE_AFTER.get("SUCCESSFUL")
    seconds = max(LEAST_KEPT, KEPT_RUNS * timing.interval)
    return None if task.keep_result is not None or days is None or seconds >= days * 86400 else seconds


def _enqueue_scheduled(task: TaskFields, args: Iterable[Any], kwargs: dict[str, Any]) -> int | None:
    """Enqueue a scheduled function. Return the id of its task, None if ``unique=`` has refused it."""
    try:
        return int(task.enqueue(*args, **kwargs).id)
    except DuplicateTask as error:
        logger.info("The schedule of %s enqueued no task: %s", task.module_path, error)
        return None


def _utc(moment: datetime) -> datetime:
    """Make a naive moment, which the server has sent in UTC, aware."""
    return moment.replace(tzinfo=timezone.utc)
