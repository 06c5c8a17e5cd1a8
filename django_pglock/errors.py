"""Every exception that django_pglock raises.

::

    PGLockError
    ├── ConfigurationError      (also django.core.exceptions.ImproperlyConfigured)
    ├── LockError
    │   ├── LockNotAvailable    (also TimeoutError)   the lock is busy or the timeout has passed; nothing else
    │   ├── LockLost                                  the lock was held and then lost with its connection
    │   ├── LockScopeError      (also RuntimeError)   a lock of this scope would not protect anything here
    │   └── LockKeyError        (also ValueError)     the value cannot name a lock
    └── TaskError
        ├── TaskArgumentsError  (also TypeError,
        │                        ValueError)          the call cannot be made or stored; nothing was written
        ├── TaskResultError     (also TypeError,
        │                        ValueError)          the return value of the function cannot be stored
        ├── TaskOptionError     (also TypeError)      an option does not exist or has an invalid value
        ├── DuplicateTask                             a task with the same unique key exists
        ├── TaskTimeout         (also TimeoutError)   recorded: the attempt took longer than its timeout
        ├── TaskCancelled                             recorded: a cancel of the running task was requested
        ├── TooManySnoozes                            recorded for a task that snoozed more often than max_snoozes
        ├── DependencyFailed                          recorded for a task whose after= task did not succeed
        ├── StepError                                 a step is called where or as it cannot be
        │   └── StepsChanged                          the recorded steps do not fit the function
        ├── StepFailed                                the attempts of a step are spent
        ├── EventTimeout                              an event has not come in time
        ├── TaskExpired                               recorded for a task that had not begun by its expires=
        ├── ClaimLost                                 the task no longer belongs to this worker
        └── WorkerLost                                recorded for an attempt whose worker died

    TaskStopped                 (a BaseException)     raised in a task function that must end

All other database errors pass through unchanged, so a broken connection is never mistaken for a busy lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

#: What the package offers by itself. The others are caught more rarely, and imported from here.
__all__ = [
    "DuplicateTask",
    "EventTimeout",
    "LockError",
    "LockKeyError",
    "LockLost",
    "LockNotAvailable",
    "LockScopeError",
    "PGLockError",
    "StepFailed",
    "TaskCancelled",
    "TaskTimeout",
]

NOT_INSTALLED = (
    "This needs the tables of django_pglock, and the app is not installed. Add 'django_pglock' to INSTALLED_APPS and "
    "run: manage.py migrate"
)


def model_of(name: str) -> Any:
    """Return a model of this app. Raises ``ConfigurationError`` if the app is not in ``INSTALLED_APPS``.

    Locks work without the app. Leases, tasks and the list of the holders of locks need its tables and its view.
    """
    try:
        return apps.get_model("django_pglock", name)
    except LookupError as error:
        raise ConfigurationError(NOT_INSTALLED) from error


class Picklable:
    """Restores an exception with its attributes from a pickle or for a copy, without a call of its ``__init__``.

    Python by itself calls the class with ``args``. That fails if ``__init__`` has other parameters, also in a subclass
    that a project defines. As for all exceptions, the cause and the traceback are not restored.
    """

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to restore the exception: its class and ``args``, and its attributes as the state."""
        return _restored, (type(self), self.args), self.__dict__.copy()


