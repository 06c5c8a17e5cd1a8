"""The app: it makes the tasks known that were decorated before there were settings, and checks these settings."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import Error, Warning, register  # noqa: A004 - Django's name

from django_pglock.contrib.celery import app
from django_pglock.contrib.celery.conf import REFUSED, SERIALIZERS, conf, refused
from django_pglock.contrib.celery.task import define_pending


class CeleryConfig(AppConfig):
    """Celery's names for tasks of django_pglock."""

    name = "django_pglock.contrib.celery"
    # "celery" may be in INSTALLED_APPS itself.
    label = "django_pglock_celery"

    def ready(self) -> None:
        define_pending()
        while app.to_import:
            app.to_import.pop(0)()
        register(check_settings)


def check_settings(**ignored: Any) -> list[Any]:
    """Return a message for each setting of Celery that would change what tasks do, and is not read."""
    names = (*REFUSED, *SERIALIZERS)
    messages: list[Any] = [
        Error(why, id="django_pglock.E101") for each in names if (why := refused(each, getattr(conf, each)))
    ]
    if conf.beat_schedule:
        messages.append(
            Warning(
                "beat_schedule of Celery is not read by workers.",
                hint="Run manage.py celery_schedules once, which makes rows of Schedule, and remove the setting. "
                "Or write @task(cron=…).",
                id="django_pglock.W101",
            )
        )
    return messages
