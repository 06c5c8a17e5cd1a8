"""Packages that enqueue through django.tasks, whatever the backend."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.messages", "crontask", "maintenance_tasks", "qa.foreign.upkeep"]
MAINTENANCE_TASKS = {"MAX_RUNTIME": 0}
