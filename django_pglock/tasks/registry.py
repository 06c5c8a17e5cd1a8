"""The task functions that this process knows, by dotted path. Only these ever run, whatever a row says."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

from django_pglock.tasks.schedules import is_scheduled

if TYPE_CHECKING:
    from django_pglock.tasks.definition import PostgresTask

_definitions: dict[str, PostgresTask] = {}


def register(task: PostgresTask) -> PostgresTask:
    """Note a decorated function and return its definition: the task as decorated, before any ``using()``.

    A copy made by ``using()`` finds the definition it came from. A module that is loaded again replaces its own.
    """
    known = _definitions.get(task.module_path)
    if known is None or known.func is not task.func:
        known = _definitions[task.module_path] = task
    return known


def find(path: str) -> PostgresTask | None:
    """Return the task function registered under ``path``, or None. Imports nothing that a row could name."""
    return _definitions.get(path)


def known_paths() -> list[str]:
    """Return the dotted paths of all registered task functions, in order."""
    return sorted(_definitions)


def sync_paths() -> list[str]:
    """Return those of them that are no coroutine functions."""
    return sorted(path for path, task in _definitions.items() if not iscoroutinefunction(task.func))


def scheduled() -> list[PostgresTask]:
    """Return the registered task functions that run by the clock, in the order of their paths."""
    return [task for _, task in sorted(_definitions.items()) if is_scheduled(task)]


def has_fair() -> bool:
    """Say whether a function with ``fair=`` is registered."""
    return any(task.fair is not None for task in _definitions.values())
