"""Celery itself, with a worker in this process and the rows of its beat, beside the bridge."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_pglock.contrib.celery", "django_celery_beat"]
