"""Records the steps of tasks, and the events for which tasks wait.

A record is one INSERT that the claim guards. The primary key, of task and name, makes it unique: if a worker that was
taken for dead has recorded a step nevertheless, the next attempt takes this record, and its own transaction of an
``atomic_step`` is rolled back.

A task that sleeps or waits is SCHEDULED, and nothing else. Its outcome and its record are written by one transaction.
An event that is written while a task begins to wait is not lost: its emitter commits the event and then looks for
waiting tasks, and a worker commits the waiting task and then looks for the event. After a crash between the two, the
upkeep looks for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import OuterRef, Q, Subquery
from django.db.models.lookups import IsNull

from django_pglock.conf import get_settings
from django_pglock.errors import ClaimLost, StepError, TaskResultError, model_of
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import connection_for, has_manual_transaction
from django_pglock.postgres.message import is_plain_django, literals, send
from django_pglock.store.admit import admit, unsynced
from django_pglock.store.attempts import results_at_end
from django_pglock.store.children import end_gather
from django_pglock.store.numbers import STEPS, TIMEOUTS, count_step
from django_pglock.store.statements import (
    IN_INDEX_ORDER,
    Part,
    array_of_texts,
    filled,
    message,
    rows_of,
    run,
)
from django_pglock.store.wake import after_commit, wake
from django_pglock.tasks.arguments import as_stored, from_json, to_json
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.retry import FlowWord
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.step_records import (
    LARGEST_RESULT,
    OF_OTHER_CODE,
    HandedBack,
    Kind,
    Record,
    Suspension,
    TaskCall,
    flaw_of_name,
    result_text,
    told,
)
from django_pglock.tasks.steps import LONGEST_DEPLOY, POSTPONED, Chunk, Steps

__all__ = ["emit"]

R = TypeVar("R")

logger = get_logger(WORKER)
#: A deploy may meet thousands of tasks.
postponed = RateOfRecords(60.0)

#: The number of open waits that the upkeep compares with the events in one round.
WAITS_AT_ONCE = 5000
DAY = 86_400

RECORDS = """
SELECT name, number, kind, result, failure, date_part('epoch', started_at), finished_at IS NOT NULL
FROM {step} WHERE task_id = %s ORDER BY number
"""

RECORD = """
INSERT INTO {step} (task_id, name, number, kind, result, failure, attempt, started_at, finished_at)
SELECT task.id, %s, %s, %s, %s::jsonb, %s::jsonb, task.attempts,
       clock_timestamp() - make_interval(secs => %s), clock_timestamp()
