"""Steps: the parts of a task function that run once, by name. The rules, without a database.

A function with steps runs again from its beginning, in a later attempt or after a pause. A step that is recorded is not
executed again: it returns what it has returned, or raises what it has raised. So a function has one rule to keep: what
it decides between two steps depends only on its arguments, and on what its context has returned.

``store/steps.py`` records the steps of a worker's attempts. Here is what is common with a call without a worker, such
as ``send.call()``, which records nothing.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from inspect import isawaitable, iscoroutine
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.models import QuerySet
from django.db.models.manager import BaseManager
from django.db.models.query import ModelIterable
from django.utils.timezone import is_aware, make_aware

from django_pglock.errors import EventTimeout, StepError, StepFailed, StepsChanged, TaskOptionError, TaskResultError
from django_pglock.tasks.arguments import as_stored, with_article
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.instrumentation import observe_step
from django_pglock.tasks.retry import MAX_DELAY, duration
from django_pglock.tasks.step_records import (
    MOST_STEPS,
    Kind,
    Record,
    StepEnded,
    Suspension,
    TaskCall,
    flaw_of_name,
    result_text,
    told,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from django_pglock.tasks.fields import TaskFields

R = TypeVar("R")

#: Python 3.10 has no groups.
GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
#: Seconds for which a task is postponed that has steps of other code, and for which it is postponed again and again.
#: During a rolling deploy, a worker with the code of its steps takes it meanwhile.
POSTPONED, LONGEST_DEPLOY = 30.0, 600.0


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


class Steps:
    """The steps of one run of a function. ``refusal``: why it cannot have any."""

    def __init__(self, records: dict[str, Record] | None = None, *, refusal: str = "") -> None:
        self.records = {} if records is None else records
        self._refusal = refusal
        #: The names that the function has used in this run, and those for which it has asked.
        self._met: set[str] = set()
        self._asked: set[str] = set()
        self._last = 0
        self._running: str | None = None
        #: The loop over rows that has not ended, and that which the function has left before its end.
        self._loop: str | None = None
        self._left_loop: Chunk | None = None
        #: What has left the function. If it is swallowed, it is raised again.
        self._left: BaseException | None = None
        #: What the failed steps of this run have raised.
        self._causes: dict[str, Exception] = {}

    # What a function calls

    def step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a part of the function once: see ``TaskContext.step``."""
        if self.begin(name, Kind.STEP, blocks=True) is None:
            value, failure = None, None
            with self._executing(name):
                try:
                    value = self.call(name, function, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    failure = self.failed(name, error)
                self.record(name, value, failure)
        result: R = self._value(name)
        return result

    async def astep(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same for a coroutine function."""
        if self._left_loop is not None:
            # Its position is written by a statement.
            await sync_to_async(self._end_left_loop)()
        if self.begin(name, Kind.STEP) is None:
            value, failure = None, None
            with self._executing(name):
                try:
                    value = await self._awaitable(name, function, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a step may raise anything
                    failure = self.failed(name, error)
                # In the thread of coroutines for Django's ORM.
                await sync_to_async(self.record)(name, value, failure)
        return self._value(name)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function of a step."""
        value = self._checked(name, function)(*args, **kwargs)
        if iscoroutine(value):
            value.close()
            self.end(StepError(f"The step {name!r} calls a coroutine function. Write: await context.astep(...)."))
        return value

    def _awaitable(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = self._checked(name, function)(*args, **kwargs)
        if not isawaitable(value):
            text = f"The step {name!r} calls a function that is not awaitable. Give sync_to_async(function)."
            self.end(StepError(text))
        return value

    def _checked(self, name: str, function: Any) -> Callable[..., Any]:
        if not callable(function):
            text = f"The function of the step {name!r} is {function!r:.200}. Give the function, and then its arguments."
            self.end(StepError(text))
        return cast("Callable[..., Any]", function)

    def sleep(self, name: str, until: float | timedelta | datetime) -> None:
        """Continue the task later."""
        if self.begin(name, Kind.SLEEP) is None:
            if isinstance(until, datetime):
                date = until if is_aware(until) else make_aware(until)
                seconds = date.timestamp() - self.now()
            else:
                seconds = self._seconds(f"The sleep {name!r}", until)
            if seconds > 0:
                self.suspend(name, Kind.SLEEP, seconds=min(seconds, MAX_DELAY))

    def wait_for(self, event: str, timeout: float | timedelta | None, name: str | None = None) -> Any:
        """Return the payload of an event. Continue the task when it comes."""
        name = event if name is None else name
        if flaw := flaw_of_name(event, "event"):
            self.end(StepError(flaw))
        record = self.begin(name, Kind.EVENT)
        seconds = MAX_DELAY if timeout is None else self._seconds(f"The timeout of {name!r}", timeout)
        if record is None or not record.is_finished:
            left = seconds if record is None else max(0.0, record.started_at + seconds - self.now())
            # If its time is over, the settler ends the wait: here may be a coroutine, which must not wait for a server.
            self.suspend(name, Kind.EVENT, seconds=left, event=event)
        if record.failure is not None:
            raise EventTimeout(f"The event {event!r} has not come within {seconds:g} s.", step=name)
        return record.result

    def chunks(self, name: str, rows: Any, size: int) -> Iterator[Chunk]:
        """Yield the rows of a queryset in parts, by primary key, and note after each how far the loop is."""
        record = self.begin(name, Kind.CHUNKS, blocks=True)
        if not isinstance(size, int) or size < 1:
            self.end(StepError(f"The size of {name!r} is {size!r}; give a number of rows above zero."))
        if not _is_of_objects(rows):
            text = f"The rows of {name!r} are {with_article(type(rows).__name__)} that cannot be read in parts. Give a "
            self.end(StepError(f"{text}queryset of objects, without slices, union(), values() and distinct(field)."))
        if record is None:
            record = self.records[name] = Record(self.next_number, Kind.CHUNKS.value, is_finished=False)
        key, using = rows.model._meta.pk, rows._db or router.db_for_write(rows.model)  # noqa: SLF001
        rows = rows.order_by("pk")
        if not rows.query.standard_ordering:
            rows = rows.reverse()
        while not record.is_finished:
            later = rows if record.result is None else rows.filter(pk__gt=key.to_python(record.result))
            chunk = Chunk(later[:size], self, name, record)
            chunk.using = using
            chunk.is_last = len(chunk) < size
            if chunk:
                chunk.position = key.value_to_string(chunk[-1])
                self._loop = name
                try:
                    yield chunk
                except GeneratorExit:
                    # By a break, a return or an error. If the function continues, the loop is over in each later run.
                    self._left_loop = chunk
                    raise
                finally:
                    self._loop = None
            if not chunk.is_noted:
                self.note_position(chunk)
                self.count_anew()
            if not record.is_finished:
                self.check(name, blocks=True)

    def gather(self, name: str, calls: Iterable[TaskCall[R]]) -> list[TaskResult[..., R]]:
        """Enqueue children, and return their results when all have ended: see ``TaskContext.gather``."""
        record = self.begin(name, Kind.CHILDREN, blocks=True)
        if record is None:
            with self._executing(name):
                prepared = self.prepare(name, calls)
            if prepared:
                self.suspend(name, Kind.CHILDREN, calls=prepared)
            self.record(name, {"children": []}, None, Kind.CHILDREN)
        elif not record.is_finished:
            self.end_gather(name)
        results: list[TaskResult[..., R]] = self._value(name)
        return results

    def checked(self, name: str, calls: Iterable[Any]) -> Iterator[TaskCall[Any]]:
        """Yield the calls of a gather. What is none ends it."""
        for call in calls:
            if not isinstance(call, TaskCall):
                text = (
                    f"The gather {name!r} was given {call!r:.200}. Give calls that are not enqueued: "
                    "context.gather(name, [task.call_of(...), ...])."
                )
                self.end(StepError(text))
            yield call

    async def agather(self, name: str, calls: Iterable[TaskCall[R]]) -> list[TaskResult[..., R]]:
        """Do the same in a coroutine."""
        return await sync_to_async(self.gather)(name, calls)

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        record = self.records.get(name)
        return record is not None and (record.is_finished or record.kind == Kind.SLEEP.value)

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._value(name)

    # The rules

    def begin(self, name: str, kind: Kind, *, blocks: bool = False) -> Record | None:
        """Note that the function has come to a step. Return its record, None if it has to be executed.

        ``blocks``: it sends statements here, so it must not be called in an event loop.
        """
        if self._left is not None and not isinstance(self._left, Suspension):
            raise self._left
        if why := flaw_of_name(name, "step") or self._misuse(name):
            self.end(StepError(why))
        self._end_left_loop()
        self._met.add(name)
        record = self.records.get(name)
        if record is None:
            self.check(name, blocks=blocks)
        elif record.kind != kind.value or record.number < self._last:
            self._refuse_change(f"{name!r} was recorded as {record.kind} number {record.number}")
        else:
            self._last = record.number
        return record

    def _misuse(self, name: str) -> str:
        """Return why the function must not call this step now; an empty string if it may."""
        if self._refusal:
            return f"The step {name!r} is not possible: {self._refusal}"
        if isinstance(self._left, Suspension):
            return f"The step {name!r} is called {self._after(self._left)}"
        if self._loop is not None:
            return (
                f"The step {name!r} is called in the loop {self._loop!r}, which does not repeat its lists, so {name!r} "
                "would be missing in a later run. Call the function without a step, or enqueue a task for each list."
            )
        if self._running is not None:
            return (
                f"The step {name!r} is called while the step {self._running!r} runs. Steps are neither nested nor "
                "concurrent: call it after that one, or enqueue a task for each part."
            )
        if name in self._met:
            return f"The step {name!r} is called twice in one run. Give each its own name: f'{{name}} {{key}}'."
        if name not in self.records and len(self.records) >= MOST_STEPS:
            return f"The step {name!r} would be number {MOST_STEPS + 1:,} of its task."
        return ""

    @staticmethod
    def _after(left: Suspension) -> str:
        text = f"after {left.name!r} has suspended the task. An except or finally of the function has caught"
        return f"{text} BaseException. Catch Exception."

    def _end_left_loop(self) -> None:
        """Note that a loop which the function has left is over, before another step comes after it."""
        left, self._left_loop = self._left_loop, None
        if left is not None:
            left.is_last = True
            self.note_position(left)
            self.count_anew()

    def finish(self) -> None:
        """Check that the function may end now. Raises ``StepError`` and ``StepsChanged``.

        If it has swallowed the error of a step, that is raised again.
        """
        if isinstance(self._left, Suspension):
            raise StepError(f"The function has returned {self._after(self._left)}") from self._left
        if self._left is not None:
            raise self._left
        if self._running is not None:
            raise StepError(f"The function has returned while its step {self._running!r} runs. Await it.")
        met = self._met | self._asked
        if missed := [name for name in self.records if name not in met]:
            self._refuse_change(f"{', '.join(map(repr, missed))} was recorded and not called")

    def _refuse_change(self, why: str) -> NoReturn:
        text = (
            f"The function has changed since this task began: {why}. Recorded: {list(self.records)}; called in this "
            f"run: {[name for name in self.records if name in self._met]} and new names. Write `if 'name' in "
            "context.steps` for what tasks of the old code have recorded."
        )
        self.postpone(text)
        self.end(StepsChanged(text))

    def suspend(self, name: str, kind: Kind, **until: Any) -> NoReturn:
        """Leave the function. ``until``: see ``Suspension``."""
        number = self.records[name].number if name in self.records else self.next_number
        self.leave(Suspension(name, kind, number, **until))

    def end(self, error: Exception) -> NoReturn:
        """Leave the function by the error of a step."""
        self.leave(StepEnded(error))

    def leave(self, by: BaseException) -> NoReturn:
        """Leave the function."""
        self._left = by
        raise by from None

    def what_left(self, error: BaseException) -> BaseException:
        """Return how the function was left: by a step, also if a group of exceptions has it, or by the step's error."""
        left = self._left if self._left is not None and isinstance(error, GROUP) else error
        if not isinstance(left, StepEnded):
            return left
        # Our own errors get the traceback that has the line of the function.
        is_own = isinstance(left.error, (StepError, TaskResultError))
        return left.error.with_traceback(left.__traceback__) if is_own else left.error

    @property
    def next_number(self) -> int:
        """The number of the next new record."""
        # They are in the order of their numbers.
        return next((each.number for each in reversed(self.records.values())), 0) + 1

    def _seconds(self, what: str, value: Any) -> float:
        """Return the seconds of a duration."""
        try:
            return duration(what, value)
        except TaskOptionError as error:
            self.end(StepError(str(error)))

    @contextmanager
    def _executing(self, name: str) -> Iterator[None]:
        self._running = name
        observed, failure = observe_step(name), None
        try:
            yield
        except Exception as error:
            failure = told(error)
            raise
        except StepEnded as ended:
            failure = told(ended.error)
            raise
        finally:
            self._running = None
            observed.ended(failure or (name in self.records and self.records[name].failure) or None)

    def _value(self, name: str) -> Any:
        record = self.records[name]
        if record.failure is not None:
            raise StepFailed(name, record.failure["path"], record.failure["message"]) from self._causes.get(name)
        return self.results_of(record) if record.kind == Kind.CHILDREN.value else record.result

    def failed(self, name: str, error: Exception) -> dict[str, str]:
        """Return what to record of a step that has raised. Otherwise raise, if it is tried again."""
        failure = self.failure_of(error)
        self._causes[name] = error
        return failure

    # What a worker does in another way

    def start(self, has_to_end: Callable[[], bool]) -> None:
        """Note that the function is called now. ``has_to_end`` asks whether its process must end, or raises."""

    def check(self, name: str, *, blocks: bool) -> None:
        """Raise if a new step cannot be executed here."""

    def postpone(self, why: str) -> None:
        """Leave the function if a worker with other code may continue it."""

    def failure_of(self, error: Exception) -> dict[str, str]:
        """Return what to record of a step that has raised, if its attempts are spent. Otherwise raise."""
        raise error

    def record(self, name: str, value: Any, failure: dict[str, str] | None, kind: Kind = Kind.STEP) -> None:
        """Record how a step has ended, with its result as each later run gets it."""
        result = as_stored(result_text(name, value))
        self.records[name] = Record(self.next_number, kind.value, result, failure)

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

    def now(self) -> float:
        """Return the time of the server, in seconds since the epoch. Without a worker, it is this host's."""
        return time()

    def prepare(self, name: str, calls: Iterable[TaskCall[Any]]) -> list[tuple[TaskFields, Any]]:
        """Return the calls of children, each with its task, as they are written."""
        raise NotImplementedError

    def end_gather(self, name: str) -> None:
        """End the wait for the children if all have ended. Otherwise leave the function again."""
        raise NotImplementedError

    def results_of(self, record: Record) -> list[TaskResult[..., Any]]:
        """Return the results of the children of a record, in the order of their calls."""
        raise NotImplementedError


class PlainSteps(Steps):
    """The steps of a call without a worker: each is executed, nothing is recorded, and nothing waits."""

    def end(self, error: Exception) -> NoReturn:
        """Raise the error itself."""
        raise error

    def suspend(self, name: str, kind: Kind, **until: Any) -> Any:
        """Continue at once after a sleep. An event never comes."""
        if kind is Kind.EVENT:
            raise StepError(f"{name!r} waits for an event, which needs a worker. In a test: emit() and run_tasks().")

    def gather(self, name: str, calls: Iterable[TaskCall[R]]) -> list[TaskResult[..., R]]:
        """Call the functions of the children at once, one after the other."""
        self.begin(name, Kind.CHILDREN)
        with self._executing(name):
            return [call.here() for call in self.checked(name, calls)]


def _is_of_objects(rows: Any) -> bool:
    """Return whether these are a queryset, or a manager, whose objects can be read in parts."""
    rows = rows.all() if isinstance(rows, BaseManager) else rows
    if not isinstance(rows, QuerySet) or not issubclass(rows._iterable_class, ModelIterable):  # noqa: SLF001
        return False
    return not (rows.query.is_sliced or rows.query.combinator or rows.query.distinct_fields)
