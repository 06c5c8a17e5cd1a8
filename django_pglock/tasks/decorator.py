"""``@task`` for users and for type checkers. It returns an object of the class in ``definition.py``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Protocol, TypedDict, TypeVar, overload

from django_pglock.tasks.compat import Task, TaskResult
from django_pglock.tasks.context import TaskContext
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.fields import OF_FUNCTION, check_names
from django_pglock.tasks.options import GroupOption, RateOption, UniqueOption
from django_pglock.tasks.redaction import RedactOption
from django_pglock.tasks.retry import BackoffOption

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
        keep_result: float | timedelta | None
        meta: dict[str, Any] | None

    class UsingOptions(CallOptions, total=False):
        """The options of ``using()``. None does not change an option."""

        run_after: datetime | timedelta | None
        after: TaskResult[..., Any] | str | int | Iterable[TaskResult[..., Any] | str | int] | None

    class Options(CallOptions, total=False):
        """The options of ``@task`` that do not change how the function is called."""

        backoff: BackoffOption
        retry_on: type[BaseException] | tuple[type[BaseException], ...]
        no_retry_on: type[BaseException] | tuple[type[BaseException], ...]
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
        check_names(function, options, OF_FUNCTION)
        # Our class, whatever the backend is, so that the options also exist in tests with Django's ImmediateBackend.
        return PostgresTask(func=function, **options)

    return decorate if function is None else decorate(function)
