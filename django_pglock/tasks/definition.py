"""A function that runs later, with our options: ``PostgresTask``.

It is the ``task_class`` of our backend. Django 6.1's own ``@task(max_attempts=5)`` makes it, and so does our typed
``task`` decorator on every version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import NoneType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.utils import timezone
from django.utils.asyncio import async_unsafe
from django.utils.module_loading import import_string

from django_pglock.errors import TaskOptionError
from django_pglock.postgres.connections import has_commit_hooks, manual_transactions
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import check_templates
from django_pglock.tasks.compat import InvalidTask, Task, TaskResult
from django_pglock.tasks.context import OWN_META, with_context
from django_pglock.tasks.dates import READABLE, is_readable
from django_pglock.tasks.fields import TaskFields, check_names
from django_pglock.tasks.options import (
    captured_level,
    check_bool,
    check_concurrency,
    check_template,
    group_of,
    rate_of,
    unique_of,
)
from django_pglock.tasks.redaction import redact_of
from django_pglock.tasks.retry import check_backoff, duration_of
from django_pglock.tasks.schedules import check_schedule

if TYPE_CHECKING:
    from typing_extensions import Self

#: Options of one call that are stored in the row's ``meta``. The others have a column or belong to the function.
CARRIED_OPTIONS = ("atomic", "timeout", "max_snoozes")
#: The largest smallint of PostgreSQL. The column has the number of retries: ``max_attempts - 1``.
LARGEST_MAX_ATTEMPTS = 32_767
#: Digits of a bigint, and one more.
MOST_DIGITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTask(TaskFields):
    """A task function whose options have been checked. Made by ``@task``, never by hand; see ``TaskFields``."""

    def __new__(cls, **options: Any) -> Self:
        # Django 6.1's own @task passes on all options. For an unknown one, Python's message would only name __init__.
        check_names(options.get("func"), options)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_function()
        self._check_options(where := f"@task on {self.module_path}")
        self._check_call(where)
        if isinstance(self.run_after, timedelta) and not issubclass(self.get_backend().task_class, PostgresTask):
            # Django's own backends, for tests and development, know only dates.
            object.__setattr__(self, "run_after", timezone.now() + self.run_after)
        if not self.is_own:
            # Not super(): without arguments it fails in a dataclass with slots, because that is a new class.
            Task.__post_init__(self)
        definition = registry.register(self)
        if definition is not self:
            own = {name: getattr(self, name) for name in CARRIED_OPTIONS}
            carried = {name: value for name, value in own.items() if value != getattr(definition, name)}
            object.__setattr__(self, "carried", carried)

    def __reduce__(self) -> tuple[Any, ...]:
        # The same as in Django 6.1, for each version, and without the fields that __post_init__ fills.
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "func"}
        return _made_again, (self.module_path, options)

    def _check_function(self) -> None:
        if not hasattr(self.func, "__qualname__"):
            raise InvalidTask(
                f"@task was given a {type(self.func).__name__}; decorate a function that is defined in a module."
            )
        if isgeneratorfunction(self.func) or isasyncgenfunction(self.func):
            raise InvalidTask(
                f"@task on {self.module_path}: a call of a generator function returns before its body runs. Iterate "
                "over it in "
                "another function, and decorate that."
            )

    def _check_options(self, where: str) -> None:
        attempts = self.max_attempts
        if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= LARGEST_MAX_ATTEMPTS:
            most = f"{LARGEST_MAX_ATTEMPTS:,}"
            raise TaskOptionError(f"{where}: max_attempts is {attempts!r}; give a number from 1 to {most}.")
        snoozes = self.max_snoozes
        if snoozes is not None and (not isinstance(snoozes, int) or isinstance(snoozes, bool) or snoozes < 0):
            raise TaskOptionError(f"{where}: max_snoozes is {snoozes!r}; give 0 or a larger number.")
        self._check_types(where)
        if self.atomic and iscoroutinefunction(self.func):
            raise TaskOptionError(f"{where}: atomic=True needs a sync function; Django's transactions are not async.")
        check_backoff(self.backoff)
        for name in ("retry_on", "no_retry_on"):
            types = getattr(self, name)
            types = tuple(types) if isinstance(types, Iterable) else (types,)
            if not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
                raise TaskOptionError(f"{where}: {name} takes exception types, not {types!r}.")
            object.__setattr__(self, name, types)
        object.__setattr__(self, "capture_logs", captured_level(self.capture_logs, where))
        self._check_keys(where)
        for name in ("timeout", "keep_result", "every"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, duration_of(value, option=f"{where}: {name}"))
        if self.timeout == 0:
            raise TaskOptionError(f"{where}: timeout is 0; give more than 0 seconds, or None for no timeout.")
        check_schedule(self, where)

    def _check_types(self, where: str) -> None:
        for name in ("atomic", "advisory"):
            check_bool(getattr(self, name), option=f"{where}: {name}")
        # Django's validation compares these values, which fails for other types without the name of the option.
        name, priority = self.queue_name, self.priority
        if not isinstance(name, str):
            raise TaskOptionError(f"{where}: queue_name is {name!r}; give a text.")
        # Only NaN differs from itself.
        if isinstance(priority, bool) or not isinstance(priority, (int, float)) or priority != priority:
            raise TaskOptionError(f"{where}: priority is {priority!r}; give a whole number from -100 to 100.")
        if not isinstance(self.backend, str):
            raise TaskOptionError(f"{where}: backend is {self.backend!r}; give the text of an alias in TASKS.")

    def _check_call(self, where: str) -> None:
        if not isinstance(self.run_after, (datetime, timedelta, NoneType)):
            raise TaskOptionError(f"{where}: run_after is {self.run_after!r}; give a datetime or a timedelta.")
        if isinstance(self.run_after, datetime) and not is_readable(self.run_after):
            first, last = (date.date() for date in READABLE)
            raise TaskOptionError(f"{where}: run_after is {self.run_after!r}; give a date from {first} to {last}.")
        if not isinstance(self.meta, dict):
            raise TaskOptionError(f"{where}: meta is {self.meta!r}; give a dict.")
        if own := sorted(set(OWN_META) & set(self.meta)):
            raise TaskOptionError(
                f"{where}: meta has {', '.join(own)}, which the package itself writes. Use another name."
            )
        object.__setattr__(self, "after", _task_ids(self.after))

    def _check_keys(self, where: str) -> None:
        for name, make in (("unique", unique_of), ("group", group_of), ("rate", rate_of)):
            object.__setattr__(self, name, make(getattr(self, name)))
        if self.group is not None and (self.rate is not None or self.concurrency is not None):
            raise TaskOptionError(f"{where}: group cannot be combined with concurrency or rate.")
        if self.rate is not None and self.rate.key is not None and self.lock is not None:
            raise TaskOptionError(
                f"{where}: with lock, rate cannot have its own key, because a task waits for one key only."
            )
        if self.concurrency is not None:
            if self.lock is None:
                raise TaskOptionError(f"{where}: concurrency={self.concurrency!r} needs a key. Write it as lock.")
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
            raise TaskOptionError(f"{where}: advisory=True needs the name of a lock. Write it as lock.")
        if self.concurrency is not None:
            raise TaskOptionError(
                f"{where}: advisory cannot be combined with concurrency, because an advisory lock has one holder."
            )
        if self.redact is True:
            raise TaskOptionError(
                f"{where}: advisory cannot be combined with redact=True, which hides keys: users who may view locks "
                "see "
                "the name of an advisory lock."
            )

    def enqueue(self, *args: Any, **kwargs: Any) -> TaskResult[..., Any]:
        """Write one call in the current transaction and return its result. In a coroutine: ``await aenqueue()``."""
        try:
            return Task.enqueue(self, *args, **kwargs)
        except SynchronousOnlyOperation as error:
            name = self.module_path.rpartition(".")[2]
            raise SynchronousOnlyOperation(
                f"{name}.enqueue() blocks the event loop, so it cannot be called in a coroutine. "
                f"Write: await {name}.aenqueue(…)"
            ) from error

    @async_unsafe("get_result() blocks the event loop here. Write: await task.aget_result(…)")
    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the result of a task of this function by its id. In a coroutine: ``await aget_result()``."""
        return Task.get_result(self, result_id)

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


