"""The managers of tasks, schedules, queues, workers and the history, such as ``Task.objects``.

Each method is one function of this folder: its first argument is the queryset, or the alias of its database. Projects,
the admin and the commands call the methods. The admin and the commands also call some functions directly. The worker
calls only functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from operator import attrgetter
from typing import Any, TypeVar, cast

from django.db import models
from django.utils.asyncio import async_unsafe

from django_pglock.store import attempts, count, liveness, numbers, operate, schedules, steps
from django_pglock.store import bulk as bulk  # so that each worker knows its task
from django_pglock.store import failures as failed_tasks
from django_pglock.store import prune as pruning
from django_pglock.store import ready as ready_tasks
from django_pglock.store.claim_manager import LockingQuerySet

F = TypeVar("F", bound=Callable[..., Any])


def for_writing(rows: Any) -> Any:
    """Return a queryset in the database for writes. A router may send reads to a replica, which may be late."""
    # A queryset that locks rows is one that writes.
    return rows.using(rows.select_for_update().db)


def _method(function: F, first: Callable[[Any], Any] = for_writing) -> F:
    """Return a function as a method. ``first`` makes its first argument of the queryset or manager."""

    @wraps(function)
    def method(self: Any, *values: Any, **options: Any) -> Any:
        return function(first(self), *values, **options)

    own, *others = signature(function).parameters.values()
    method.__signature__ = signature(function).replace(parameters=[own.replace(name="self"), *others])  # type: ignore[attr-defined]
    # In a coroutine, Django's error would not name the method.
    name = function.__name__
    message = f"{name}() blocks the event loop here. Write: await sync_to_async(rows.{name})(…)"
    guarded: Any = async_unsafe(message)(method)
    return cast("F", guarded)


def _report(function: F) -> F:
    """Return a function that reads a whole database as a method of a manager."""
    return _method(function, attrgetter("db"))


class TaskQuerySet(LockingQuerySet[Any]):
    """Tasks, and the operations on tasks: the verbs of operate.py are methods, too.

    It has only ``claim`` of the methods of ``ClaimQuerySet``. The others would change the status of a task without the
    steps that belong to it, such as the release of the tasks that wait for it.
    """

    ready = ready_tasks.ready
    due = ready_tasks.due
    stuck = operate.stuck
    suspended = steps.suspended
    prune = _method(pruning.prune)


_METHOD = """{help}

Returns how many. {about}

A task whose row another transaction has locked, or whose unique key it is taking, is left out. Some thousand tasks are
changed at a time. Outside of a transaction, each time is a transaction, so after an interruption the finished ones
stay.
"""


def _method_of(verb: operate.Verb) -> Callable[..., int]:
    def change(tasks: Any) -> int:
        return verb.apply(tasks)

    def change_to(tasks: Any, queue: str) -> int:
        return verb.apply(tasks, queue)

    def retry(tasks: Any, *, dependants: bool = False) -> int:
        return verb.apply(tasks, related=verb.related(tasks).ids if dependants else ())

    def cancel(tasks: Any, *, parts: bool = False) -> int:
        return verb.apply(tasks, related=verb.related(tasks).ids if parts else ())

    others: dict[str, Callable[..., int]] = {"retry": retry, "cancel": cancel}
    function = others.get(verb.name, change_to if verb.takes_queue else change)
    function.__name__, function.__qualname__ = verb.name, f"TaskQuerySet.{verb.name}"
    function.__doc__ = _METHOD.format(help=verb.help, about=verb.about)
    return _method(function)


for _verb in operate.VERBS.values():
    setattr(TaskQuerySet, _verb.name, _method_of(_verb))


class TaskManager(models.Manager.from_queryset(TaskQuerySet)):  # type: ignore[misc]
    """The manager of ``Task``. Its own methods read all tasks of a database, so a filtered queryset lacks them."""

    unknown = _report(ready_tasks.unknown)
    queue_counts = _report(count.queue_counts)
    failures = _report(failed_tasks.failures)
    results = _method(attempts.results, lambda tasks: for_writing(tasks).db)


class ScheduleQuerySet(models.QuerySet[Any]):
    """Schedules, and the operations on schedules."""

    enable = _method(schedules.enable)
    disable = _method(schedules.disable)
    run_now = _method(schedules.run_now)


class ScheduleManager(models.Manager.from_queryset(ScheduleQuerySet)):  # type: ignore[misc]
    """The manager of ``Schedule``."""


class QueueQuerySet(models.QuerySet[Any]):
    """Queues, and the operations on queues."""

    paused = ready_tasks.paused


class QueueManager(models.Manager.from_queryset(QueueQuerySet)):  # type: ignore[misc]
    """The manager of ``Queue``. It pauses and resumes queues by name."""

    pause = _method(ready_tasks.pause, lambda queues: for_writing(queues).db)
    resume = _method(ready_tasks.resume, lambda queues: for_writing(queues).db)


class WorkerQuerySet(models.QuerySet[Any]):
    """Workers, by their heartbeats."""

    alive = liveness.alive


class WorkerManager(models.Manager.from_queryset(WorkerQuerySet)):  # type: ignore[misc]
    """The manager of ``Worker``."""


class NumberManager(models.Manager[Any]):
    """The manager of ``Number``, whose rows are written by workers."""

    series = _report(numbers.series)
    totals = _report(numbers.totals)