FROM {task} AS task WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING'
ON CONFLICT DO NOTHING
RETURNING date_part('epoch', started_at)
"""
# The last statement of the transaction of a step. If the claim is lost, or the step is recorded already, a constraint
# of the table refuses it. Then the COMMIT that follows in the same message is not executed. A division by zero, as for
# an atomic task, needs a statement that takes twice as long.
RECORD_OWN = """
INSERT INTO {step} (name, number, kind, result, failure, started_at, finished_at, attempt, task_id)
VALUES (%s, %s, %s, %s::jsonb, %s::jsonb, clock_timestamp() - make_interval(secs => %s), clock_timestamp(), %s,
        (SELECT task.id FROM {task} AS task WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING'))
RETURNING date_part('epoch', started_at)
"""
# How far a loop over rows has come, if it was there before these rows. The transaction of an attempt that was taken for
# dead may commit its position after the next attempt has read the records, and has begun with the same rows.
NOTE_POSITION = """
WITH known AS (SELECT %s::jsonb AS position)
INSERT INTO {step} AS step (task_id, name, number, kind, result, attempt, started_at, finished_at)
SELECT task.id, %s, %s, 'CHUNKS', %s::jsonb, task.attempts, clock_timestamp(), CASE WHEN %s THEN clock_timestamp() END
FROM {task} AS task WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING'
ON CONFLICT (task_id, name) DO UPDATE
SET result = EXCLUDED.result, finished_at = EXCLUDED.finished_at, attempt = EXCLUDED.attempt
WHERE step.result IS NOT DISTINCT FROM (SELECT position FROM known)
RETURNING 1
"""

# Attempts are counted since the last record, and so are deaths of workers. Sent before it, if some were counted.
COUNT_ANEW = """
UPDATE {task} SET retries = 0, rescues = 0 WHERE id = %s AND attempts = %s AND status = 'RUNNING'
"""

# The records of tasks that have just been suspended, with the attempt. A wait that is suspended again has its record.
# If its time is over, it ends, with the event or with a failure. Only that of a postponed task gets another number.
SUSPEND = """
INSERT INTO {step} AS step
    (task_id, name, number, kind, event, attempt, started_at, finished_at, result, failure)
SELECT id, name, number, kind, NULLIF(event, ''), attempt, clock_timestamp(),
       CASE WHEN is_over THEN clock_timestamp() END, there.payload,
       CASE WHEN is_over AND there.payload IS NULL THEN '{{}}'::jsonb END
FROM unnest(%s::bigint[], %s::int[], %s::text[], %s::int[], %s::text[], %s::text[], %s::bool[])
    AS suspended (id, attempt, name, number, kind, event, is_over)
CROSS JOIN LATERAL (
    SELECT (SELECT COALESCE(event.payload, 'null') FROM {event} AS event
            WHERE is_over AND event.name = suspended.event LIMIT 1) AS payload) AS there
ON CONFLICT (task_id, name) DO UPDATE
SET attempt = EXCLUDED.attempt, finished_at = EXCLUDED.finished_at, result = EXCLUDED.result,
    failure = EXCLUDED.failure, number = EXCLUDED.number,
    started_at = CASE WHEN step.number = EXCLUDED.number THEN step.started_at ELSE EXCLUDED.started_at END
WHERE step.finished_at IS NULL
RETURNING CASE WHEN failure IS NOT NULL THEN task_id END
"""

EMIT = """
INSERT INTO {event} (name, payload, emitted_at, expires_at)
VALUES (%s, %s::jsonb, clock_timestamp(), clock_timestamp() + make_interval(secs => %s))
ON CONFLICT DO NOTHING
RETURNING name
"""

# Ends the waits for events that are there, and makes the tasks ready that are suspended by them. A task that has been
# claimed since then, and waits for its retry, finds the event then. Rows of tasks are locked in the order of their ids,
# and read when they are locked: meanwhile a task may have begun to wait once more. Each wait ends once, and an attempt
# that runs sees that it has ended.
WAKE_WAITING = """
WITH ended AS MATERIALIZED (
    SELECT step.task_id, step.name, event.payload FROM {step} AS step JOIN {event} AS event ON event.name = step.event
    WHERE step.event = ANY (%s::text[]) AND step.finished_at IS NULL
), locked AS MATERIALIZED (
    SELECT task.id, task.attempts, task.status FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT task_id FROM ended)) ORDER BY task.id FOR NO KEY UPDATE
), closed AS (
    UPDATE {step} AS step SET finished_at = clock_timestamp(), result = ended.payload FROM ended
    WHERE step.task_id = ended.task_id AND step.name = ended.name AND step.finished_at IS NULL
      AND step.task_id = ANY (ARRAY(SELECT id FROM locked))
    RETURNING step.task_id, step.attempt
)
UPDATE {task} AS task
SET status = CASE WHEN task.lock_key IS NULL THEN 'READY' ELSE 'BLOCKED' END, run_after = clock_timestamp()
WHERE task.id = ANY (ARRAY(
    SELECT id FROM locked JOIN closed ON closed.task_id = id AND closed.attempt = attempts WHERE status = 'SCHEDULED'))
RETURNING task.status, task.queue, task.lock_key
"""
LIMIT_WAKE = ("SET LOCAL lock_timeout = '1s'",)

# The events of the next open waits, each with whether it is there.
MISSED_EVENTS = """
SELECT open.event, (SELECT event.name FROM {event} AS event WHERE event.name = open.event LIMIT 1) IS NOT NULL
FROM (SELECT event FROM {step} WHERE finished_at IS NULL AND event > %s ORDER BY event LIMIT %s) AS open
ORDER BY open.event
"""

PRUNE_EVENTS = """
DELETE FROM {event} WHERE name = ANY (ARRAY(
    SELECT name FROM {event} WHERE expires_at < statement_timestamp()
    ORDER BY expires_at LIMIT %s FOR UPDATE SKIP LOCKED))
