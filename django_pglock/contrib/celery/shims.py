"""``install()``: packages of others that import ``celery`` get the bridge."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from django_pglock.errors import ConfigurationError

get_task_logger = logging.getLogger

#: Modules of Celery, each with the module of the bridge that has its names.
_SAME = {f"celery.{name}": f".{name}" for name in ("app", "canvas", "exceptions", "result", "schedules", "states")}
_OTHERS = {"": "celery", ".shims": "celery.utils.log", ".task": "celery.app.task celery.contrib.django.task"}
MODULES = {**_SAME, **{name: module for module, names in _OTHERS.items() for name in names.split()}}


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
