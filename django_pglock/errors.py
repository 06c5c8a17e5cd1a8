"""Every exception that django_pglock raises.

::

    PGLockError
    ├── ConfigurationError      (also django.core.exceptions.ImproperlyConfigured)
    ├── LockError
    │   ├── LockNotAvailable    (also TimeoutError)   busy, or the timeout passed; nothing else is
    │   ├── LockLost                                  held once, but gone before the end
    │   ├── LockScopeError      (also RuntimeError)   this scope would not protect here
    │   └── LockKeyError        (also ValueError)     this is not a name for a lock
    └── TaskError
        ├── TaskArgumentsError  (also TypeError,
        │                        ValueError)          cannot be stored; raised before anything is written
        ├── TaskResultError     (also TypeError,
        │                        ValueError)          what the function returned cannot be stored
        ├── TaskOptionError     (also TypeError)      an option that does not exist or cannot be
        ├── DuplicateTask                             unique=, and there is such a task already
        ├── TaskTimeout         (also TimeoutError)   the attempt took longer than its timeout
        ├── TaskCancelled                             somebody asked the running task to stop
        ├── TooManySnoozes                            stands in the record of a task that snoozed more than max_snoozes
        ├── DependencyFailed                          stands in the record of a task whose after= failed
        ├── ClaimLost                                 another worker has the task now
        └── WorkerLost                                stands in the record of an attempt that died with its worker

All other database errors pass through untouched, so a connection that broke is never mistaken for a busy lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

NOT_INSTALLED = (
    "This needs the tables of django_pglock, and the app is not installed. Add 'django_pglock' to INSTALLED_APPS and "
    "run: manage.py migrate"
)


def model_of(name: str) -> Any:
    """Return a model of this app. Raises ``ConfigurationError`` where the project has not installed the app.

    Locks work without it; leases, tasks, and the list of who holds a lock are in tables.
    """
    try:
        return apps.get_model("django_pglock", name)
    except LookupError as error:
        raise ConfigurationError(NOT_INSTALLED) from error


class Picklable:
    """Makes an exception with its attributes from a pickle, and in a copy, without calling its ``__init__``.

    Python's own way calls the class with ``args``, which fails where ``__init__`` has other parameters, in a subclass
    of a project, too. As with all exceptions neither the cause nor the traceback come along.
    """

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again: class and ``args``, and the attributes as the state that is set."""
        return _made_again, (type(self), self.args), self.__dict__.copy()


def _made_again(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    # OSError, the base of TimeoutError, leaves its args to an __init__ that is not its own.
    error.args = args
    return error


class PGLockError(Picklable, Exception):
    """The base of all our errors. They can be pickled and copied."""


class ConfigurationError(PGLockError, ImproperlyConfigured):
    """The settings or the way the package is used cannot work; the message says what to change."""


class LockError(PGLockError):
    """The base of all errors about locks.

    Arguments: ``message`` for people; ``name`` the lock's name and ``key`` its 64-bit number, where they are known.
    """

    def __init__(self, message: str, *, name: str | None = None, key: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.key = key


class LockNotAvailable(LockError, TimeoutError):
    """Somebody else holds the lock, and the time to wait (``timeout``, in seconds) is over.

    ``keys`` are all numbers that were asked for, ``using`` the database alias, and ``model`` what lists the holders.
    ``sqlstate`` is "55P03" where the server waited and reported so, with the server's error as the cause; None where
    nobody waited (``timeout=0``).
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        key: int | None = None,
        timeout: float | None = None,
        keys: Sequence[int] = (),
        using: str | None = None,
        model: str = "AdvisoryLock",
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message, name=name, key=key)
        self.timeout = timeout
        self.keys = keys
        self.sqlstate = sqlstate
        self._using = using
        self._model = model

    def holders(self) -> list[Any]:
        """Ask the database who holds the lock now. Returns rows of ``AdvisoryLock`` or, of a lease, of ``Lease``.

        Raises ``ConfigurationError`` where ``django_pglock`` is not in ``INSTALLED_APPS``: the rows are of its view.
        """
        return list(model_of(self._model).objects.using(self._using).held().filter(key__in=self.keys))


class LockLost(LockError):
    """The lock was held, but its connection went away before the end: the body may not have been alone."""


class LockScopeError(LockError, RuntimeError):
    """A lock of this scope would not protect anything here, so it was not taken."""


class LockKeyError(LockError, ValueError):
    """The value given cannot name a lock. Raised before any SQL is sent."""


class TaskError(PGLockError):
    """The base of all errors about tasks."""


class TaskArgumentsError(TaskError, TypeError, ValueError):
    """The arguments of a task cannot be stored as JSON. Raised at enqueue, before anything is written.

    A ``TypeError`` as Django documents it, and a ``ValueError``, as of a value that no document can hold.
    """


class TaskResultError(TaskError, TypeError, ValueError):
    """What a task function returned cannot be stored as JSON, so the task has failed. Never retried: it has run.

    Never raised to callers: its path stands in the record.
    """


class TaskOptionError(TaskError, TypeError):
    """A task option that does not exist, or a value it cannot have."""


class DuplicateTask(TaskError):
    """``unique=`` with ``on_conflict="raise"``, and there is such a task already: ``result_id``."""

    def __init__(self, message: str, *, result_id: str) -> None:
        super().__init__(message)
        self.result_id = result_id


class TaskTimeout(TaskError, TimeoutError):
    """The attempt took longer than its ``timeout``. Raised inside the task function; retried as every exception is."""

    def __init__(self, message: str = "The attempt took longer than its timeout.") -> None:
        super().__init__(message)


class TaskCancelled(TaskError):
    """Somebody asked the running task to stop. Raised inside the task function by ``context.check()``."""

    def __init__(self, message: str = "Somebody asked this task to end.") -> None:
        super().__init__(message)


class DependencyFailed(TaskError):
    """A task that this one was to run ``after=`` did not succeed. Never raised: its path stands in the record."""


class TooManySnoozes(TaskError):
    """A task snoozed more often than its ``max_snoozes``. Never raised: its path stands in the record."""


class ClaimLost(TaskError):
    """The claim on a task is no longer ours: it was rescued, cancelled or reset meanwhile."""


class WorkerLost(TaskError):
    """The worker died while it held the attempt. Never raised: its path stands in the row of the lost attempt."""
