"""The task functions that this process knows, by dotted path. Only these run, whatever path a row has.

Modules called ``tasks`` are imported when Django starts. Third-party apps have task functions in other modules, for
example next to a mail backend, and expect the worker to import the enqueued path. Any program that can write to the
table of tasks can choose such a path. So only modules of installed apps are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from django.apps import apps

from django_pglock.loggers import get_logger
from django_pglock.tasks.schedules import Timing, is_scheduled, timing_of

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields


_definitions: dict[str, TaskFields] = {}
# Cached, because it is needed for each claim.
_is_coroutine_function = lru_cache(maxsize=None)(iscoroutinefunction)


def register(task: TaskFields) -> TaskFields:
    """Register a decorated function. Return its definition: the decorated task, without changes by ``using()``.

    For a copy that ``using()`` has made, this is the definition of the original. A module that is loaded again replaces
    its own definitions.
    """
    known = _definitions.get(task.module_path)
    if known is None or known.func is not task.func:
        known = _definitions[task.module_path] = task
    return known


def find(path: str) -> TaskFields | None:
    """Return the task function registered under ``path``, or None. Imports nothing."""
    return _definitions.get(path)


def known_paths() -> list[str]:
    """Return the dotted paths of all registered task functions, in order."""
    return sorted(_definitions)


def definitions() -> list[TaskFields]:
    """Return all registered task functions, in the order of their paths."""
    return [task for _, task in sorted(_definitions.items())]


def version_of(path: str, timing: Timing) -> str:
    """Return the text by which a worker's row says which version of a schedule its code has."""
    return f"{path} {timing.text}"


def known_versions() -> list[str]:
    """Return the paths of all registered functions, and the versions of their schedules."""
    return [*known_paths(), *(version_of(task.module_path, timing_of(task)) for task in scheduled())]


def count() -> int:
    """Return how many task functions are registered. The number only grows."""
    return len(_definitions)


def is_async(path: str) -> bool:
    """Return whether the function registered under ``path`` is a coroutine function."""
    task = _definitions.get(path)
    return task is not None and _is_coroutine_function(task.func)


def scheduled() -> list[TaskFields]:
    """Return the registered task functions that run by the clock, in the order of their paths."""
    return [task for task in definitions() if is_scheduled(task)]


def why_not_found(function: Callable[..., Any]) -> str | None:
    """Return why no worker could find a function by its module and name; None: workers could."""
    module = function.__module__
    if module is None or module == "__main__" or module not in sys.modules:
        return (
            "it was defined in a shell, a notebook or a script, which no worker can import. Move it to a module of an "
            "app, such as tasks.py"
        )
    if "<" in function.__qualname__:
        return (
            "it is a lambda or was defined inside another function, so no worker can import it by name. "
            "Define it with def, at the top level of a module"
        )
    return None


logger = get_logger("django_pglock.tasks")

_tried: set[str] = set()


def import_function(path: str) -> bool:
    """Import the module of a task function, once in this process. Return whether the function is known now."""
    if find(path) is None and (module := path.rpartition(".")[0]) not in _tried:
        _tried.add(module)
        if module not in sys.modules and _is_inside_an_app(module):
            _import(module)
    return find(path) is not None


def _is_inside_an_app(module: str) -> bool:
    names = module.split(".")
    # A package's __main__ is a program: importing it would run it.
    are_names = all(name.isidentifier() and name != "__main__" for name in names)
    return are_names and apps.get_containing_app_config(module) is not None


def _import(module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if not _is_part_of(module, error.name):
            logger.warning("The module %s of a task cannot be imported.", module, exc_info=True)
        # Otherwise the module does not exist: it was removed, or belongs to the next deployment. Workers report unknown
        # tasks.
    except BaseException:  # a module may do anything when it is imported, even call sys.exit()
        logger.warning("The module %s of a task cannot be imported.", module, exc_info=True)
    else:
        logger.info("Imported %s, the module of a task.", module)


def _is_part_of(module: str, name: str | None) -> bool:
    return name is not None and f"{module}.".startswith(f"{name}.")