def _restored(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    # OSError, the base of TimeoutError, does not set args in __new__ if a subclass has an __init__ of its own.
    error.args = args
    return error


class PGLockError(Picklable, Exception):
    """The base of all errors of this package. All can be pickled and copied."""


class ConfigurationError(PGLockError, ImproperlyConfigured):
    """The settings, or the way in which the package is used, cannot work. The message says what to change."""


class LockError(PGLockError):
    """The base of all errors about locks.

    Arguments: ``message`` for people; ``name`` the lock's name and ``key`` its 64-bit number, where they are known.
    """

    def __init__(self, message: str, *, name: str | None = None, key: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.key = key


class LockNotAvailable(LockError, TimeoutError):
    """Another session holds the lock, and the time to wait (``timeout``, in seconds) has passed.

    ``keys`` are the numbers of all requested locks and ``names`` their names, ``using`` is the database alias, and
    ``model`` the name of the model that lists the holders. ``sqlstate`` is "55P03" if the server waited and reported
    the timeout, with the error of the server as the cause, and None if there was no wait (``timeout=0``).
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        key: int | None = None,
        timeout: float | None = None,
        keys: Sequence[int] = (),
        names: Sequence[str] = (),
        using: str | None = None,
        model: str = "AdvisoryLock",
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message, name=name, key=key)
        self.timeout = timeout
        self.keys = keys
        self.names = names
        self.sqlstate = sqlstate
        self._using = using
        self._model = model

    def holders(self) -> list[Any]:
        """Ask the database who holds the lock now. Returns rows of ``AdvisoryLock`` or, for a lease, of ``Lease``.

        Raises ``ConfigurationError`` if ``django_pglock`` is not in ``INSTALLED_APPS``, because the rows are from its
        view or table. A holder that has not written the name of its lock into its statement gets the requested name.
        """
        rows = list(model_of(self._model).objects.using(self._using).held().filter(key__in=self.keys))
        names = dict(zip(self.keys, self.names, strict=False))
        for row in rows:
            row.name = row.name or names.get(row.key)
        return rows


class LockLost(LockError):
    """The lock was held, but its connection was lost before the end. Another session may have had the lock, too."""


class LockScopeError(LockError, RuntimeError):
    """A lock of this scope would not protect anything here, so it was not taken."""


class LockKeyError(LockError, ValueError):
    """The given value cannot name a lock. Raised before any SQL is sent."""


class TaskError(PGLockError):
    """The base of all errors about tasks."""


class TaskArgumentsError(TaskError, TypeError, ValueError):
    """The function does not take these arguments, or JSON cannot store them. Raised at enqueue; nothing is written.

    It is a ``TypeError``, as Django documents, and a ``ValueError``, because some values of a right type have no JSON.
    """


class TaskResultError(TaskError, TypeError, ValueError):
    """The return value of a task function cannot be stored as JSON, so the task has failed.

    The task is not retried, because the function has run. Never raised to callers: its path is in the attempt's row.
    """


class TaskOptionError(TaskError, TypeError):
    """A task option does not exist or has an invalid value."""


class DuplicateTask(TaskError):
    """With ``on_conflict="raise"`` in ``unique=``: a task with the same key exists. ``result_id`` is its id."""

    def __init__(self, message: str, *, result_id: str) -> None:
        super().__init__(message)
        self.result_id = result_id


class TaskTimeout(TaskError, TimeoutError):
    """The attempt took longer than its ``timeout``. Retried like any exception. ``TaskStopped`` tells the function."""

    def __init__(self, message: str = "The attempt took longer than its timeout.") -> None:
        super().__init__(message)


class TaskCancelled(TaskError):
    """A cancel of the running task was requested. ``TaskStopped`` tells the function."""

    def __init__(self, message: str = "A cancel of this task was requested.") -> None:
        super().__init__(message)


class TaskStopped(Picklable, BaseException):
    """Raised inside a task function that must end, at its statements and at the calls of its context.

    ``reason``, a ``TaskTimeout`` or a ``TaskCancelled``, is recorded as the error of the attempt. Like
    KeyboardInterrupt it is not an ``Exception``, so that no ``except Exception`` of the function swallows it.
    """

    def __init__(self, reason: TaskTimeout | TaskCancelled) -> None:
        super().__init__(str(reason))
        self.reason = reason


class DependencyFailed(TaskError):
    """A task in ``after=`` did not succeed, so this one never runs. Not raised: its path is in the attempt's row."""


class TaskExpired(TaskError):
    """A task had not begun when its ``expires`` was over. Never raised: its path is in the attempt's row."""


class TooManySnoozes(TaskError):
    """A task snoozed more often than its ``max_snoozes``. Never raised: its path is in the attempt's row."""


class StepError(TaskError, RuntimeError):
    """A step of a task cannot be called here, or not by this name. The task fails without a retry."""


class StepsChanged(StepError):
    """The recorded steps of a task do not fit its function, which has changed since the task began."""


class StepFailed(TaskError):
    """A step has raised, and its attempts are spent. It raises this again in each later run of the function.

    ``step`` is its name, ``path`` the dotted path of the exception's class, and ``message`` its text.
    """

    def __init__(self, step: str, path: str, message: str) -> None:
        super().__init__(f"The step {step!r} has failed: {message}")
        self.step = step
        self.path = path
        self.message = message


class EventTimeout(TaskError, TimeoutError):
    """An event has not come within the timeout of ``context.wait_for()``. ``step`` is the name of the wait."""

    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class ClaimLost(TaskError):
    """The worker no longer has the claim on the task: the task was rescued, reset or deleted meanwhile."""


class WorkerLost(TaskError):
    """The worker died while it held the attempt. Never raised: its path is in the attempt's row."""
