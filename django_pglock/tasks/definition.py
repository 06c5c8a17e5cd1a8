"""A function that runs later, with our options: ``PostgresTask``, and ``@task`` for users and for type checkers.

It is the ``task_class`` of our backend. Django 6.1's own ``@task(max_attempts=5)`` makes it, and so does our typed
``task`` decorator on every version.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Protocol, TypedDict, TypeVar, overload

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from django_pglock.errors import TaskOptionError
from django_pglock.postgres.connections import has_commit_hooks, manual_transactions
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import make_templates, misfit
from django_pglock.tasks.claim import TaskContext, with_context
from django_pglock.tasks.compat import InvalidTask, Task, TaskResult
from django_pglock.tasks.fields import CARRIED, OPTIONS, By, TaskFields, check_names
from django_pglock.tasks.options import GroupOption, RateOption, UniqueOption
from django_pglock.tasks.redaction import RedactOption, redact_of
from django_pglock.tasks.retry import BackoffOption
from django_pglock.tasks.schedules import check_schedule
from django_pglock.tasks.step_records import TaskCall

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTask(TaskFields):
    """A task function whose options have been checked. Made by ``@task``, never by hand; see ``TaskFields``."""

    def __new__(cls, **options: Any) -> Self:
        # Django 6.1's own @task passes on all options. For an unknown one, Python's message would only name __init__.
        check_names(_where(options.get("func")), options.keys() - {"func"}, By.BOTH)
        task = object.__new__(cls)
        object.__setattr__(task, "given", options.keys())
        return task

    def __post_init__(self) -> None:
        if isgeneratorfunction(self.func) or isasyncgenfunction(self.func):
            raise InvalidTask(
                f"@task on {self.module_path}: a call of a generator function returns before its body runs. Iterate "
                "over it in another function, and decorate that."
            )
        self.check_values(where := f"@task on {self.module_path}")
        if len(self.given) <= len(OPTIONS):
            self._take_defaults()
        self._check_together(where)
        if isinstance(self.run_after, timedelta) and not issubclass(self.get_backend().task_class, PostgresTask):
            # Django's own backends, for tests and development, know only dates.
            object.__setattr__(self, "run_after", timezone.now() + self.run_after)
        if not self.is_own:
            # Not super(): without arguments it fails in a dataclass with slots, because that is a new class.
            Task.__post_init__(self)
        definition = registry.register(self)
        if definition is not self:
            own = {name: getattr(self, name) for name in CARRIED}
            carried = {name: value for name, value in own.items() if value != getattr(definition, name)}
            object.__setattr__(self, "carried", carried)

    def __reduce__(self) -> tuple[Any, ...]:
        # The same as in Django 6.1, for each version, and without the fields that __post_init__ fills.
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "func"}
        return _made_again, (self.module_path, options)

    def _take_defaults(self) -> None:
        """Take the options that only the settings give. Copies have them already."""
        defaults = {} if self.is_own else getattr(self.get_backend(), "defaults", {})
        for name in defaults.keys() - self.given:
            object.__setattr__(self, name, defaults[name])

    def _check_together(self, where: str) -> None:
        """Check the options that depend on the function or on each other."""
        problems = {
            "atomic=True needs a sync function; Django's transactions are not async.": self.atomic
            and iscoroutinefunction(self.func),
            "wait_for_disk=False needs atomic=True: only then the effects and the completion of a task are lost "
            "together, and never one without the other.": not (self.wait_for_disk or self.atomic),
            "group cannot be combined with rate.": self.group and self.rate,
            f"group cannot be combined with concurrency. Write Group(…, concurrency={self.concurrency!r}).": self.group
            and self.concurrency,
            "with lock, the runs of a group are one after the other, so Group takes no concurrency.": self.lock
            is not None
            and self.group
            and self.group.concurrency > 1,
            "with lock, rate cannot have its own key, because a task waits for one key only.": self.lock is not None
            and self.rate is not None
            and self.rate.key is not None,
            f"concurrency={self.concurrency!r} needs a key. Write it as lock.": self.concurrency and not self.lock,
            "on_conflict='replace' cannot be combined with after or after_ended, because a task cannot replace another "
            "one and wait for a third.": self.awaited and self.unique and self.unique.on_conflict == "replace",
            "advisory=True needs the name of a lock. Write it as lock.": self.advisory and not self.lock,
            "advisory cannot be combined with concurrency, because an advisory lock has one holder.": self.advisory
            and self.concurrency,
            "advisory cannot be combined with redact=True, which hides keys: users who may view locks see the name of "
            "an advisory lock.": self.advisory and self.redact is True,
        }
        for why, is_wrong in problems.items():
            if is_wrong:
                raise TaskOptionError(f"{where}: {why}")
        make_templates(self, where)
        object.__setattr__(self, "redact", redact_of(self.redact, self, where))
        object.__setattr__(self, "on_failure", _handler_of(self.on_failure, where))
        check_schedule(self, where)

    def enqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any]:
        """Write one call in the current transaction and return its result. In a coroutine: ``await aenqueue()``."""
        try:
            return Task.enqueue(self, *args, **kwargs)
        except SynchronousOnlyOperation as error:
            name = self.module_path.rpartition(".")[2]
            raise SynchronousOnlyOperation(
                f"{name}.enqueue() blocks the event loop. Write: await {name}.aenqueue(…)"
            ) from error

    def call_of(self, *args: Any, **kwargs: Any) -> TaskCall[Any]:
        """Return one call, with the options of this task, for ``context.gather()``. Nothing is enqueued or checked."""
        return TaskCall(self, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here, without a row. With ``takes_context`` it gets a context, unless one is given."""
        return Task.call(self, *with_context(self, args, kwargs), **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as ``call``, in a coroutine."""
        return await Task.acall(self, *with_context(self, args, kwargs), **kwargs)

    def enqueue_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue this call after the commits of all transactions that are open now, if all of them commit.

        For tasks that are stored in another database than their data. In the same database, ``enqueue()`` is part of
        the transaction. Without a transaction this enqueues at once. Arguments are checked at once. The name is that of
        Django's open proposal. Raises the same errors as ``enqueue()``, except ``DuplicateTask``, and Django's
        ``TransactionManagementError`` if the caller commits the transaction of another database itself: after its own
        BEGIN, and always while autocommit is off.
        """
        backend: Any = self.get_backend()
        if hasattr(backend, "check_call"):
            backend.check_call(self, args, kwargs)
        waits_for = {each.alias for each in connections.all(initialized_only=True) if has_commit_hooks(each)}
        # Beside other databases, the caller's own COMMIT in the tasks' database cannot be waited for either.
        own = None if waits_for else getattr(backend, "database", None)
        _refuse_manual_transactions(self.module_path, except_in=own)
        call: Callable[[], Any] = partial(self.enqueue, *args, **kwargs)
        if waits_for:
            _call_after_commits(waits_for, call)
        else:
            call()


def _handler_of(function: Any, where: str) -> str | None:
    """Return the path of the function of ``on_failure=``. A copy of a task has it already."""
    if function is None or isinstance(function, str):
        return function
    if not isinstance(function, TaskFields):
        raise TaskOptionError(f"{where}: on_failure is {function!r}; give a function that is decorated with @task.")
    path: str = function.module_path
    if why := misfit(function.func, function.takes_context, 1):
        raise TaskOptionError(f"{where}: on_failure is called with the id of the failed task, but {path} {why}")
    if function.has_keys:
        raise TaskOptionError(
            f"{where}: {path} of on_failure has lock, unique, group, fair or rate, and no arguments to make a key of. "
            "Give a function without them, which may enqueue another task."
        )
    return path


def _call_after_commits(waits_for: set[str], call: Callable[[], Any]) -> None:
    """Call a function after the last of these databases' commits; never, if one of them rolls back.

    Each database is asked at once. A savepoint or transaction that is open now, and is rolled back later, takes its
    database's function with it, so that the set never becomes empty.
    """

    def note_commit(alias: str) -> None:
        waits_for.discard(alias)
        if not waits_for:
            call()

    for alias in tuple(waits_for):
        transaction.on_commit(partial(note_commit, alias), using=alias)


def _refuse_manual_transactions(path: str, *, except_in: str | None) -> None:
    """Raise if a database has a transaction after whose commit Django calls no function."""
    for alias in manual_transactions():
        if alias != except_in:
            raise transaction.TransactionManagementError(
                f"{path}.enqueue_on_commit() cannot wait for the commit in database {alias!r}, because you "
                "send this commit yourself, and Django calls no function after it. Use transaction.atomic() there "
                "with autocommit on, or call enqueue() after your commit."
            )


def _where(function: Any) -> str:
    return f"@task on {getattr(function, '__qualname__', type(function).__name__)}"


def _made_again(path: str, options: dict[str, Any]) -> PostgresTask:
    """Return the task that was copied or pickled. In another process its module may not have been imported yet."""
    definition = registry.find(path) or import_string(path)
    return PostgresTask(func=definition.func, **options)


if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self, Unpack

    P = ParamSpec("P")

R = TypeVar("R")


if TYPE_CHECKING:

    class Result(TaskResult[P, R]):
        """The type of the result of a decorated function."""

        def wait(self, timeout: float | None = None) -> Self: ...
        async def await_(self, timeout: float | None = None) -> Self: ...

    class TaskFunction(Task[P, R]):
        """The type of a decorated function. R is the type of its return value, which is awaited if it is async."""

        def using(self, **options: Unpack[UsingOptions]) -> TaskFunction[P, R]: ...

        def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Result[P, R]: ...
        async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Result[P, R]: ...
        def enqueue_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def call_of(self, *args: P.args, **kwargs: P.kwargs) -> TaskCall[R]: ...
        def get_result(self, result_id: str) -> Result[P, R]: ...
        async def aget_result(self, result_id: str) -> Result[P, R]: ...

    class CallOptions(TypedDict, total=False):
        """The options that ``@task`` and ``using()`` take."""

        priority: int | None
        queue_name: str | None
        backend: str | None
        max_attempts: int | None
        max_snoozes: int | None
        atomic: bool | None
        timeout: float | timedelta | None
        lock: str | None
        concurrency: int | None
        unique: UniqueOption | None
        fair: str | None
        rate: RateOption | None
        on_failure: Task[[int], Any] | None
        expires: float | timedelta | datetime | None
        keep_result: float | timedelta | None
        meta: dict[str, Any] | None

    class UsingOptions(CallOptions, total=False):
        """The options of ``using()``. None does not change an option."""

        run_after: datetime | timedelta | None
        after: TaskResult[..., Any] | str | int | Iterable[TaskResult[..., Any] | str | int] | None
        after_ended: TaskResult[..., Any] | str | int | Iterable[TaskResult[..., Any] | str | int] | None

    class Options(CallOptions, total=False):
        """The options of ``@task`` that do not change how the function is called."""

        backoff: BackoffOption
        retry_on: type[BaseException] | tuple[type[BaseException], ...]
        no_retry_on: type[BaseException] | tuple[type[BaseException], ...]
        wait_for_disk: bool
        advisory: bool
        cron: str | None
        every: float | timedelta | None
        timezone: str | None
        redact: RedactOption
        capture_logs: bool | int | str | None

    class Decorator(Protocol):
        @overload
        def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> TaskFunction[P, R]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R]: ...

    class ContextDecorator(Protocol):
        @overload
        def __call__(
            self, function: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]], /
        ) -> TaskFunction[P, R]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[TaskContext, P], R], /) -> TaskFunction[P, R]: ...

    class GroupDecorator(Protocol):
        """The type of a function that gets a list of calls. The parameters of a call have no types."""

        @overload
        def __call__(self, function: Callable[..., Coroutine[Any, Any, R]], /) -> TaskFunction[..., R]: ...
        @overload
        def __call__(self, function: Callable[..., R], /) -> TaskFunction[..., R]: ...


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> TaskFunction[P, R]: ...


