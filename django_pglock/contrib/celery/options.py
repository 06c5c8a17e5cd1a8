"""The options of Celery, at the decorator and at a call, in the words of this package.

Raises ``TaskOptionError`` for what has no equivalent, with what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from django_pglock.contrib.celery.canvas import NEEDED
from django_pglock.contrib.celery.conf import conf
from django_pglock.errors import TaskOptionError
from django_pglock.tasks.options import Rate


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Without an effect, because it is so for every task here, or because there is no broker.
WITHOUT_EFFECT = _words(
    "acks_late acks_on_failure_or_timeout add_to_parent compression connection ignore_result producer "
    "reject_on_worker_lost retry retry_policy send_events shadow shared store_errors_even_if_ignored throws "
    "track_started trail"
)
#: Those of the decorator, which are attributes of ``Task`` and of a project's own base, and those of a call.
OF_TASK = _words(
    "autoretry_for base bind default_retry_delay dont_autoretry_for expires max_retries name priority queue rate_limit "
    "retry_backoff retry_backoff_max retry_jitter retry_kwargs soft_time_limit time_limit"
)
OF_CALL = _words(f"countdown eta expires priority queue soft_time_limit time_limit retries {NEEDED}")
#: Other words of Celery, for options, tasks and apps, and what to write instead.
REFUSED = {
    word: text
    for words, text in {
        "add_consumer purge": "the queues of runlockworker, and Task.objects",
        "add_periodic_task on_after_configure on_after_finalize": "@task(cron=…), or a row of Schedule",
        "add_to_chord replace": "a chain or a chord at the call",
        "backend": "AsyncResult(id), which reads the row",
        "broadcast events inspect ping": "Task.objects and Worker.objects, or manage.py locktasks status",
        "chunks map starmap": "group(f.s(each) for each in …)",
        "exchange routing_key": "queue=",
        "headers": "an argument of the function",
        "pydantic": "Model.model_validate(…) in the function, and model_dump(mode='json') at the call",
        "send_event": "a log record",
        "serializer": "nothing: arguments and results are JSON, as json of Celery writes it",
        "start worker_main shutdown": "manage.py runlockworker, and SIGTERM",
        "task_id": "nothing: the database gives the ids. A key of one's own is an argument",
        "typing": "nothing: the arguments of each call are checked",
    }.items()
    for word in words.split()
}
_AS_HERE: dict[str, tuple[Any, ...]] = {"serializer": (None, "json"), "typing": (None, True), "pydantic": (None, False)}


def check(where: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``TaskOptionError`` for options that are neither known nor without an effect."""
    for name, value in options.items():
        if name not in known and name not in WITHOUT_EFFECT and value not in _AS_HERE.get(name, ()):
            instead = REFUSED.get(name, "@task, which has options of its own, or nothing")
            raise TaskOptionError(f"{where}: {name}={value!r} of Celery has no equivalent here. Write {instead}.")


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute of Celery's tasks and apps that is not here."""
    instead = f" of Celery has no equivalent here. Write {REFUSED[name]}" if name in REFUSED else " does not exist"
    return AttributeError(f"{owner}.{name}{instead}.")


def of_task(task: Any) -> dict[str, Any]:
    """Return the options of ``@task`` for a task of the bridge."""
    options = {
        "queue": task.queue or conf.task_default_queue,
        "soft_time_limit": conf.task_soft_time_limit if task.soft_time_limit is None else task.soft_time_limit,
        "time_limit": conf.task_time_limit if task.time_limit is None else task.time_limit,
        "priority": task.priority,
        "expires": task.expires,
    }
    retries = max(task.max_retries or 0, task.retry_kwargs.get("max_retries") or 0)
    rate = {} if not task.rate_limit else {"rate": _rate(task.rate_limit)}
    return {**of_call(task.name, options), **rate, "max_attempts": retries + 1}


def of_call(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``using()`` for those of ``apply_async()``."""
    check(where, options, OF_CALL)
    limits = [options[name] for name in ("soft_time_limit", "time_limit") if options.get(name) is not None]
    changes = {
        "queue_name": options.get("queue"),
        "priority": options.get("priority"),
        "expires": options.get("expires"),
        "timeout": float(limits[0]) if limits else None,
        "run_after": due(options.get("countdown"), options.get("eta")),
    }
    return {name: value for name, value in changes.items() if value is not None}


def due(countdown: float | None, eta: datetime | None) -> datetime | timedelta | None:
    """Return when a call is due: after some seconds, or at a date."""
    if eta is not None:
        return aware(eta)
    return timedelta(seconds=countdown) if countdown else None


def aware(date: datetime) -> datetime:
    """Return a date with its zone. A naive one is in UTC, as in Celery."""
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _rate(limit: str | float) -> Rate | str:
    """Return a rate of Celery: a text such as "10/m", or a number of tasks in a second."""
    return limit if isinstance(limit, str) and "/" in limit else Rate(1, per=1 / float(limit))
