"""The options of ``@task``: one table, which is also the fields of a task.

Each row has the type and the default of an option, what it accepts, who may give it, and the words of other task queues
for it. The checks, the hints in messages and the values that a row of the database carries come from this table. Type
checkers cannot read it: ``definition.py`` names each option once more, with its type.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from django_pglock.errors import TaskOptionError
from django_pglock.tasks import options as check
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


#: PostgreSQL's smallint.
MOST_CONCURRENT = 32_767


class By(Enum):
    """Who may give an option."""

    #: ``@task`` and ``using()``.
    BOTH = auto()
    #: ``@task`` alone, because the value is code or concerns the function as a whole.
    FUNCTION = auto()
    #: ``using()`` alone, because it concerns one call.
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option besides its name, type and default."""

    check: check.Check
    by: By = By.BOTH
    #: The words of other task queues for it.
    foreign: tuple[str, ...] = ()
    #: Additional text after its name in a hint.
    note: str = ""
    #: Whether ``meta`` of the row has it, if a call differs from its function.
    is_carried: bool = False
    #: Whether None means that a task does not have it.
    may_be_none: bool = False


def option(default: Any, accepts: check.Check, foreign: str = "", /, **more: Any) -> Any:
    """Return the field for one row of the table."""
    row = Option(accepts, foreign=tuple(foreign.split()), may_be_none=default is None, **more)
    return field(default=default, metadata={"option": row})


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
    takes_context: bool = option(False, check.flag, "bind context pass_context", by=By.FUNCTION)
    priority: int = option(DEFAULT_TASK_PRIORITY, check.priority)
    backend: str = option(
        DEFAULT_TASK_BACKEND_ALIAS, check.instance(str, "the text of an alias in TASKS"), "database using"
    )
    queue_name: str = option(DEFAULT_TASK_QUEUE_NAME, check.text, "queue")
    run_after: datetime | timedelta | None = option(  # type: ignore[assignment]
        None, check.run_after, "countdown delay eta run_at schedule_at schedule_in wait", by=By.CALL
    )

    max_attempts: int = option(
        # The largest smallint of PostgreSQL. The column has the number of retries: ``max_attempts - 1``.
        *(1, check.number(1, 32_767), "attempts max_retries max_tries retries retry tries"),
        note=", which counts the first attempt",
    )
    max_snoozes: int | None = option(None, check.number(0, 2**31 - 1), is_carried=True)
    backoff: BackoffOption = option(
        DEFAULT_BACKOFF, check.backoff, "default_retry_delay retry_backoff retry_delay retry_wait", by=By.FUNCTION
    )
    retry_on: tuple[type[BaseException], ...] = option(
        (Exception,), check.exception_types, "autoretry_for retry_exceptions retry_for", by=By.FUNCTION
    )
    no_retry_on: tuple[type[BaseException], ...] = option(
        (), check.exception_types, "dont_autoretry_for throws", by=By.FUNCTION
    )
    atomic: bool = option(
        *(False, check.flag, "transaction"),
        note=", which makes the database effects of a task happen exactly once",
        is_carried=True,
    )
    timeout: float | timedelta | None = option(
        None, check.timeout, "job_timeout soft_time_limit time_limit", is_carried=True
    )
    lock: str | None = option(None, check.template, "lock_key ordering_key")
    concurrency: int | None = option(None, check.number(1, MOST_CONCURRENT), "concurrency_limit max_concurrency")
    advisory: bool = option(False, check.flag, by=By.FUNCTION)
    unique: Unique | None = option(None, check.unique, "once queueing_lock singleton unique_key uniqueness")
    group: Group | None = option(None, check.group, by=By.FUNCTION)
    fair: str | None = option(None, check.template)
    rate: Rate | None = option(None, check.rate, "rate_limit")
    keep_result: float | timedelta | None = option(
        *(None, check.duration, "ignore_result result_expires result_ttl"),
        note=", the seconds after its end for which the row of a task is kept",
    )
    cron: str | None = option(None, check.anything, "crontab periodic schedule", by=By.FUNCTION, note=" or every")
    every: float | timedelta | None = option(None, check.duration, "interval", by=By.FUNCTION)
    timezone: str | None = option(None, check.anything, "tz", by=By.FUNCTION)
    redact: tuple[str, ...] | bool = option((), check.anything, by=By.FUNCTION)
    capture_logs: bool | int | str | None = option(None, check.log_level, by=By.FUNCTION)
    after: tuple[int, ...] = option((), check.task_ids, "depends_on", by=By.CALL)
    meta: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata={"option": Option(check.meta, foreign=("headers",))}
    )

    #: The options that differ from the decorated definition and are stored in the row; empty for the definition itself.
    carried: dict[str, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)
    #: What is the same for all calls of this task, once its first call has computed it. Copies begin without it.
    kept: dict[Any, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)

    @property
    def has_keys(self) -> bool:
        """Whether calls of this task have keys, so that their arguments are read when they are enqueued."""
        return bool(self.lock or self.unique or self.group or self.fair or self.rate)

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
        if unknown := [name for name in changes if name not in OF_CALL]:
            raise TaskOptionError(" ".join(self._unknown_option(name) for name in unknown))
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def _unknown_option(self, name: str) -> str:
        ours = WORDS.get(name, name)
        if ours in OPTIONS and OPTIONS[ours].by is By.FUNCTION:
            return f"{ours} is an option of @task on {self.module_path}; a single call cannot change it."
        return f"using() has no option {name!r}; {about_option(name, OF_CALL)}"

    def check_values(self, where: str) -> None:
        """Check each option by itself, and keep it in the form that its check returns."""
        for name, each in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or not each.may_be_none:
                object.__setattr__(self, name, each.check(f"{where}: {name}", value))

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
            hint = about_method(name, self.module_path) if name in METHODS else None
            default = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(hint or default, name=name, obj=self)

    def can_retry(self, error: BaseException) -> bool:
        """Return whether the task is retried after this exception."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.no_retry_on)


#: All options, those that a function and those that a call may have, and our word for each foreign one.
OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(TaskFields) if each.metadata}
OF_FUNCTION = sorted(name for name, each in OPTIONS.items() if each.by is not By.CALL)
OF_CALL = sorted(name for name, each in OPTIONS.items() if each.by is not By.FUNCTION)
CARRIED = [name for name, each in OPTIONS.items() if each.is_carried]
WORDS = {word: name for name, each in OPTIONS.items() for word in each.foreign}


def check_names(function: Any, names: Iterable[str], known: Collection[str] = ("func", *OPTIONS)) -> None:
    """Raise ``TaskOptionError`` for names of options that are not known, with the names of ours for them."""
    if unknown := sorted(set(names) - {*known}):
        where = f"@task on {getattr(function, '__qualname__', type(function).__name__)}"
        raise TaskOptionError(" ".join(_unknown_option(where, name) for name in unknown))


def _unknown_option(where: str, name: str) -> str:
    ours = WORDS.get(name, name)
    if ours in OPTIONS and OPTIONS[ours].by is By.CALL:
        return f"{where}: {name} is an option of a single call. Write task.using({ours}=...)."
    return f"{where} has no option {name!r}; {about_option(name, OF_FUNCTION)}"


def about_option(name: str, known: Collection[str]) -> str:
    """Return a hint to the option of ``known`` that an unknown name probably means: ``"write queue_name."``."""
    if name in INSTEAD:
        return INSTEAD[name]
    ours = WORDS.get(name)
    if ours is None or ours not in known:
        ours = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)
    if ours is None:
        return f"its options are {', '.join(sorted(known))}."
    return f"write {ours}{OPTIONS[ours].note}."


def _by_word(texts: dict[str, str]) -> dict[str, str]:
    return {word: text for words, text in texts.items() for word in words.split()}


#: What other task queues have, and tasks here do not: what to do instead.
INSTEAD = _by_word(
    {
        "expire expires max_age ttl": "a waiting task does not expire. Pass the date as an argument, and return from "
        "the function if it has passed.",
        "acks_late reject_on_worker_lost": "a task whose worker has died always runs again, so leave it out.",
        "link on_success": "enqueue the other task with using(after=result), with the result of this one.",
        "link_error on_failure": "handle the error in the function, or in a receiver of the signal task_finished.",
    }
)
#: Methods of tasks in other task queues, and our code for the same purpose.
METHODS = _by_word(
    {
        "apply_async enqueue_at enqueue_in schedule send_with_options": "using(…).enqueue(…)",
        "async_ defer delay queue send submit": "enqueue(…)",
        "adelay aapply_async defer_async": "aenqueue(…)",
        "apply call_local fn now run": "call(…)",
        "configure options set with_options": "using(…)",
        "delay_on_commit": "enqueue_on_commit(…)",
        "retry": "raise Retry(…)",
    }
)


def about_method(name: str, path: str) -> str:
    """Return what to write instead of one of ``METHODS``."""
    ours = METHODS[name]
    here = ours if ours.startswith("raise") else f"{path.rpartition('.')[2]}.{ours}"
    return f"{path} is a task, and tasks have no {name}. Write {here}."