"""

# The failed steps that have ended their tasks. The function may have caught the failure of an earlier one.
NOTE_CAUSES = """
UPDATE {step} AS step SET failure = step.failure || '{{"has_ended_task": true}}'
FROM unnest(%s::bigint[], %s::text[]) AS cause (id, name)
WHERE step.task_id = ANY (%s::bigint[]) AND step.task_id = cause.id AND step.name = cause.name
"""

# A task that is retried by a person runs the failed step that has ended it again, and those after it, such as steps
# that have undone something.
FORGET_FAILED = """
DELETE FROM {step} AS step WHERE step.task_id = ANY (%s::bigint[])
  AND (step.number >= (SELECT cause.number FROM {step} AS cause
                       WHERE cause.task_id = step.task_id AND cause.failure ? 'has_ended_task' LIMIT 1)
       OR step.kind = 'CHANGED')
"""

# A person lets a task run again from a step: its record and all later ones are deleted.
FORGET_FROM = """
DELETE FROM {step} WHERE task_id = %s
  AND number >= (SELECT first.number FROM {step} AS first WHERE first.task_id = %s AND first.name = %s)
RETURNING name
"""


class RecordedSteps(Steps):
    """The steps of one attempt, in the table."""

    def __init__(self, using: str, claim: Claim, definition: TaskFields) -> None:
        super().__init__()
        self.using = using
        self.claim = claim
        #: The record of a task that old code has postponed.
        self._postponed: Record | None = None
        if claim.attempt > 1:
            # A task that is claimed for the first time has no steps.
            self._read()
        self.definition = definition
        self._has_to_end: Callable[[], bool] = lambda: False
        self._began = self._step_began = monotonic()
        self._depth = 0
        self._thread: int | None = None

    def _read(self) -> None:
        self.records = read_records(self.using, self.claim.id)
        self._postponed = self.records.pop(OF_OTHER_CODE, None)

    def start(self, has_to_end: Callable[[], bool]) -> None:
        """Note that the function is called now. ``has_to_end`` asks whether its process must end, or raises."""
        self._has_to_end = has_to_end
        # A coroutine gathers in the thread of the ORM.
        self._thread = None if in_event_loop() else get_ident()
        # In a TestCase there are transactions around the function.
        self._depth = len(connection_for(self.using).atomic_blocks)

    def check(self, name: str, *, blocks: bool) -> None:
        """Raise if the task has to stop, if a transaction is open, or if this is no place for statements."""
        if self._has_to_end():
            self.leave(HandedBack())
        if blocks and in_event_loop():
            text = f"The step {name!r} would block the event loop. A coroutine awaits context.astep() or agather()."
            self.end(StepError(text))
        if blocks and self._thread not in (None, get_ident()):
            self.end(StepError(f"The step {name!r} is called in another thread. Call it in that of the function."))
        if len(connection_for(self.using).atomic_blocks) > self._depth:
            text = (
                f"The step {name!r} is called inside of atomic(), whose rollback would undo its record. Call it "
                "outside, or let atomic_step() open the transaction."
            )
            self.end(StepError(text))
        self._step_began = monotonic()

    def postpone(self, why: str) -> None:
        """Leave the function, unless the task was postponed for long enough. A later record makes an older one void."""
        since = self._postponed
        if since is None or since.number < self.next_number or self.now() - since.started_at < LONGEST_DEPLOY:
            if postponed.allows():
                text = "%s is postponed by %.0f s, in case that another worker has the code of its steps. %s"
                logger.warning(text, self.claim, POSTPONED, why)
            self.suspend(OF_OTHER_CODE, Kind.CHANGED, seconds=POSTPONED)

    def failure_of(self, error: Exception) -> dict[str, str]:
        """Return what to record, if the attempts of the step are spent. Otherwise end the attempt by the error."""
        is_word = isinstance(error, (FlowWord, StepError))
        if is_word or (self.claim.retries < self.claim.max_retries and self.definition.can_retry(error)):
            self.end(error)
        return told(error)

    def record(self, name: str, value: Any, failure: dict[str, str] | None, kind: Kind = Kind.STEP) -> None:
        """Write how a step has ended. If that is not possible, the attempt ends."""
        try:
            if not self._write(name, value, failure, kind):
                self._find(name)
        except Exception as error:  # noqa: BLE001 - the function must not catch it
            self.end(error)
        self.count_anew()

    def atomic_step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a part of the function in a transaction whose last statement is its record."""
        if self.begin(name, Kind.STEP, blocks=True) is None:
            with self._executing(name):
                self._run_in_transaction(name, partial(self.call, name, function, *args, **kwargs))
        value: R = self._value(name)
        return value

    def _run_in_transaction(self, name: str, function: Callable[[], Any]) -> None:
        try:
            with transaction.atomic(using=self.using, durable=True):
                if not (is_written := self._write(name, function(), None, is_last=True)):
                    transaction.set_rollback(True, using=self.using)
            if not is_written:
                self._find(name)
        except (ClaimLost, TaskResultError) as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 - a step may raise anything, and so may its COMMIT
            self.records.pop(name, None)
            self.record(name, None, self.failed(name, error))
        self.count_anew()

    def _write(
        self,
        name: str,
        value: Any,
        failure: dict[str, str] | None,
        kind: Kind = Kind.STEP,
        *,
        is_last: bool = False,
    ) -> bool:
        """Write a record. Return whether it is this one, and not that of another attempt. Raises ``TaskResultError``.

        If it ``is_last``, it is written with the COMMIT of the current transaction.
        """
        number, text = self.next_number, result_text(name, value)
        told = None if failure is None else to_json(failure)
        seconds = monotonic() - self._step_began
        if failure and has_manual_transaction(connection := connection_for(self.using)):
            connection.rollback()
        values = (name, number, kind.value, None if failure else text, told, repr(seconds))
        row = self._send_last(*values) if is_last else self._send(RECORD, *values)
        if row:
            self.records[name] = Record(number, kind.value, as_stored(text), failure, row[0])
            count_step(self.claim.queue, self.claim.task_path, STEPS)
        return row is not None

    def _find(self, name: str) -> None:
        """Read the record of another attempt. Raises ``ClaimLost`` if there is none, because the claim is lost."""
        self._read()
        if name not in self.records:
            raise ClaimLost(f"{self.claim} is no longer claimed by this attempt, so its step {name!r} is not recorded.")

    def note_position(self, chunk: Chunk) -> None:
        """Write how far the loop is. If that is not possible, the attempt ends.

        If another attempt was faster, the task is given back, if it is still claimed. The next run sees its position.
        """
        known, position = (None if each is None else to_json(each) for each in (chunk.record.result, chunk.position))
        try:
            is_written = self._send(NOTE_POSITION, known, chunk.name, chunk.record.number, position, str(chunk.is_last))
        except Exception as error:  # noqa: BLE001 - the function must not catch it
            self.end(error)
        if not is_written:
            self.leave(HandedBack())
        super().note_position(chunk)

    def _send_last(self, *values: str | int | None) -> Sequence[Any] | None:
        """Send the record of a step and the COMMIT of its transaction, and return its row; None: it is refused."""
        try:
            return self._send(RECORD_OWN, *values, self.claim.attempt, commits=True)
        except IntegrityError as error:
            cause: Any = error.__cause__
            if getattr(cause.diag, "table_name", None) != model_of("Step")._meta.db_table:
                raise
            return None

    def _send(self, statement: str, *values: str | int | None, commits: bool = False) -> Sequence[Any] | None:
        """Send a statement that the claim guards, and return its row, if it has one.

        Not by Django's cursor, which takes as long as all the rest of a record.
        """
        connection = connection_for(self.using)
        connection.ensure_connection()
        fence = (self.claim.id, self.claim.attempt)
        text = filled(statement) % literals(connection, (*values, *fence))
        parts: list[Part] = [text]
        if self.claim.retries or self.claim.rescues:
            parts.insert(0, (COUNT_ANEW, fence))
        if commits and is_plain_django(connection) and len(connection.atomic_blocks) == 1:
            parts.append("COMMIT")
        return send(connection, text if parts == [text] else message(self.using, *parts))

    def count_anew(self) -> None:
        """Count attempts, and deaths of workers, anew. The row does so since the commit of the record."""
        connection = connection_for(self.using)
        if has_manual_transaction(connection):
            # With AUTOCOMMIT off, or after a BEGIN of the function, the record would be rolled back at its end.
            try:
                connection.commit()
            except Exception as error:  # noqa: BLE001 - the function must not catch it
                self.end(error)
        self.claim.retries = self.claim.rescues = 0

    def transaction_of(self, chunk: Chunk) -> AbstractContextManager[Any]:
        """Return the transaction of some rows, if their position can be a part of it."""
        if chunk.using != self.using:
            text = (
                f"The rows of {chunk.name!r} are in the database {chunk.using!r}, and the tasks in {self.using!r}. So "
                "`with rows:` cannot write both in one transaction. Write the rows without it, so that they may be "
                "written twice."
            )
            self.end(StepError(text))
        return super().transaction_of(chunk)

    def now(self) -> float:
        """Return the time of the server, by its clock at the claim."""
        return float(self.claim.last_attempted_at) + monotonic() - self._began

    def prepare(self, name: str, calls: Iterable[TaskCall[Any]]) -> list[tuple[TaskFields, Any]]:
        """Return the calls of children, each with its task, as they are written."""
        prepared: list[tuple[TaskFields, Any]] = []
        for call in self.checked(name, calls):
            backend: Any = call.task.get_backend()
            if getattr(backend, "database", None) != self.using:
                text = (
                    f"The gather {name!r} has a call of {call.task.module_path} for the backend {backend.alias!r}, "
                    f"whose tasks are not in the database {self.using!r} of this task. So both cannot be written in "
                    "one transaction. Give the call another backend by using()."
                )
                self.end(StepError(text))
            # Calls with equal options are written together, also if each has got them by its own using().
            last = prepared[-1][0] if prepared else None
            task = last if last is not None and (last is call.task or last == call.task) else call.task
            prepared.append((task, backend.check_call(task, call.args, call.kwargs)))
        return prepared

    def end_gather(self, name: str) -> None:
        """End the wait if all children have ended. Otherwise, one was retried meanwhile, so wait for it again."""
        try:
            awaited = end_gather(self.using, self.claim.id, name)
            self._read()
            if has_manual_transaction(connection := connection_for(self.using)):
                # As in count_anew().
                connection.commit()
        except Exception as error:  # noqa: BLE001 - the function must not catch it
            self.end(error)
        if awaited:
            self.suspend(name, Kind.CHILDREN, awaited=awaited)

    def results_of(self, record: Record) -> list[TaskResult[..., Any]]:
        """Return the results of the children of a record as they were when the gather has ended."""
        try:
            return results_at_end(self.using, record.result["children"], record.result.get("ends", {}))
        except Exception as error:  # noqa: BLE001 - the function must not catch it
            self.end(error)


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def read_records(using: str, task_id: int) -> dict[str, Record]:
    """Return the recorded steps of a task by their names, in order. One statement."""
    return {
        name: Record(number, kind, _value_of(result), _value_of(failure), *others)
        for name, number, kind, result, failure, *others in run(using, RECORDS, task_id)
    }


