"""``shared_task``, and ``Celery``: an app of the bridge, which has tasks and settings, and no connection."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from django.apps import apps
from django.utils.module_loading import autodiscover_modules

from django_pglock.contrib.celery import canvas, options
from django_pglock.contrib.celery import result as results
from django_pglock.contrib.celery.options import conf
from django_pglock.contrib.celery.task import Task, current_task, make, register, when
from django_pglock.errors import ConfigurationError

get_task_logger = logging.getLogger
_SAME = {f"celery.{name}": f".{name}" for name in ("app", "canvas", "exceptions", "result", "schedules", "states")}
_TASK = dict.fromkeys(("celery.app.task", "celery.contrib.django.task"), ".task")
#: Modules of Celery, each with the module of the bridge that has its names.
MODULES = {"celery": "", "celery.utils.log": ".app", **_SAME, **_TASK}


def revoke(task_id: Any, *args: Any, **ignored: Any) -> None:
    """Cancel a task by its id, or several: waiting ones do not run, and running ones are asked to stop."""
    results.rows(*(task_id if isinstance(task_id, (list, tuple, set)) else [task_id])).cancel()


class Celery:
    """An app. ``broker`` and ``backend`` have no meaning here: both are the database of ``TASKS["default"]``."""

    Task: Any = Task
    AsyncResult, GroupResult = results.AsyncResult, results.GroupResult
    conf, current_task, tasks = conf, current_task, canvas.tasks
    control = SimpleNamespace(revoke=revoke, terminate=revoke)
    signature = staticmethod(canvas.signature)
    #: The modules of tasks are imported when Django is ready.
    loader = SimpleNamespace(import_default_modules=lambda: None)

    def __init__(self, main: str | None = None, include: Iterable[str] = (), **ignored: Any) -> None:
        self.main = main
        for module in include:
            when(apps.ready, partial(import_module, module))

    def __getattr__(self, name: str) -> Any:
        raise options.missing("app", name)

    def task(self, *args: Any, **given: Any) -> Any:
        """Decorate a function: ``@app.task`` or ``@app.task(bind=True, …)``, as ``shared_task``."""

        def decorate(function: Callable[..., Any]) -> Task:
            return make(function, dict(given), self)

        return decorate(args[0]) if args and callable(args[0]) else decorate

    def register_task(self, task: Any, **ignored: Any) -> Task:
        """Register a task that is a class with ``run()``, or an instance of it."""
        return register(task() if isinstance(task, type) else task, self)

    def config_from_object(self, source: Any, namespace: str | None = None, **ignored: Any) -> None:
        """Read settings with this prefix from Django's, or those of a module or an object."""
        if source == "django.conf:settings":
            conf.namespace = namespace or conf.namespace
        else:
            conf.update(vars(import_module(source) if isinstance(source, str) else source))

    def autodiscover_tasks(self, packages: Any = None, related_name: str = "tasks", force: bool = False) -> None:
        """Import the modules of this name in all apps, when Django is ready."""
        when(apps.ready, partial(autodiscover_modules, related_name))

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Enqueue a call of a task by its name. Raises ``NotRegistered``."""
        return canvas.signature(name).type.apply_async(args, kwargs, **options)

    def set_default(self, *args: Any, **ignored: Any) -> None:
        """Do nothing: all apps have the same tasks and settings."""

    finalize = set_current = set_default


def shared_task(*args: Any, **options: Any) -> Any:
    """Decorate a function: ``@shared_task`` or ``@shared_task(bind=True, max_retries=5)``. Returns a ``Task``.

    ``name bind base queue priority expires`` and ``rate_limit``, which is for all workers together; ``max_retries
    default_retry_delay`` of ``self.retry()``; ``autoretry_for dont_autoretry_for retry_kwargs retry_backoff
    retry_backoff_max retry_jitter``; ``time_limit``, ``soft_time_limit``: seconds, by the package's ``timeout``;
    ``ignore_result``: the returned value is not stored. Raises ``TaskOptionError`` for other options.
    """
    return current_app.task(*args, **options)


def install() -> None:
    """Let ``import celery`` find the bridge. Call it at the top of the settings, before any package imports Celery.

    For packages whose source you do not change. Your own code imports from ``django_pglock.contrib.celery``. Raises
    ``ConfigurationError`` if Celery itself was imported before: some code would then have the one, and some the other.
    """
    package = __name__.rpartition(".")[0]
    if sys.modules.get("celery") not in (None, sys.modules[package]):
        raise ConfigurationError(
            "celery was imported before install() was called. Call install() in the first line of the settings, and "
            "import nothing of celery in manage.py, wsgi.py or the package of the settings."
        )
    for name, module in MODULES.items():
        sys.modules[name] = import_module(f"{package}{module}")


current_app = Celery("default")
