"""Steps: the parts of a task function that run once, by name. The rules, without a database.

A function with steps runs again from its beginning, in a later attempt or after a pause. A step that is recorded is not
executed again: it returns what it has returned, or raises what it has raised. So a function has one rule to keep: what
it decides between two steps depends only on its arguments, and on what its context has returned.

``store/steps.py`` records the steps of a worker's attempts. Here is what is common with a call without a worker, such
as ``send.call()``, which records nothing.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.db import transaction

from django_pglock.errors import EventTimeout, StepError, StepFailed, StepsChanged, TaskResultError
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.retry import MAX_DELAY, duration

if TYPE_CHECKING:
    from typing_extensions import Self

R = TypeVar("R")

#: Python 3.10 has no groups.
GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
#: Bytes of the result of a step or of an event's payload, characters of a name, and steps of a task.
LARGEST_RESULT, LONGEST_NAME, MOST_STEPS = 1024 * 1024, 200, 10_000


class Kind(str, Enum):
    """What a record is of."""

    STEP = "STEP"
    SLEEP = "SLEEP"
    EVENT = "EVENT"
    CHUNKS = "CHUNKS"


@dataclass(slots=True)
class Record:
    """What is recorded of a step. ``failure``: the path and the message of its exception."""

    number: int
    kind: str
    result: Any = None
    failure: dict[str, str] | None = None
    #: When it began, in seconds since the epoch by the server's clock.
    started_at: float = 0.0
    #: False: the task waits for an event, or waited when it was claimed.
    is_finished: bool = True


class Chunk(list[Any]):
    """Some rows of ``context.chunks()``. As a context it is a transaction, in which the position is noted as well."""

    #: The alias of the rows' database, whether these are the last rows, and the text of the last primary key.
    using = ""
    is_last = False
    position: str | None = None
    #: Whether the position behind these rows is noted.
    is_noted = False

    def __init__(self, rows: Any, steps: Steps, name: str, record: Record) -> None:
        super().__init__(rows)
        self.steps = steps
        self.name = name
        self.record = record

    def __enter__(self) -> Self:
        self._transaction = self.steps.transaction_of(self)
        self._transaction.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._transaction.__exit__(kind, error, trace)
            return
        try:
            self.steps.note_position(self)
        except BaseException as refused:
            self._transaction.__exit__(type(refused), refused, refused.__traceback__)
            raise
        try:
            self._transaction.__exit__(None, None, None)
        except Exception as refused:  # noqa: BLE001 - the function must not continue behind these rows
            self.steps.end(refused)
        self.steps.count_anew()


class StepEnded(BaseException):
    """Leaves a function whose step has raised, and will be tried again in the next attempt.

    Not an ``Exception``, so that no ``except Exception`` of the function runs on as if the step were over.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class HandedBack(BaseException):
    """Leaves a function before its next step, because its process has to end. Another one continues the task."""


class Suspension(BaseException):
    """Leaves a function that sleeps, or waits for an event. The task continues in a later run."""

    def __init__(self, name: str, kind: Kind, number: int, seconds: float, event: str | None = None) -> None:
        super().__init__(f"{name!r} suspends the task")
        self.name = name
        self.kind = kind
        self.number = number
        self.seconds = seconds
        self.event = event


