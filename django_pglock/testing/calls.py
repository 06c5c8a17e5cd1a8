"""What the code under test enqueues: recorded beside the rows, or given to a mock instead.

All doors lead through two methods of the backend. They are wrapped when a test first asks, so that no other process
pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

from django_pglock.backend import PostgresBackend
from django_pglock.errors import ConfigurationError
from django_pglock.tasks import registry
from django_pglock.tasks.backends import arguments_of
from django_pglock.tasks.claim import TaskContext, context_of
from django_pglock.tasks.compat import Task
from django_pglock.tasks.fields import OF_CALL

#: The mocks of ``patch_enqueue``: attributes with the names of task functions.
_mocks = SimpleNamespace()
_recorders: list[Callable[[EnqueuedCall], None]] = []


@dataclass(frozen=True, slots=True)
class EnqueuedCall:
    """One call that was enqueued.

    ``options`` are those of ``using()`` that differ from the function's own. ``id`` is that of the task, or with
    ``unique`` that of the existing one.
    """

    task_path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    id: str = field(default="", compare=False)


@contextmanager
def enqueued(function: Task[..., Any] | None = None) -> Iterator[list[EnqueuedCall]]:
    """Return the list of the calls that are enqueued in the block, in their order; of one task function, or of all.

    They are enqueued as ever, so ``run_tasks()`` runs them. A call is in the list although its transaction is rolled
    back later. ``enqueue_on_commit()`` comes with the commit: in a ``TestCase`` within ``captureOnCommitCallbacks()``.
    The ticks of schedules, captures and what a plain INSERT writes are not in the list.
    """
    _wrap_backend()
    calls: list[EnqueuedCall] = []

    def record(call: EnqueuedCall) -> None:
        if function is None or call.task_path == function.module_path:
            calls.append(call)

    _recorders.append(record)
    try:
        yield calls
    finally:
        _recorders.remove(record)


def patch_enqueue(path: str) -> Any:
    """Give the calls of a task function to a mock, and write no rows: ``patch_enqueue("shop.tasks.send")``.

    Like ``mock.patch()`` it is also a decorator of functions, coroutine functions and classes, which get the mock as an
    argument. However the function is enqueued and wherever it was imported, the mock is called with the arguments of
    each call. Arguments that ``enqueue()`` refuses are refused. Raises ``ConfigurationError`` if there is no such task
    function.
    """
    if registry.find(path) is None and not registry.import_function(path):
        raise ConfigurationError(f"patch_enqueue({path!r}): there is no such task function. Give its module_path.")
    _wrap_backend()
    return mock.patch.object(_mocks, path, create=True)


def make_context(function: Task[..., Any], *, attempt: int = 1) -> TaskContext:
    """Return the context of an attempt of a task function, for a test that calls what takes one.

    ``attempt`` is its number. The context has the ``meta`` of ``function.using(meta=…)``. It is never stopped, and its
    steps run without a record. ``function.call(…)`` makes one by itself.
    """
    task: Any = function
    return context_of(task, (), {}, attempt=attempt)


@cache
def _wrap_backend() -> None:
    backend: Any = PostgresBackend
    backend.enqueue = _wrapped(backend.enqueue)
    backend.enqueue_many = _wrapped_many(backend.enqueue_many)


def _wrapped(enqueue: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(enqueue)
    def wrapped(self: PostgresBackend, task: Any, args: Any, kwargs: Any) -> Any:
        if (replacement := _replacement(task)) is not None:
            self.check_call(task, args, kwargs)
            return replacement(*args, **kwargs)
        result = enqueue(self, task, args, kwargs)
        _record(task, args, kwargs, result.id)
        return result

    return wrapped


def _wrapped_many(enqueue_many: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(enqueue_many)
    def wrapped(self: PostgresBackend, task: Any, calls: Iterable[Any]) -> Any:
        if _replacement(task) is not None:
            return [self.enqueue(task, *arguments_of(call)).id for call in calls]
        kept = list(calls)
        ids = enqueue_many(self, task, kept)
        for call, id_ in zip(kept, ids, strict=True):
            _record(task, *arguments_of(call), id_)
        return ids

    return wrapped


def _replacement(task: Any) -> Any:
    return vars(_mocks).get(getattr(task, "module_path", ""))


def _record(task: Any, args: Any, kwargs: Any, id_: str) -> None:
    own = registry.find(task.module_path)
    options = {name: getattr(task, name) for name in OF_CALL if getattr(task, name) != getattr(own, name)}
    for record in tuple(_recorders):
        record(EnqueuedCall(task.module_path, tuple(args), dict(kwargs), options, id_))
