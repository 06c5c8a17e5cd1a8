"""The app: it makes the tasks known that were decorated before there were settings, and checks these settings."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import Error, register

from django_pglock.contrib.celery import options, task


class CeleryConfig(AppConfig):
    """Celery's names for tasks of django_pglock."""

    name = "django_pglock.contrib.celery"
    # "celery" may be in INSTALLED_APPS itself.
    label = "django_pglock_celery"

    def ready(self) -> None:
        while task.pending:
            task.pending.pop(0)()
        register(check_settings)


def check_settings(**ignored: Any) -> list[Error]:
    """E101: a setting of Celery would change what tasks do, and is not read here."""
    given = {name: vars(options.conf).get(name) or getattr(options.conf, name) for name in options.REFUSED}
    wrong = {name: value for name, value in given.items() if value and value not in options.AS_HERE.get(name, ())}
    return [
        Error(f"{name} of Celery is not read.", hint=f"Write {options.REFUSED[name]}.", id="django_pglock.E101")
        for name in wrong
    ]
