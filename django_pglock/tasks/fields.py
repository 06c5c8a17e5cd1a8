"""The options of ``@task``: one table, which is also the fields of a task.

Each row has the type and the default of an option, what it accepts, and who may give it. The checks, the hints in
messages and the values that a row of the database carries come from this table. Beside it are the words of other task
queues, with ours. Type checkers cannot read the table: ``definition.py`` names each option once more, with its type.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from django_pglock.conf import require_options, unknown_option
from django_pglock.errors import ConfigurationError, EventTimeout, StepError, StepFailed, TaskOptionError
from django_pglock.tasks import options as check
from django_pglock.tasks.compat import Task
from django_pglock.tasks.options import MOST_CONCURRENT, Group, Rate, Unique
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import DEFAULT_BACKOFF, BackoffOption, Check, duration

if TYPE_CHECKING:
    from typing_extensions import Self


class By(Enum):
    """Who may give an option."""

    #: ``@task`` and ``using()``.
    BOTH = auto()
    #: ``@task`` alone, because the value is code or concerns the function as a whole.
    FUNCTION = auto()
    #: ``using()`` alone, because it concerns one call.
    CALL = auto()


class Option(NamedTuple):
    """What is known of an option besides its name, type and default."""

    check: Check
    by: By
    #: Whether ``meta`` of the row has it, if a call differs from its function.
    is_carried: bool
    #: Whether None means that a task does not have it.
    may_be_none: bool


def option(default: Any, accepts: Check, by: By = By.BOTH, *, is_carried: bool = False) -> Any:
    """Return the field for one row of the table."""
    return field(default=default, metadata={"option": Option(accepts, by, is_carried, may_be_none=default is None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFields(Task):  # type: ignore[type-arg]
    """A task function with its options. ``@task`` makes it, as a ``PostgresTask``.

    The options, some of which only ``@task`` takes, because they concern the function, and some only ``using()``:

    - ``max_attempts``: the largest number of attempts, the first one included. 1: no retry.
    - ``max_snoozes``: how often the task may ``raise Snooze``; the next one ends it as FAILED. Default: no limit.
    - ``backoff``: the wait before the next attempt: seconds, a timedelta, ``Linear``, ``Exponential``, or
      ``fn(exception, task_result)``, which is called after the failure. Default: exponential from one second to ten
      minutes, with full jitter.
    - ``retry_on``: exception types after which the task is retried. Default: each ``Exception``. With
      ``BaseException`` a task whose function calls ``sys.exit()`` is retried, too.
    - ``no_retry_on``: exception types after which it is never retried.
    - ``timeout``: seconds or a timedelta that one attempt may take.
    - ``on_failure``: a task function that is enqueued with the id of the task, in the transaction that writes that its
      last attempt has failed.
    - ``expires``: seconds or a timedelta after the enqueue, or a datetime. A task that has not begun by then is
      CANCELLED by the worker that claims it, with ``TaskExpired`` as the reason. A task that has begun is retried as
      without the option.
    - ``atomic``: run the function in a transaction that also settles the task, so that its database changes are
      committed exactly once, even if the worker is killed.
    - ``wait_for_disk``: False with ``atomic`` means that its COMMIT does not wait until the disk has it. If the server
      crashes, the changes and the completion of the last moments are lost together, and the task runs again.
    - ``lock``: a template such as ``"order:{order_id}"``. Tasks of one key, whatever their functions, do not run at the
      same time, and begin in the order in which they were enqueued.
    - ``concurrency``: how many tasks of a lock key may run at once.
    - ``advisory``: while the function runs, hold the advisory lock whose name is the key of ``lock``, like a
      ``with lock(...)`` elsewhere in the project.
    - ``unique``: True, a template or ``Unique``: no second task while a task with the same arguments or key waits.
    - ``group``: a template or ``Group``: all waiting tasks of one key and one queue are passed to one call, as a list.
      With ``lock``, those that are next in the order of the lock key.
    - ``fair``: a template; keys take turns, so that a million tasks of one key do not delay ten of another.
    - ``rate``: ``"10/s"`` or ``Rate``: the largest number of starts in a time.
    - ``keep_result``: seconds or a timedelta after the end of the task at which its row is deleted. Default: as the
      setting ``PRUNE_AFTER`` says.
    - ``redact``: names of arguments, or of keys inside of them, whose values are not shown to people, such as
      ``("card", "password")``. ``"return"`` is the result. True means all values. The row keeps the values.
    - ``capture_logs``: keep the last log records of each attempt in its row: True, or the least level, such as "INFO".
      What a function logs is stored as it is, values of redacted arguments included.
    - ``cron``: an expression of five fields: enqueue the task at these times, each tick once.
    - ``timezone``: the time zone of ``cron``. Default: the setting ``TIME_ZONE``.
    - ``every``: seconds or a timedelta, from 0.1 s: enqueue the task at this interval, each tick once.
    - ``priority``: -100 to 100; higher runs first.
    - ``queue_name``: the queue, which ``QUEUES`` in ``TASKS`` has to list.
    - ``backend``: the alias in ``TASKS``.
    - ``takes_context``: pass a ``TaskContext`` as the first argument, which has to be called ``context``.
    - ``run_after``: the earliest time: a datetime up to 9999-12-30, or a timedelta of up to ten years by the database's
      clock.
    - ``after``: a result or id, or a list of them, of tasks that have to succeed first.
    - ``after_ended``: the same for tasks that have to end first, whether they succeed or not.
    - ``meta``: a dict that is stored with the task.
    """

    # Declared again because Django 6.0 has no defaults for them.
    takes_context: bool = option(False, check.flag, By.FUNCTION)
    priority: int = option(0, check.instance(int, "a whole number from -100 to 100"))
    backend: str = option("default", check.instance(str, "the text of an alias in TASKS"))
    queue_name: str = option("default", check.text)
    run_after: datetime | timedelta | None = option(None, check.run_after, By.CALL)  # type: ignore[assignment]

    # The largest smallint of PostgreSQL. The column has the number of retries: ``max_attempts - 1``.
    max_attempts: int = option(1, check.number(1, 32_767))
    max_snoozes: int | None = option(None, check.number(0, 2**31 - 1), is_carried=True)
    backoff: BackoffOption = option(DEFAULT_BACKOFF, check.backoff, By.FUNCTION)
    retry_on: tuple[type[BaseException], ...] = option((Exception,), check.exception_types, By.FUNCTION)
    no_retry_on: tuple[type[BaseException], ...] = option((), check.exception_types, By.FUNCTION)
    atomic: bool = option(False, check.flag, is_carried=True)
    wait_for_disk: bool = option(True, check.flag, By.FUNCTION)
    timeout: float | timedelta | None = option(None, check.timeout, is_carried=True)
    lock: str | None = option(None, check.template)
    concurrency: int | None = option(None, check.number(1, MOST_CONCURRENT))
    advisory: bool = option(False, check.flag, By.FUNCTION)
    unique: Unique | None = option(None, check.unique)
    group: Group | None = option(None, check.group, By.FUNCTION)
    fair: str | None = option(None, check.template)
    rate: Rate | None = option(None, check.rate)
    on_failure: Any = option(None, check.anything)
    expires: float | timedelta | datetime | str | None = option(None, check.expiry, is_carried=True)
    keep_result: float | timedelta | None = option(None, duration)
    cron: str | None = option(None, check.anything, By.FUNCTION)
    every: float | timedelta | None = option(None, duration, By.FUNCTION)
    timezone: str | None = option(None, check.anything, By.FUNCTION)
    redact: tuple[str, ...] | bool = option((), check.anything, By.FUNCTION)
    capture_logs: bool | int | str | None = option(None, check.log_level, By.FUNCTION)
    after: tuple[int, ...] = option((), check.task_ids, By.CALL)
    after_ended: tuple[int, ...] = option((), check.task_ids, By.CALL)
    meta: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata={"option": Option(check.meta, By.BOTH, False, False)}
    )

    #: The names of the options that the decorator was given. A copy by ``using()`` is given all of them.
    given: KeysView[str] = field(init=False, repr=False, compare=False, hash=False)
    #: The options that differ from the decorated definition and are stored in the row; empty for the definition itself.
    carried: dict[str, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)
    #: What is the same for all calls of this task, once its first call has computed it. Copies begin without it.
    kept: dict[Any, Any] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)

    @property
    def has_keys(self) -> bool:
        """Whether calls of this task have keys, so that their arguments are read when they are enqueued."""
        return bool(self.lock or self.unique or self.group or self.fair or self.rate)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ids of the tasks that have to end before this call runs."""
        return tuple(dict.fromkeys((*self.after, *self.after_ended)))

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
        check_names(f"{self.module_path}.using()", changes, By.CALL)
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def check_values(self, where: str) -> None:
        """Check each option by itself, and keep it in the form that its check returns."""
        for name, each in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or not each.may_be_none:
                object.__setattr__(self, name, each.check(f"{where}: {name}", value))

    if not TYPE_CHECKING:  # or type checkers would allow every attribute

        def __getattr__(self, name: str) -> Any:
            """Raise ``AttributeError``, with our method in place of one of another task queue."""
            if name in FOREIGN_METHODS:
                raise AttributeError(f"{self.module_path} has no {name}(); write {FOREIGN_METHODS[name]}.")
            # Raises again, in Python's words.
            return object.__getattribute__(self, name)

    def can_retry(self, error: BaseException) -> bool:
        """Return whether the task is retried after this exception."""
        if isinstance(error, (StepError, StepFailed, EventTimeout)):
            # It would be raised again in each attempt.
            return False
        return isinstance(error, self.retry_on) and not isinstance(error, self.no_retry_on)