@overload
def task(function: Callable[P, R], /) -> TaskFunction[P, R]: ...


@overload
def task(*, group: GroupOption, takes_context: bool = ..., **options: Unpack[Options]) -> GroupDecorator: ...


@overload
def task(*, takes_context: Literal[True], group: None = ..., **options: Unpack[Options]) -> ContextDecorator: ...


@overload
def task(*, takes_context: Literal[False] = ..., group: None = ..., **options: Unpack[Options]) -> Decorator: ...


def task(function: Any = None, /, **options: Any) -> Any:
    """Decorate a module-level function so that it can be enqueued: ``send.enqueue(order_id=1)``.

    It is the same decorator as ``django.tasks.task``, typed, and with our options on each supported version of Django.
    ``TaskFields`` describes the options. Raises ``TaskOptionError`` for an option that does not exist, and
    ``InvalidTask`` for a generator, and for a function that a worker could not import.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if not callable(function):
            raise TaskOptionError(
                f"@task is given {function!r}, which is no function. Name each option: queue_name='mail'."
            )
        check_names(_where(function), options, By.FUNCTION)
        # Our class, whatever the backend is, so that the options also exist in tests with Django's ImmediateBackend.
        return PostgresTask(func=function, **options)

    return decorate if function is None else decorate(function)