def _task_ids(after: Any) -> tuple[int, ...]:
    # A single result or id is allowed. An id may be a text, which is one id and not a list of characters.
    is_one = isinstance(after, (str, int)) or hasattr(after, "id")
    try:
        given = (after,) if is_one else tuple(after)
    except TypeError:
        raise TaskOptionError(f"after takes results or their ids, not {after!r}.") from None
    return tuple(map(_task_id, given))


def _made_again(path: str, options: dict[str, Any]) -> PostgresTask:
    """Return the task that was copied or pickled. In another process its module may not have been imported yet."""
    definition = registry.find(path) or import_string(path)
    return PostgresTask(func=definition.func, **options)


def _task_id(value: Any) -> int:
    given = getattr(value, "id", value)
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < MOST_DIGITS:
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool):
        if isinstance(value, TaskResult):
            raise TaskOptionError(
                f"after takes results or ids of tasks in PostgreSQL. The result with the id {given!r} is of another "
                "backend of django.tasks."
            )
        raise TaskOptionError(f"after takes results or their ids, not {value!r}.")
    if given < 0:
        raise TaskOptionError("after takes results or their ids, not a negative number.")
    if given >= 2**63:
        raise TaskOptionError("after takes results or their ids, and no task has an id as large as one of these.")
    return given
