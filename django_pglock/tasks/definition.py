"""``@task``: a function that runs later, with our options.

``PostgresTask`` is the ``task_class`` of our backend. Django 6.1's own ``@task(max_attempts=5)`` makes it, and so does
our typed ``task`` decorator on every version.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Protocol, TypedDict, TypeVar, overload

from django.db import connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from django_pglock.errors import TaskOptionError
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import check_templates
from django_pglock.tasks.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    InvalidTask,
    Task,
    TaskResult,
)
from django_pglock.tasks.context import OWN_META, TaskContext
from django_pglock.tasks.options import (
    Group,
    GroupOption,
    Rate,
    RateOption,
    Unique,
    UniqueOption,
    check_concurrency,
    check_template,
    group_of,
    rate_of,
    unique_of,
)
from django_pglock.tasks.redaction import RedactOption, redact_of
from django_pglock.tasks.retry import DEFAULT_BACKOFF, BackoffOption, check_backoff, duration_of
from django_pglock.tasks.schedules import check_schedule

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self, Unpack

    P = ParamSpec("P")

R = TypeVar("R")

#: Options of one call that travel in the row's ``meta``; the others have a column or belong to the function.
CARRIED_OPTIONS = ("atomic", "timeout", "max_snoozes")
#: Options that only the decorator takes: what they hold is code or concerns the function as a whole.
DECORATOR_ONLY = ("backoff", "retry_on", "no_retry_on", "group", "cron", "every", "timezone", "redact", "advisory")
#: Options of one call only.
CALL_ONLY = ("run_after", "after")
#: PostgreSQL's smallint, less one for the first attempt.
MOST_ATTEMPTS = 32_767


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTask(Task):  # type: ignore[type-arg]
    """A task function with what it asks for. Made by ``@task``, never by hand.

    Besides Django's own fields:

    - ``max_attempts``: how often the function may be tried, the first time included. Default 1: no retry.
    - ``max_snoozes``: how often the task may ``raise Snooze``; the next one ends it as FAILED. Default: no limit.
    - ``backoff``: the wait before the next attempt; seconds, a timedelta, ``Constant``, ``Linear``, ``Exponential`` or
      ``fn(exception, task_result)``. Default: exponential from one second to ten minutes, with full jitter.
    - ``retry_on``, ``no_retry_on``: exception types that are retried (default: every ``Exception``) or never are.
    - ``atomic``: run the function in a transaction together with its own completion, so that its database effects
      happen exactly once even when the worker is killed.
    - ``timeout``: seconds or a timedelta that one attempt may take.
    - ``lock``: a template such as ``"order:{order_id}"``; tasks of one key never run together, whatever their
      functions, and begin in the order in which they were enqueued. ``concurrency``: how many of them may.
    - ``advisory``: hold the advisory lock of the same name as ``lock`` makes while the function runs, as
      ``with lock(...)`` elsewhere in the project does.
    - ``unique``: True, a template or ``Unique``: no second task like one that waits.
    - ``group``: a template or ``Group``: what waits under one key is passed to one call, as a list.
    - ``fair``: a template; keys take turns, so that nobody's million tasks hold up another's ten.
    - ``rate``: ``"10/s"`` or ``Rate``: so many starts in so much time.
    - ``keep_result``: seconds or a timedelta after which the finished row may go.
    - ``redact``: names of arguments, or of keys inside of them, that people are not shown, such as ``("card",
      "password")``; ``"return"`` is the result, True all of it. The row keeps the values.
    - ``cron`` (with ``timezone``) or ``every``: enqueue it by the clock, each tick once.

    Of one call, with ``using()``: ``run_after``, which also takes a ``timedelta``, counted by the database's clock;
    ``after``, results or ids of tasks that have to succeed first, or one. ``meta``, a dict that travels with the task,
    is for both.
    """

    # Declared again because Django 6.0 has no defaults for them.
    priority: int = DEFAULT_TASK_PRIORITY
    backend: str = DEFAULT_TASK_BACKEND_ALIAS
    queue_name: str = DEFAULT_TASK_QUEUE_NAME
    run_after: datetime | timedelta | None = None  # type: ignore[assignment]

    max_attempts: int = 1
    max_snoozes: int | None = None
    backoff: BackoffOption = DEFAULT_BACKOFF
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    no_retry_on: tuple[type[BaseException], ...] = ()
    atomic: bool = False
    timeout: float | timedelta | None = None
    lock: str | None = None
    concurrency: int | None = None
    advisory: bool = False
    unique: Unique | None = None
    group: Group | None = None
    fair: str | None = None
    rate: Rate | None = None
    keep_result: float | timedelta | None = None
    cron: str | None = None
    every: float | timedelta | None = None
    timezone: str | None = None
    redact: tuple[str, ...] | bool = ()
    after: tuple[int, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict, hash=False)

    #: What differs from the decorated definition and travels with the row; empty for the definition itself.
    carried: dict[str, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)
    #: The number of the backend that has found it valid. What is made from it begins anew.
    valid_for: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_function()
        self._check_options(where := f"@task on {self.module_path}")
        self._check_call(where)
        if isinstance(self.run_after, timedelta) and not issubclass(self.get_backend().task_class, PostgresTask):
            # Django's own backends, for tests and development, know only dates.
            object.__setattr__(self, "run_after", timezone.now() + self.run_after)
        # Not super(): without arguments it fails in a dataclass with slots, which is a new class.
        Task.__post_init__(self)
        definition = registry.register(self)
        if definition is not self:
            own = {name: getattr(self, name) for name in CARRIED_OPTIONS}
            carried = {name: value for name, value in own.items() if value != getattr(definition, name)}
            object.__setattr__(self, "carried", carried)

    def __reduce__(self) -> tuple[Any, ...]:
        # As Django 6.1 has it, on every version, and without the fields that __post_init__ fills in.
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "func"}
        return _made_again, (self.module_path, options)

    @property
    def has_keys(self) -> bool:
        """Whether calls of this task have keys, so that their arguments are looked at when they are enqueued."""
        return any((self.lock, self.unique, self.group, self.fair, self.rate))

    @property
    def is_plain(self) -> bool:
        """Whether a call of this task is a row and nothing else."""
        return not self.has_keys and not self.after and self.keep_result is None

    def _check_function(self) -> None:
        if not hasattr(self.func, "__qualname__"):
            raise InvalidTask(
                f"@task was given a {type(self.func).__name__}; decorate a function that is defined in a module."
            )
        if isgeneratorfunction(self.func) or isasyncgenfunction(self.func):
            raise InvalidTask(
                f"@task on {self.module_path}: a call of a generator returns before its work is done; go through it in "
                "a function."
            )

    def _check_options(self, where: str) -> None:
        attempts = self.max_attempts
        if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MOST_ATTEMPTS:
            raise TaskOptionError(f"{where}: max_attempts is {attempts!r}; give a number from 1 to {MOST_ATTEMPTS:,}.")
        snoozes = self.max_snoozes
        if snoozes is not None and (not isinstance(snoozes, int) or isinstance(snoozes, bool) or snoozes < 0):
            raise TaskOptionError(f"{where}: max_snoozes is {snoozes!r}; give a number, zero or more.")
        if self.atomic and iscoroutinefunction(self.func):
            raise TaskOptionError(f"{where}: atomic=True needs a sync function; Django's transactions are not async.")
        check_backoff(self.backoff)
        for name in ("retry_on", "no_retry_on"):
            types = getattr(self, name)
            types = tuple(types) if isinstance(types, Iterable) else (types,)
            if not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
                raise TaskOptionError(f"{where}: {name} takes exception types, not {types!r}.")
            object.__setattr__(self, name, types)
        self._check_keys(where)
        for name in ("timeout", "keep_result", "every"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, duration_of(value, option=f"{where}: {name}"))
        check_schedule(self, where)

    def _check_call(self, where: str) -> None:
        if not isinstance(self.run_after, (datetime, timedelta, NoneType)):
            raise TaskOptionError(f"{where}: run_after is {self.run_after!r}; give a datetime or a timedelta.")
        if not isinstance(self.meta, dict):
            raise TaskOptionError(f"{where}: meta is {self.meta!r}; give a dict.")
        if own := sorted(set(OWN_META) & set(self.meta)):
            raise TaskOptionError(
                f"{where}: meta has {', '.join(own)}, which the package keeps there itself; rename it."
            )
        object.__setattr__(self, "after", _task_ids(self.after))

    def _check_keys(self, where: str) -> None:
        for name, make in (("unique", unique_of), ("group", group_of), ("rate", rate_of)):
            object.__setattr__(self, name, make(getattr(self, name)))
        if self.group is not None and (self.lock is not None or self.rate is not None or self.concurrency is not None):
            raise TaskOptionError(f"{where}: group has a lock of its own; leave out lock, concurrency and rate.")
        if self.rate is not None and self.rate.key is not None and self.lock is not None:
            raise TaskOptionError(f"{where}: a task waits at one key; with lock, rate has no key of its own.")
        if self.concurrency is not None:
            if self.lock is None:
                raise TaskOptionError(f"{where}: concurrency={self.concurrency!r} of what? Name the key with lock.")
            check_concurrency(self.concurrency)
        self._check_advisory(where)
        for name in ("lock", "fair"):
            if (template := getattr(self, name)) is not None:
                check_template(template, option=f"{where}: {name}")
        check_templates(self, where)
        object.__setattr__(self, "redact", redact_of(self.redact, self, where))

    def _check_advisory(self, where: str) -> None:
        if not self.advisory:
            return
        if self.lock is None:
            raise TaskOptionError(f"{where}: advisory=True of which name? Write it as lock.")
        if self.concurrency is not None:
            raise TaskOptionError(f"{where}: an advisory lock has one holder; leave out concurrency or advisory.")
        if self.redact is True:
            raise TaskOptionError(
                f"{where}: the name of an advisory lock is shown to those who may see locks, and redact=True hides the "
                "keys; leave out one of them."
            )

    def using(self, **changes: Any) -> Self:
        """Return a copy with other options for the calls made through it.

        Takes Django's ``priority queue_name run_after backend`` and all of ours but those that belong to the function:
        ``backoff``, the exception types, ``group`` and the schedule. None leaves an option as it is. Raises
        ``TaskOptionError`` for any other name.
        """
        for name in changes:
            if name in DECORATOR_ONLY:
                raise TaskOptionError(f"{name} is set in @task on {self.module_path}; a single call cannot change it.")
            if name not in _CHANGEABLE:
                raise TaskOptionError(f"using() has no option {name!r}; it takes {', '.join(_CHANGEABLE)}.")
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def enqueue_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue this call once the transactions that are open now, in all databases, are committed.

        For tasks that live in another database than the data they are about; in the same one ``enqueue()`` is a part of
        the transaction anyway. Without a transaction it enqueues at once. Arguments are checked at once. The name is
        that of Django's open proposal. Raises what ``enqueue()`` raises, except ``DuplicateTask``.
        """
        check_call = getattr(self.get_backend(), "check_call", None)
        if check_call is not None:
            check_call(self, args, kwargs)
        call: Callable[[], Any] = partial(self.enqueue, *args, **kwargs)
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                call = partial(transaction.on_commit, call, using=connection.alias)
        call()

    def can_retry(self, error: BaseException) -> bool:
        """Say whether this exception is one to try again after."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.no_retry_on)


_OPTIONS = {each.name for each in fields(PostgresTask) if each.init} - {"func", *CALL_ONLY}
_CHANGEABLE = sorted({*_OPTIONS, *CALL_ONLY} - {"takes_context", *DECORATOR_ONLY})


def _task_ids(after: Any) -> tuple[int, ...]:
    # One result or id is what people mean by it. An id is a text, and its digits are no ids.
    is_one = isinstance(after, (str, int)) or hasattr(after, "id")
    try:
        return tuple(map(_task_id, (after,) if is_one else after))
    except TypeError:
        raise TaskOptionError(f"after takes results or their ids, not {after!r}.") from None


def _made_again(path: str, options: dict[str, Any]) -> PostgresTask:
    """Return the task that was copied or pickled. In another process its module may not have been imported yet."""
    definition = registry.find(path) or import_string(path)
    return PostgresTask(func=definition.func, **options)


def _task_id(value: Any) -> int:
    text = str(getattr(value, "id", value))
    if not (text.isascii() and text.isdigit()):
        raise TaskOptionError(f"after takes results or their ids, not {value!r}.")
    return int(text)


if TYPE_CHECKING:

    class Result(TaskResult[P, R]):
        """What a type checker sees of the result of a decorated function."""

        def wait(self, timeout: float | None = None) -> Self: ...
        async def await_(self, timeout: float | None = None) -> Self: ...

    class TaskFunction(Task[P, R]):
        """What a type checker sees of a decorated function. R is what it returns when it is awaited, if it is async."""

        def using(
            self,
            *,
            priority: int | None = None,
            queue_name: str | None = None,
            run_after: datetime | timedelta | None = None,
            backend: str | None = None,
            max_attempts: int | None = None,
            max_snoozes: int | None = None,
            atomic: bool | None = None,
            timeout: float | timedelta | None = None,
            lock: str | None = None,
            concurrency: int | None = None,
            unique: UniqueOption | None = None,
            fair: str | None = None,
            rate: RateOption | None = None,
            keep_result: float | timedelta | None = None,
            after: TaskResult[..., Any] | str | int | Iterable[TaskResult[..., Any] | str | int] | None = None,
            meta: dict[str, Any] | None = None,
        ) -> TaskFunction[P, R]: ...

        def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Result[P, R]: ...
        async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Result[P, R]: ...
        def enqueue_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def get_result(self, result_id: str) -> Result[P, R]: ...
        async def aget_result(self, result_id: str) -> Result[P, R]: ...

    class Options(TypedDict, total=False):
        """The options of ``@task`` that do not change how the function is called."""

        priority: int
        queue_name: str
        backend: str
        max_attempts: int
        max_snoozes: int | None
        backoff: BackoffOption
        retry_on: type[BaseException] | tuple[type[BaseException], ...]
        no_retry_on: type[BaseException] | tuple[type[BaseException], ...]
        atomic: bool
        timeout: float | timedelta | None
        lock: str | None
        concurrency: int | None
        advisory: bool
        unique: UniqueOption | None
        fair: str | None
        rate: RateOption | None
        keep_result: float | timedelta | None
        cron: str | None
        every: float | timedelta | None
        timezone: str | None
        redact: RedactOption
        meta: dict[str, Any]

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
        """The function takes a list of calls; what stands in a call, only its template and its body know."""

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

    The same decorator as ``django.tasks.task``, typed and with our options on every supported Django; see
    ``PostgresTask`` for them. Raises ``TaskOptionError`` for an option that does not exist, and ``InvalidTask`` for a
    generator and for a function that no worker could find.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if unknown := sorted(set(options) - _OPTIONS):
            where = f"@task on {getattr(function, '__qualname__', type(function).__name__)}"
            if (name := unknown[0]) in CALL_ONLY:
                raise TaskOptionError(f"{where}: {name} belongs to one call; write it in using({name}=...).")
            raise TaskOptionError(
                f"{where} has no option {', '.join(map(repr, unknown))}; it takes {', '.join(sorted(_OPTIONS))}."
            )
        # Ours whatever the backend is, so that a test suite on Django's ImmediateBackend keeps its options.
        return PostgresTask(func=function, **options)

    return decorate if function is None else decorate(function)