def _value_of(text: str | None) -> Any:
    return None if text is None else from_json(text)


# Suspended tasks


def write_suspensions(using: str, suspended: Sequence[tuple[Claim, Suspension]]) -> None:
    """Record what the tasks of these claims wait for. In the transaction that makes them SCHEDULED.

    After its commit, those whose event is there by now are made ready.
    """
    if not suspended:
        return
    rows = [
        (each.id, each.attempt, how.name, how.number, how.kind.value, how.event or "", how.seconds <= 0)
        for each, how in suspended
    ]
    timed_out = {id_ for (id_,) in run(using, SUSPEND, *map(list, zip(*rows, strict=True)))}
    for claim, _how in suspended:
        if claim.id in timed_out:
            count_step(claim.queue, claim.task_path, TIMEOUTS)
    if events := {how.event for _, how in suspended if how.event}:
        after_commit(using, wake_waiting, using, events)


def note_causes(using: str, causes: Sequence[tuple[int, str]]) -> None:
    """Note which failed steps, by task and name, have ended their tasks. In the transaction that ends them."""
    if causes:
        ids, names = map(list, zip(*causes, strict=True))
        run(using, NOTE_CAUSES, ids, names, ids)


def wake_waiting(using: str, events: Collection[str]) -> int:
    """Make the tasks ready that wait for these events, if the events are there. Return how many.

    If a row stays locked, the upkeep makes them ready later.
    """
    if not events:
        return 0
    # It need not wait for the disk: if the server crashes, the upkeep makes them ready.
    woken = run(using, WAKE_WAITING, array_of_texts(events), first=[*unsynced(using), *LIMIT_WAKE])
    wake(using, (queue for status, queue, _ in woken if status == TaskStatus.READY))
    admit(using, (key for *_, key in woken))
    return len(woken)


