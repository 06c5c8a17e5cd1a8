"""Imports the module of a task function that a row names, if it belongs to an installed app.

Modules called ``tasks`` are imported when Django starts. Third-party apps have task functions in other modules, for
example next to a mail backend, and expect the worker to import the enqueued path. Any program that can write to the
table of tasks can choose such a path. So only modules of installed apps are imported, and only decorated functions run.
"""

from __future__ import annotations

import sys
from importlib import import_module

from django.apps import apps

from django_pglock.loggers import get_logger
from django_pglock.tasks import registry

logger = get_logger("django_pglock.tasks")

_tried: set[str] = set()


def import_function(path: str) -> bool:
    """Import the module of a task function, once in this process. Return whether the function is known now."""
    if registry.find(path) is None and (module := path.rpartition(".")[0]) not in _tried:
        _tried.add(module)
        if module not in sys.modules and _is_inside_an_app(module):
            _import(module)
    return registry.find(path) is not None


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