#: All options, and those that a function and those that a call may have.
OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(TaskFields) if each.metadata}
OF_FUNCTION = sorted(name for name, each in OPTIONS.items() if each.by is not By.CALL)
OF_CALL = sorted(name for name, each in OPTIONS.items() if each.by is not By.FUNCTION)
#: What a backend may have as ``defaults``. All others belong to one function, or need another option beside them.
OF_BACKEND = (
    *("atomic", "backoff", "capture_logs", "expires", "keep_result", "max_attempts", "max_snoozes"),
    *("no_retry_on", "retry_on", "timeout"),
)
CARRIED = [name for name, each in OPTIONS.items() if each.is_carried]


def defaults_of(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the ``defaults`` in the ``OPTIONS`` of a backend. Raises ``ConfigurationError``."""
    where, given = f"TASKS[{backend!r}]['OPTIONS']['defaults']", options.get("defaults", {})
    require_options(where, given, OF_BACKEND)
    try:
        return {name: OPTIONS[name].check(f"{where}[{name!r}]", value) for name, value in given.items()}
    except TaskOptionError as error:
        raise ConfigurationError(str(error)) from error


def _by_word(texts: dict[str, str]) -> dict[str, str]:
    return {word: text for words, text in texts.items() for word in words.split()}


#: The options of other task queues, and what to write here.
FOREIGN_OPTIONS = _by_word(
    {
        "bind context pass_context": "@task(takes_context=True)",
        "database using": "backend",
        "queue": "queue_name",
        "countdown delay eta run_at schedule_at schedule_in wait": "using(run_after=…)",
        "attempts max_retries max_tries retries retry tries": "max_attempts, which counts the first attempt",
        "default_retry_delay retry_backoff retry_delay retry_wait": "@task(backoff=…)",
        "autoretry_for retry_exceptions retry_for": "@task(retry_on=…)",
        "dont_autoretry_for throws": "@task(no_retry_on=…)",
        "transaction": "atomic",
        "job_timeout soft_time_limit time_limit": "timeout",
        "lock_key ordering_key": "lock",
        "concurrency_limit max_concurrency": "concurrency",
        "once queueing_lock singleton unique_key uniqueness": "unique",
        "rate_limit": "rate",
        "expire max_age ttl": "expires",
        "ignore_result result_expires result_ttl": "keep_result, the seconds for which a finished task is kept",
        "crontab periodic schedule": "@task(cron=…) or @task(every=…)",
        "interval": "@task(every=…)",
        "tz": "@task(timezone=…)",
        "depends_on": "using(after=…)",
        "headers": "meta",
        # No option of ours means the same.
        "acks_late reject_on_worker_lost": "nothing, because a task whose worker has died always runs again",
        "link on_success": "using(after=result) for the other task, with the result of this one",
        "link_error": "on_failure",
    }
)
#: The methods of tasks in other task queues, and what to write here.
FOREIGN_METHODS = _by_word(
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


def check_names(where: str, names: Iterable[str], by: By) -> None:
    """Raise ``TaskOptionError`` for names that are no options of a function, or of a call."""
    known = {By.FUNCTION: OF_FUNCTION, By.CALL: OF_CALL, By.BOTH: sorted(OPTIONS)}[by]
    if unknown := sorted(set(names) - {*known}):
        raise TaskOptionError(" ".join(_unknown_option(where, name, known) for name in unknown))


def _unknown_option(where: str, name: str, known: list[str]) -> str:
    if name in OPTIONS and OPTIONS[name].by is By.CALL:
        return f"{where}: {name} is an option of a single call. Write task.using({name}=...)."
    if name in OPTIONS:
        return f"{where}: {name} is an option of @task; a single call cannot change it."
    if meant := FOREIGN_OPTIONS.get(name):
        return f"{where} has no option {name!r}; write {meant}."
    return unknown_option(where, name, known)