def missed_events(using: str, after: str, *, limit: int = WAITS_AT_ONCE) -> list[tuple[str, bool]]:
    """Return the events behind a name for which tasks wait, each with whether it is there."""
    return run(using, MISSED_EVENTS, after, limit, first=IN_INDEX_ORDER)


def prune_events(using: str, *, limit: int = WAITS_AT_ONCE) -> None:
    """Delete some events whose time is over."""
    run(using, PRUNE_EVENTS, limit, first=IN_INDEX_ORDER)


def forget_failed(using: str, ids: Iterable[int]) -> None:
    """Delete the failed steps that have ended these tasks, the later ones, and since when they were postponed."""
    run(using, FORGET_FAILED, list(ids))


def suspended(tasks: Any) -> Any:
    """Return the tasks that sleep, or wait for an event or for their children, between two of their steps."""
    # A subquery instead of EXISTS, which is a join: see ``last_ended_by`` in attempts.py.
    steps = rows_of("Step", tasks.db).filter(
        task=OuterRef("pk"), attempt=OuterRef("attempts"), finished_at__isnull=True, kind__in=(Kind.SLEEP, Kind.EVENT)
    )
    is_open = Q(IsNull(Subquery(steps.order_by().values("name")[:1]), False))
    gathers = Q(status=TaskStatus.BLOCKED, worker__isnull=False, waits_for__gt=0)
    return tasks.filter((Q(status=TaskStatus.SCHEDULED) & is_open) | gathers)


