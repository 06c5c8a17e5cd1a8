"""The classes of ``django.tasks`` are those of one package: Django's own, or the backport on Django 5.2."""

from __future__ import annotations

from importlib import import_module

import django
import pytest
from django.dispatch import Signal

from django_pglock.tasks import compat


@pytest.mark.parametrize("name", [name for name in compat.__all__ if isinstance(getattr(compat, name), type)])
def test_each_class_is_of_the_package_that_the_version_of_django_decides_on(name):
    """Both may be installed. An object of the other one would fail each isinstance."""
    package = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    assert getattr(compat, name).__module__.startswith(package)


def test_the_signals_are_those_that_receivers_of_a_project_connect_to():
    expected = import_module("django.tasks.signals" if django.VERSION >= (6, 0) else "django_tasks.signals")
    for name in ("task_enqueued", "task_started", "task_finished"):
        assert isinstance(getattr(compat, name), Signal)
        assert getattr(compat, name) is getattr(expected, name)