class Steps:
    """The steps of one run of a function."""

    def __init__(self, records: dict[str, Record] | None = None) -> None:
        self.records = records or {}
        #: The names that the function has used in this run, and those for which it has asked.
        self._met: set[str] = set()
        self._asked: set[str] = set()
        self._last = 0
        self._running: str | None = None
        self._suspension: Suspension | None = None
        #: The loop over rows that has not ended, and what has ended the attempt.
        self._loop: str | None = None
        self._ended: StepEnded | None = None

    # What a function calls

    def step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a part of the function once: see ``TaskContext.step``."""
        record = self.begin(name, Kind.STEP)
        if record is None:
            value, failure = None, None
            with self._executing(name):
                try:
                    value = function(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    failure = self.failure_of(error)
                record = self.record(name, value, failure)
        result: R = self._value(name, record)
        return result

    async def astep(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same for a coroutine function."""
        record = self.begin(name, Kind.STEP)
        if record is None:
            value, failure = None, None
            with self._executing(name):
                try:
                    value = await function(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    failure = self.failure_of(error)
                record = await self.arecord(name, value, failure)
        return self._value(name, record)

    def sleep(self, name: str, until: float | timedelta | datetime) -> None:
        """Continue the task later."""
        if self.begin(name, Kind.SLEEP) is None:
            seconds = self.seconds_until(until) if isinstance(until, datetime) else duration("sleep", until)
            if seconds > 0:
                self.suspend(name, Kind.SLEEP, min(seconds, MAX_DELAY))

    def wait_for(self, event: str, timeout: float | timedelta | None, name: str | None = None) -> Any:
        """Return the payload of an event. Continue the task when it comes."""
        check_name(event, "event")
        name = name or event
        seconds = MAX_DELAY if timeout is None else duration("timeout", timeout)
        record = self.begin(name, Kind.EVENT)
        if record is None:
            self.suspend(name, Kind.EVENT, seconds, event)
        if not record.is_finished:
            record = self.end_wait(name, event, seconds)
        if not record.is_finished:
            self.suspend(name, Kind.EVENT, self.seconds_left(record, seconds), event)
        if record.failure is not None:
            raise EventTimeout(f"The event {event!r} has not come within {seconds:g} s.")
        return record.result

    def chunks(self, name: str, rows: Any, size: int) -> Iterator[Chunk]:
        """Yield the rows of a queryset in parts, by primary key, and note after each how far the loop is."""
        if not isinstance(size, int) or size < 1:
            raise StepError(f"The size of {name!r} is {size!r}; give a number of rows above zero.")
        record = self.begin(name, Kind.CHUNKS)
        if record is None:
            record = self.records[name] = Record(self.next_number, Kind.CHUNKS.value, is_finished=False)
        key = rows.model._meta.pk
        rows = rows.order_by("pk")
        if not rows.query.standard_ordering:
            rows = rows.reverse()
        while not record.is_finished:
            later = rows if record.result is None else rows.filter(pk__gt=key.to_python(record.result))
            chunk = Chunk(later[:size], self, name, record)
            chunk.using = rows.db
            chunk.is_last = len(chunk) < size
            if chunk:
                chunk.position = key.value_to_string(chunk[-1])
                self._loop = name
                try:
                    yield chunk
                finally:
                    self._loop = None
            if not chunk.is_noted:
                self.note_position(chunk)
                self.count_anew()
            if not record.is_finished:
                self.check(name)

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        record = self.records.get(name)
        return record is not None and (record.is_finished or record.kind == Kind.SLEEP.value)

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._value(name, self.records[name])

    # The rules

    def begin(self, name: str, kind: Kind) -> Record | None:
        """Note that the function has come to a step. Return its record, None if it has to be executed."""
        check_name(name, "step")
        if self._ended is not None:
            raise self._ended
        if self._loop is not None:
            raise StepError(
                f"The step {name!r} is called in the loop {self._loop!r}, which does not repeat its lists, so {name!r} "
                "would be missing in a later run. Call the function without a step, or enqueue a task for each list."
            )
        if self._suspension is not None:
            raise StepError(
                f"The step {name!r} is called after {self._suspension.name!r} has suspended the task. An except or "
                "finally of the function has caught BaseException. Catch Exception."
            )
        if self._running is not None:
            raise StepError(
                f"The step {name!r} is called while the step {self._running!r} runs. Steps are neither nested nor "
                "concurrent: call it after that one, or enqueue a task for each part."
            )
        if name in self._met:
            raise StepError(f"The step {name!r} is called twice in one run. Give each its own name: f'{name} {{key}}'.")
        self._met.add(name)
        record = self.records.get(name)
        if record is None:
            if len(self.records) >= MOST_STEPS:
                raise StepError(f"The step {name!r} would be number {MOST_STEPS + 1:,} of its task.")
            self.check(name)
        elif record.kind != kind.value or record.number < self._last:
            self._refuse_change(f"{name!r} was recorded as {record.kind} number {record.number}")
        else:
            self._last = record.number
        return record

    def finish(self) -> None:
        """Check that the function may end now. Raises ``StepError`` and ``StepsChanged``.

        If it has swallowed the error of a step, that is raised again.
        """
        if self._ended is not None:
            raise self._ended
        if self._running is not None:
            raise StepError(f"The function has returned while its step {self._running!r} runs. Await it.")
        if self._suspension is not None:
            raise StepError(
                f"The function has returned after {self._suspension.name!r} has suspended the task. An except or "
                "finally of it has caught BaseException. Catch Exception."
            )
        if missed := [name for name in self.records if name not in self._met | self._asked]:
            self._refuse_change(f"{', '.join(map(repr, missed))} was recorded and not called")

    def _refuse_change(self, why: str) -> NoReturn:
        raise StepsChanged(
            f"The function has changed since this task began: {why}. Recorded: {list(self.records)}; called in this "
            f"run: {[name for name in self.records if name in self._met]} and new names. Write `if 'name' in "
            "context.steps` for what tasks of the old code have recorded."
        )

    def suspend(self, name: str, kind: Kind, seconds: float, event: str | None = None) -> NoReturn:
        """Leave the function."""
        number = self.records[name].number if name in self.records else self.next_number
        self._suspension = Suspension(name, kind, number, seconds, event)
        raise self._suspension

    def end(self, error: Exception) -> NoReturn:
        """Leave the function by the error of a step."""
        self._ended = StepEnded(error)
        raise self._ended from None

    def what_left(self, error: BaseException) -> BaseException:
        """Return how the function was left: by a step, also if a group of exceptions has it."""
        left = self._ended or self._suspension
        return left if left is not None and isinstance(error, GROUP) else error

    @property
    def next_number(self) -> int:
        """The number of the next new record."""
        return max((each.number for each in self.records.values()), default=0) + 1

    @contextmanager
    def _executing(self, name: str) -> Iterator[None]:
        self._running = name
        try:
            yield
        finally:
            self._running = None

    def _value(self, name: str, record: Record) -> Any:
        if record.failure is not None:
            raise StepFailed(name, **record.failure)
        return record.result

    # What a worker does in another way

    def start(self, check_stop: Callable[[], None]) -> None:
        """Note that the function is called now. ``check_stop`` raises if it must end."""

    def check(self, name: str) -> None:
        """Raise if a new step cannot be executed here."""

    def failure_of(self, error: Exception) -> dict[str, str]:
        """Return what to record of a step that has raised, if its attempts are spent. Otherwise raise."""
        raise error

    def record(self, name: str, value: Any, failure: dict[str, str] | None) -> Record:
        """Record how a step has ended. Return the record, whose result is read back from its JSON."""
        record = Record(self.next_number, Kind.STEP.value, from_json(result_text(name, value)), failure)
        self.records[name] = record
        return record

    async def arecord(self, name: str, value: Any, failure: dict[str, str] | None) -> Record:
        """Do the same, in a coroutine."""
        return self.record(name, value, failure)

    def atomic_step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a part of the function once, in a transaction with its record."""
        return self.step(name, function, *args, **kwargs)

    def note_position(self, chunk: Chunk) -> None:
        """Note that the loop has done with these rows."""
        chunk.is_noted = True
        chunk.record.is_finished = chunk.is_last
        if chunk.position is not None:
            chunk.record.result = chunk.position

    def count_anew(self) -> None:
        """Note that something is recorded: attempts are counted anew."""

    def transaction_of(self, chunk: Chunk) -> AbstractContextManager[Any]:
        """Return the transaction of some rows."""
        return transaction.atomic(using=chunk.using, durable=True)

    def seconds_until(self, moment: datetime) -> float:
        """Return the seconds until a date. Without a worker, no time passes."""
        return 0.0

    def end_wait(self, name: str, event: str, seconds: float) -> Record:
        """End the wait for an event if it has come, or if its time is over. Return the record."""
        raise NotImplementedError

    def seconds_left(self, record: Record, seconds: float) -> float:
        """Return the seconds that are left of a wait."""
        return seconds


class PlainSteps(Steps):
    """The steps of a call without a worker: each is executed, nothing is recorded, and nothing waits."""

    def end(self, error: Exception) -> NoReturn:
        """Raise the error itself."""
        raise error

    def suspend(self, name: str, kind: Kind, seconds: float, event: str | None = None) -> Any:
        """Continue at once after a sleep. An event never comes."""
        if kind is Kind.EVENT:
            raise StepError(f"{name!r} waits for an event, which needs a worker. In a test: emit() and run_tasks().")


class NoSteps(Steps):
    """The steps of a function that cannot have any."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def begin(self, name: str, kind: Kind) -> Record | None:
        """Refuse it."""
        raise StepError(f"The step {name!r} is not possible: {self._why}")


def check_name(name: Any, what: str) -> None:
    """Raise ``StepError`` for a name that a row cannot hold."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or "\0" in name:
        raise StepError(f"The name of the {what} is {name!r}; give a text of 1 to {LONGEST_NAME} characters.")


def result_text(name: str, value: Any) -> str:
    """Return the result of a step as JSON. Raises ``TaskResultError``."""
    return to_json(value, what=f"The result of the step {name!r}", most=LARGEST_RESULT, kind=TaskResultError)


def idempotency_key(task_id: int, enqueued_at: str, name: str) -> str:
    """Return a key that is the same in each attempt. Ids may come again after a failover, so the date is part of it."""
    return hashlib.sha256(f"{task_id} {enqueued_at} {name}".encode()).hexdigest()[:32]
