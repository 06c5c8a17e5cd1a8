"""What the app requires before Django imports any models. In real projects: qa/projects/test_small_projects.py."""

from __future__ import annotations

import django
import pytest

from django_pglock import apps
from django_pglock.errors import ConfigurationError


@pytest.mark.parametrize(("version", "is_refused"), [((5, 2, 0), True), ((6, 0, 0), False)])
def test_django_5_2_without_the_backport_is_told_what_to_install(monkeypatch, version, is_refused):
    monkeypatch.setattr(django, "VERSION", version)
    monkeypatch.setattr(apps, "find_spec", lambda name: None)
    if not is_refused:
        apps.require_django_tasks()
        return
    with pytest.raises(ConfigurationError, match=r"pip install 'django-tasks>=0\.12', or upgrade to Django 6\.0"):
        apps.require_django_tasks()
