"""Packages that enqueue through django.tasks, whatever the backend."""

from tests.foreign.base import *  # noqa: F403
from tests.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.messages", "crontask", "maintenance_tasks", "tests.foreign.upkeep"]
MAINTENANCE_TASKS = {"MAX_RUNTIME": 0}
