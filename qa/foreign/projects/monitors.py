"""Packages that record tasks by the signals of django.tasks, whatever the backend."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "overseer", "tasks_monitor"]
