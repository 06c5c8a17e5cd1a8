"""The first log message of a worker: where it runs, which queues it serves, and where to find more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import apps
from django.db import connections

from django_pglock import __version__
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import timing_of
from django_pglock.worker import Worker

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: Functions and schedules that are named at most.
FEW = 8


def banner(worker: Worker, *, using: str, threads: int) -> str:
    """Return the banner of a worker that claims from the database ``using``: a sentence, and a line for each fact."""
    functions = [task for task in registry.definitions() if not task.is_own]
    schedules = [f"{task.module_path} ({' '.join(timing_of(task)).strip()})" for task in registry.scheduled()]
    facts = {
        "database": _database(using),
        "queues": (", ".join(worker.queues.given) or "all") + _unused(worker, functions),
        "functions": _listed([task.module_path for task in functions])
        or "none; define tasks in a module tasks.py of an app in INSTALLED_APPS",
        "schedules": _listed(schedules) or "none",
        "threads": f"{threads}; coroutines need none",
        "look": _places(),
    }
    lines = [f"  {name:10} {text}" for name, text in facts.items()]
    return "\n".join([f"Worker {worker.identity.name} of django_pglock {__version__} starts.", *lines])


def _unused(worker: Worker, functions: list[TaskFields]) -> str:
    """Return that no function has one of these queues: a name may be a typing error. Empty if no function is known."""
    is_used = any(worker.queues.serves(task.queue_name) for task in functions)
    return "; no function is enqueued there, unless by using(queue_name=...)" if functions and not is_used else ""


def _database(using: str) -> str:
    """Return the alias, and the address of the database in the settings without user and password."""
    settings = connections[using].settings_dict
    host, port = settings["HOST"], settings["PORT"]
    where = f" at {host}{':' if port else ''}{port}" if host else ""
    return f"{using}: {settings['NAME'] or 'named by the environment'}{where}"


def _listed(names: list[str]) -> str:
    """Return the number of names and the names, or the first of them; an empty string if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{len(names)}: {', '.join(names[:FEW])}{more}"


def _places() -> str:
    admin = ", the pages 'Locks and tasks' of the admin" if apps.is_installed("django.contrib.admin") else ""
    return f"manage.py locktasks status{admin}; Ctrl-C ends the worker after its running tasks"
