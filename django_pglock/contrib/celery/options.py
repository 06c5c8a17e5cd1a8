"""The options and the settings of Celery in the words of this package.

Raises ``TaskOptionError`` for what has no equivalent, with what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from django.conf import settings

from django_pglock.errors import TaskOptionError
from django_pglock.tasks.options import Rate

#: The option of a call whose result another call gets: it is kept although the task has ``ignore_result``.
NEEDED = "result_is_needed"


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
#: Other words of Celery, for options, tasks, apps and settings, and what to write instead.
REFUSED = {
    word: text
    for words, text in {
        "add_consumer broadcast events inspect ping purge": "Task.objects and Worker.objects, or manage.py locktasks",
        "add_periodic_task beat_schedule on_after_configure on_after_finalize": "@task(cron=…), or rows of Schedule",
        "add_to_chord replace": "a chain or a chord at the call",
        "backend": "AsyncResult(id), which reads the row",
        "chunks map starmap": "group(f.s(each) for each in …)",
        "exchange routing_key task_routes": "queue= at the decorator or the call",
        "headers": "an argument of the function",
        "pydantic": "Model.model_validate(…) in the function, and model_dump(mode='json') at the call",
        "result_serializer serializer task_serializer": "nothing: arguments and results are JSON",
        "send_event": "a log record",
        "shutdown start worker_main": "manage.py runlockworker, and SIGTERM",
        "task_annotations task_default_rate_limit": "the options at the decorators",
        "task_id": "nothing: the database gives the ids. A key of one's own is an argument",
        "task_queues": "QUEUES in TASKS, and the queues of runlockworker",
        "typing": "nothing: the arguments of each call are checked",
    }.items()
    for word in words.split()
}
#: Values of these that mean what is so here.
AS_HERE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("serializer", "task_serializer", "result_serializer"), (None, "json")),
    "typing": (None, True),
    "pydantic": (None, False),
}


class Conf:
    """What ``app.conf`` is, for all apps: the values that were set, then those of Django's settings, then None."""

    #: The prefix of the names in Django's settings.
    namespace = "CELERY"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(settings, f"{self.namespace}_{name.upper()}", None)

    def update(self, *values: Any, **more: Any) -> None:
        """Set several values."""
        vars(self).update({name.lower(): value for name, value in dict(*values, **more).items()})


conf = Conf()


def check(where: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``TaskOptionError`` for options that are neither known nor without an effect."""
    for name, value in options.items():
        if name not in known and name not in WITHOUT_EFFECT and value not in AS_HERE.get(name, ()):
            instead = REFUSED.get(name, "@task, which has options of its own, or nothing")
            raise TaskOptionError(f"{where}: {name}={value!r} of Celery has no equivalent here. Write {instead}.")


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute of Celery's tasks and apps that is not here."""
    instead = f" of Celery has no equivalent here. Write {REFUSED[name]}" if name in REFUSED else " does not exist"
    return AttributeError(f"{owner}.{name}{instead}.")


def of_task(task: Any) -> dict[str, Any]:
    """Return the options of ``@task`` for a task of the bridge."""
    given = {name: getattr(task, name) for name in ("priority", "expires", "soft_time_limit", "time_limit")}
    limits = {name: getattr(conf, f"task_{name}") if given[name] is None else given[name] for name in list(given)[2:]}
    retries = max(task.max_retries or 0, task.retry_kwargs.get("max_retries") or 0)
    options = of_call(task.name, {**given, **limits, "queue": task.queue or conf.task_default_queue})
    return {**options, "max_attempts": retries + 1, **({"rate": _rate(task.rate_limit)} if task.rate_limit else {})}


def of_call(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``using()`` for those of ``apply_async()``."""
    check(where, options, OF_CALL)
    limits = [options[name] for name in ("soft_time_limit", "time_limit") if options.get(name) is not None]
    countdown, eta = options.get("countdown"), options.get("eta")
    changes = {
        "queue_name": options.get("queue"),
        "priority": options.get("priority"),
        "expires": options.get("expires"),
        "timeout": float(limits[0]) if limits else None,
        "run_after": aware(eta) if eta else timedelta(seconds=countdown) if countdown else None,
    }
    return {name: value for name, value in changes.items() if value is not None}


def aware(date: datetime) -> datetime:
    """Return a date with its zone. A naive one is in UTC, as in Celery."""
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)


def _rate(limit: str | float) -> Rate | str:
    """Return a rate of Celery: a text such as "10/m", or a number of tasks in a second."""
    return limit if isinstance(limit, str) and "/" in limit else Rate(1, per=1 / float(limit))
