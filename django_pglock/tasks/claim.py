"""The right to run one attempt of one task, and what its function gets of it: the context of ``takes_context=True``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from time import time
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from django.conf import settings
from django.utils.timezone import make_naive

from django_pglock.errors import TaskCancelled, TaskStopped, TaskTimeout
from django_pglock.tasks import compat
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.call_keys import misfit
from django_pglock.tasks.calls import Calls
from django_pglock.tasks.options import OWN_META
from django_pglock.tasks.results import make_result
from django_pglock.tasks.step_records import TaskCall, idempotency_key
from django_pglock.tasks.steps import Chunk, PlainSteps, Steps

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

R = TypeVar("R")

#: The attributes of log records about a task.
LOG_FIELDS = ("task_id", "task_path", "queue", "attempt", "worker")


#: The claim whose function runs in this thread or coroutine.
running_claim: ContextVar[Claim | None] = ContextVar("django_pglock_running_claim", default=None)


def date_of(seconds: float | None) -> datetime | None:
    """Return seconds since the epoch as a date, to the microsecond; without ``USE_TZ`` it is naive."""
    if seconds is None:
        return None
    date = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return date if settings.USE_TZ else make_naive(date)


@dataclass(slots=True, eq=False)
class Claim:
    """One claimed attempt: the task's row as the claiming statement returned it.

    ``id`` and ``attempt`` together are the fence: each later write checks that the row still has both. ``args``,
    ``kwargs`` and ``meta`` are JSON texts, and dates are texts of seconds since the epoch. Code that needs a value
    decodes it.
    """

    id: int
    attempt: int
    worker: UUID
    backend: str
    queue: str
    priority: int
    task_path: str
    args: str = "[]"
    kwargs: str = "{}"
    meta: str = "{}"
    retries: int = 0
    max_retries: int = 0
    rescues: int = 0
    run_after: str | None = None
    enqueued_at: str = "0"
    #: None: this is the first claim of the task.
    started_at: str | None = None
    last_attempted_at: str = "0"
    lock_key: str | None = None
    #: The number of earlier claims that do not count as attempts, because they were given back or snoozed.
    uncounted: int = 0
    #: Whether a cancel of the task was requested.
    is_cancelled: bool = False
    #: The last progress that the function has reported, and the progress in the table, as JSON texts.
    progress: str | None = None
    written_progress: str | None = None
    #: The log records of the attempt, if its function has ``capture_logs``; empty if there are none.
    log: str | None = None

    def date(self, name: str) -> datetime | None:
        """Return one of the dates as a value."""
        text: str | None = getattr(self, name)
        if text is None and name == "started_at":
            text = self.last_attempted_at
        return date_of(None if text is None else float(text))

    @property
    def due_at(self) -> float:
        """When the task was due, in seconds since the epoch."""
        enqueued_at = float(self.enqueued_at)
        return enqueued_at if self.run_after is None else max(enqueued_at, float(self.run_after))

    @property
    def waited(self) -> float:
        """For how many seconds the task was due until this claim."""
        return max(0.0, float(self.last_attempted_at) - self.due_at)

    @property
    def is_first(self) -> bool:
        """Whether this is the first attempt, so that there are no failed attempts to read."""
        return self.number == 1

    @property
    def number(self) -> int:
        """The number of the attempt for people. ``attempt`` is the number of the claim."""
        return self.attempt - self.uncounted

    def __repr__(self) -> str:
        return f"<Claim of task {self.id} ({self.task_path}) attempt {self.number}>"

    def __str__(self) -> str:
        # The largest number of attempts, as far as it is known now. Each rescue or interruption adds one.
        most = self.number + self.max_retries - self.retries
        return f"Task {self.id} ({self.task_path}) attempt {self.number} of {most}"

    def in_result(self) -> dict[str, Any]:
        """Return what ``make_result`` takes from a claim while its function runs."""
        dates = {name: self.date(name) for name in ("enqueued_at", "started_at", "last_attempted_at")}
        return {"id": self.id, "status": "RUNNING", "backend": self.backend, **dates}

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the task for log records, by the names in ``LOG_FIELDS``."""
        values = (self.id, self.task_path, self.queue, self.number, str(self.worker))
        return dict(zip(LOG_FIELDS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[type-arg, misc]
    """The context of one attempt: Django's, with additional methods for a running task."""

    _claims: Sequence[Claim] = field(repr=False)
    _reason_to_stop: Callable[[], TaskTimeout | TaskCancelled | None] = field(repr=False)
    _steps: Steps = field(repr=False, compare=False, default_factory=PlainSteps)

    def check(self) -> None:
        """Raise ``TaskStopped`` if a cancel of this task was requested, or if its time is over.

        This is cheap, because it sends no query.
        """
        if (reason := self._reason_to_stop()) is not None:
            raise TaskStopped(reason)

    def progress(self, done: float, total: float | None = None) -> None:
        """Report the progress of the task: ``done`` units out of ``total`` (None: not known).

        The worker writes the last value to the task's ``progress`` about once a second, in its own session, so you may
        call this as often as you like. Raises ``TaskStopped`` as ``check()`` does, and ``TaskArgumentsError`` for
        values that are not numbers in JSON.
        """
        text = to_json({"done": done, "total": total}, what="The progress of a task")
        for claim in self._claims:
            claim.progress = text
        self.check()

    def step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run ``function(*args, **kwargs)`` once in the life of the task, and return its result in each run.

        - ``name``: the name of the step, each in a run another one. Up to 200 characters.

        The result is recorded as JSON, of at most 1 MiB, in a transaction of its own. If a worker dies between the
        function and its record, the function is called again. An exception ends the attempt, and the step is tried
        again by ``max_attempts``, ``backoff`` and ``retry_on`` of the task, counted since the last record. Then it is
        recorded, and ``StepFailed`` is raised here, in each run. The task fails with ``StepError`` if the step is
        nested, concurrent or inside of ``atomic()``, or if the name was used before. If the function has changed, the
        task is postponed for up to ten minutes, and then fails with ``StepsChanged``.
        """
        return self._steps.step(name, function, *args, **kwargs)

    async def astep(self, name: str, function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any) -> R:
        """Do the same as ``step()`` for a coroutine function, in a coroutine."""
        result: R = await self._steps.astep(name, function, *args, **kwargs)
        return result

    def atomic_step(self, name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Do the same as ``step()`` in a transaction with the record: what the function writes is written once."""
        return self._steps.atomic_step(name, function, *args, **kwargs)

    def chunks(self, name: str, rows: Any, size: int = 1000) -> Iterator[Chunk]:
        """Yield the rows of a queryset in lists of up to ``size``, in the order of the primary key.

        The position is recorded after each list, so that the task continues behind it. If a worker dies in between, one
        list comes again. As a context, ``with rows:``, a list is a transaction in which its position is written as
        well, so that what the block writes is written once.
        """
        return self._steps.chunks(name, rows, size)

    def sleep(self, name: str, until: float | timedelta | datetime) -> None:
        """Continue the task later: after seconds or a timedelta, or at a date, by the clock of the server.

        Meanwhile the task is a row: it occupies no thread, and keeps its lock key, unless the key has ``concurrency``.
        The function is left, and called again when the time has come. A date in the past does not suspend it.
        """
        self._steps.sleep(name, until)

    def wait_for(self, event: str, *, timeout: float | timedelta | None, name: str | None = None) -> Any:
        """Return the payload of an event, as soon as somebody calls ``emit(event, payload)``, also before this call.

        - ``timeout``: seconds or a timedelta after which ``EventTimeout`` is raised; None: up to ten years.
        - ``name``: the name of the step; None: that of the event.

        Meanwhile the task is a row, as in ``sleep()``.
        """
        return self._steps.wait_for(event, timeout, name)

    def gather(self, name: str, calls: Iterable[TaskCall[R]]) -> list[compat.TaskResult[..., R]]:
        """Enqueue calls as tasks, and return their ``TaskResult`` objects, in order, when all have ended.

        - ``name``: the name of the step.
        - ``calls``: those that ``task.call_of(...)`` returns, also of several functions. They are read in the run that
          enqueues them, and in no other.

        Either all calls are enqueued or none. Meanwhile the task is a row, as in ``sleep()``. It continues whatever the
        status of the calls is, and each later run gets the same results. If the task is cancelled, so are the calls
        that have not ended. Raises ``TaskArgumentsError`` and ``InvalidTask`` as ``enqueue()`` does, and ``StepError``
        as ``step()`` does, also for a call that would never begin: it needs the lock key that this task keeps.
        """
        return self._steps.gather(name, calls)

    async def agather(self, name: str, calls: Iterable[TaskCall[R]]) -> list[compat.TaskResult[..., R]]:
        """Do the same as ``gather()``, in a coroutine."""
        return await self._steps.agather(name, calls)

    @property
    def steps(self) -> Steps:
        """What is recorded: ``"charge" in context.steps``, and ``context.steps["charge"]`` for the result."""
        return self._steps

    def idempotency_key(self, name: str) -> str:
        """Return a key for another system, which is the same in each attempt, and no other's also after a failover."""
        return idempotency_key(self._claims[0].id, self._claims[0].enqueued_at, name)

    @property
    def meta(self) -> dict[str, Any]:
        """The dict that was given as ``using(meta=...)`` when the task was enqueued."""
        meta: dict[str, Any] = from_json(self._claims[0].meta)
        return {name: value for name, value in meta.items() if name not in OWN_META}

    @property
    def fencing_token(self) -> int:
        """A number that grows with each attempt of this task. With it, other systems can refuse a late attempt."""
        return self._claims[0].attempt


class ForeignContext(compat.TaskContext):  # type: ignore[type-arg]
    """The context of another backend of ``django.tasks``. It names what only this package's backend has."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(TaskContext, name):
            raise AttributeError(f"A context has no {name!r}.", name=name, obj=self)
        raise AttributeError(
            f"context.{name} needs django_pglock.backend.PostgresBackend, and this task runs on the backend "
            f"{self.task_result.backend!r} of TASKS, which is another one.",
            name=name,
            obj=self,
        )


def with_context(task: TaskFields, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call without a worker, with a context if the function takes one and gets none.

    A list of calls becomes that of a function with a group.
    """
    if task.group is not None:
        args = tuple(Calls(each) if type(each) is list else each for each in args)
    if task.takes_context and args and type(args[0]) is compat.TaskContext:
        return (ForeignContext(task_result=args[0].task_result), *args[1:])
    if not task.takes_context or (args and isinstance(args[0], compat.TaskContext)):
        return args
    # A test may give any object as the context. Then only the arguments as they are fit the function.
    if misfit(task.func, True, len(args), *kwargs) and not misfit(task.func, False, len(args), *kwargs):
        return args
    return (context_of(task, args, kwargs), *args)


def context_of(task: TaskFields, args: tuple[Any, ...], kwargs: dict[str, Any], *, attempt: int = 1) -> TaskContext:
    """Return the context of an attempt that is never stopped."""
    now = str(time())
    claim = Claim(
        id=0,
        attempt=attempt,
        worker=UUID(int=0),
        backend=task.backend,
        queue=task.queue_name,
        priority=task.priority,
        task_path=task.module_path,
        meta=to_json(task.meta),
        enqueued_at=now,
        last_attempted_at=now,
    )
    result = make_result(
        task, args=list(args), kwargs=kwargs, worker_ids=[str(claim.worker)] * attempt, **claim.in_result()
    )
    return TaskContext(task_result=result, _claims=[claim], _reason_to_stop=lambda: None)