def waiting_for_event(using: str, event: str, *, below: int | None = None, limit: int) -> list[int]:
    """Return the ids of the newest tasks with an open wait for an event; ``below``: only lower ids.

    A task that was cancelled while it waited is among them.
    """
    steps = rows_of("Step", using).filter(event=event, finished_at__isnull=True)
    if below is not None:
        steps = steps.filter(task__lt=below)
    return list(steps.order_by("-event", "-task_id").values_list("task_id", flat=True)[:limit])


def forget_from(using: str, task_id: int, name: str) -> list[str]:
    """Delete the record of a step and those of all later ones. Return their names."""
    return [name for (name,) in run(using, FORGET_FROM, task_id, task_id, name)]


def emit(event: str, payload: Any = None, *, using: str | None = None) -> bool:
    """Write an event, in the caller's transaction. The tasks that wait for it continue after the commit.

    - ``event``: its name, of up to 200 characters.
    - ``payload``: a JSON value of up to 1 MiB, which ``context.wait_for()`` returns.
    - ``using``: the alias of the database (None: that of the tasks).

    Returns False if the event is there already. The first one that is committed counts. It is kept for ``KEEP_EVENTS``
    days, also for tasks that begin to wait later. Raises ``StepError`` for a name, and ``TaskArgumentsError`` for a
    payload, that cannot be stored.
    """
    if flaw := flaw_of_name(event, "event"):
        raise StepError(flaw)
    text = to_json(payload, what=f"The payload of the event {event!r}", most=LARGEST_RESULT)
    alias = database_of_tasks(option="using=") if using is None else using
    is_new = bool(run(alias, EMIT, event, text, get_settings().KEEP_EVENTS * DAY))
    if is_new:
        after_commit(alias, wake_waiting, alias, [event])
    return is_new
