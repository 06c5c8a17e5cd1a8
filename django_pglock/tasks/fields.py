"""The options of ``@task`` as the fields of a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from django_pglock.errors import TaskOptionError
from django_pglock.tasks import option_hints
from django_pglock.tasks.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    Task,
)
from django_pglock.tasks.options import Group, Rate, Unique
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import DEFAULT_BACKOFF, BackoffOption

if TYPE_CHECKING:
    from typing_extensions import Self

#: Options that only the decorator takes, because their values are code or concern the function as a whole.
DECORATOR_ONLY = (
    "backoff",
    "retry_on",
    "no_retry_on",
    "group",
    "cron",
    "every",
    "timezone",
    "redact",
    "advisory",
    "capture_logs",
)
#: Options that only ``using()`` takes, because they concern one call.
CALL_ONLY = ("run_after", "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFields(Task):  # type: ignore[type-arg]
    """A task function with its options. ``@task`` makes it, as a ``PostgresTask``.

    Besides Django's own fields:

    - ``max_attempts``: the largest number of attempts, the first one included. Default 1: no retry.
    - ``max_snoozes``: how often the task may ``raise Snooze``. The next ``Snooze`` ends it as FAILED. Default: no
      limit.
    - ``backoff``: the wait before the next attempt; seconds, a timedelta, ``Constant``, ``Linear``, ``Exponential`` or
      ``fn(exception, task_result)``. Default: exponential from one second to ten minutes, with full jitter.
    - ``retry_on``, ``no_retry_on``: exception types that are retried (default: each ``Exception``), and that are not.
      With ``BaseException`` a task whose function calls ``sys.exit()`` is retried, too.
    - ``atomic``: run the function in a transaction that also settles the task, so that its database changes are
      committed exactly once even if the worker is killed.
    - ``timeout``: seconds or a timedelta that one attempt may take.
    - ``lock``: a template such as ``"order:{order_id}"``. Tasks of one key, whatever their functions, do not run at the
      same time, and begin in the order in which they were enqueued. ``concurrency``: how many of them may run at once.
    - ``advisory``: while the function runs, hold the advisory lock whose name is the key of ``lock``, like a
      ``with lock(...)`` elsewhere in the project.
    - ``unique``: True, a template or ``Unique``: no second task while a task with the same key waits.
    - ``group``: a template or ``Group``: all waiting tasks of one key are passed to one call, as a list. With ``lock``,
      those that are next in the order of the lock key.
    - ``fair``: a template; keys take turns, so that a million tasks of one key do not delay ten of another.
    - ``rate``: ``"10/s"`` or ``Rate``: the largest number of starts in a time.
    - ``keep_result``: seconds or a timedelta after which the row of the finished task may be deleted.
    - ``redact``: names of arguments, or of keys inside of them, whose values are not shown to people, such as
      ``("card", "password")``. ``"return"`` is the result. True means all values. The row keeps the values.
    - ``capture_logs``: keep the last log records of each attempt in its row: True, or the least level, such as "INFO".
      What a function logs is stored as it is, values of redacted arguments included.
    - ``cron`` (with ``timezone``) or ``every``: enqueue it by the clock, each tick once.

    For one call, with ``using()``: ``run_after``, which also accepts a ``timedelta``, counted by the database's clock;
    and ``after``, a result or id, or a list of them, of tasks that have to succeed first. For both: ``meta``, a dict
    that is stored with the task.
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
    capture_logs: bool | int | str | None = None
    after: tuple[int, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict, hash=False)

    #: The options that differ from the decorated definition and are stored in the row; empty for the definition itself.
    carried: dict[str, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)
    #: The number of the backend that has found this task valid. Copies have to be validated again.
    valid_for: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def has_keys(self) -> bool:
        """Whether calls of this task have keys, so that their arguments are read when they are enqueued."""
        return bool(self.lock or self.unique or self.group or self.fair or self.rate)

    @property
    def is_plain(self) -> bool:
        """Whether calls have no keys, no ``after`` and no ``keep_result``.

        Then the shortest INSERT can write a call, unless the call has a date or a delay.
        """
        return not self.has_keys and not self.after and self.keep_result is None

    @property
    def is_own(self) -> bool:
        """Whether this package enqueues it. Then neither its backend nor its queue comes from ``TASKS``."""
        return self.queue_name == OWN_QUEUE and self.module_path.startswith("django_pglock.")

    def using(self, **changes: Any) -> Self:
        """Return a copy with other options for the calls made through it.

        Accepts Django's ``priority queue_name run_after backend`` and all of our options, except those that belong to
        the function: ``backoff``, the exception types, ``group`` and the schedule. None does not change an option.
        Raises ``TaskOptionError`` for any other name.
        """
        if unknown := [name for name in changes if name not in _CHANGEABLE]:
            raise TaskOptionError(" ".join(self._unknown_option(name) for name in unknown))
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def _unknown_option(self, name: str) -> str:
        ours = option_hints.OPTIONS.get(name, name)
        if ours in DECORATOR_ONLY:
            return f"{ours} is an option of @task on {self.module_path}; a single call cannot change it."
        return f"using() has no option {name!r}; {option_hints.about_option(name, _CHANGEABLE)}"

    if not TYPE_CHECKING:  # or type checkers would allow a call and every attribute
        #: Templates would call a task that they show.
        do_not_call_in_templates = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Raise ``TypeError``, which says how a task is called."""
            name, call = self.func.__name__, "acall" if iscoroutinefunction(self.func) else "call"
            raise TypeError(
                f"{self.module_path} is a task: write {name}.enqueue(…) to let a worker run it, or "
                f"{name}.{call}(…) to run it here."
            )

        def __getattr__(self, name: str) -> Any:
            """Raise ``AttributeError``; for a method that other task queues have, with the name of ours."""
            hint = option_hints.about_method(name, self.module_path) if name in option_hints.METHODS else None
            default = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(hint or default, name=name, obj=self)

    def can_retry(self, error: BaseException) -> bool:
        """Return whether the task is retried after this exception."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.no_retry_on)


#: The options of ``@task``.
OPTIONS = {each.name for each in fields(TaskFields) if each.init} - {"func", *CALL_ONLY}
_CHANGEABLE = sorted({*OPTIONS, *CALL_ONLY} - {"takes_context", *DECORATOR_ONLY})


def check_names(function: Any, names: Iterable[str], known: set[str] = OPTIONS | {"func", *CALL_ONLY}) -> None:
    """Raise ``TaskOptionError`` for names of options that are not known, with the names of ours for them."""
    if unknown := sorted(set(names) - known):
        where = f"@task on {getattr(function, '__qualname__', type(function).__name__)}"
        raise TaskOptionError(" ".join(_unknown_option(where, name) for name in unknown))


def _unknown_option(where: str, name: str) -> str:
    ours = option_hints.OPTIONS.get(name, name)
    if ours in CALL_ONLY:
        return f"{where}: {name} is an option of a single call. Write task.using({ours}=...)."
    return f"{where} has no option {name!r}; {option_hints.about_option(name, OPTIONS)}"
