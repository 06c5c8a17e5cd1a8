"""Wagtail 7 on Django 5.2, where the tasks of both are those of the backport django-tasks."""

from qa.foreign.projects.wagtail_8 import *  # noqa: F403
