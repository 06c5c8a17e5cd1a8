"""The app's configuration: what is registered when Django is ready."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import django
from django.apps import AppConfig
from django.conf import settings
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class PGLockConfig(AppConfig):
    """Locks and tasks on PostgreSQL."""

    name = "django_pglock"
    label = "django_pglock"
    verbose_name = _("Locks and tasks")
    # Set here, so that a project with another DEFAULT_AUTO_FIELD does not need a migration of this app.
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_pglock import checks  # noqa: F401
        from django_pglock.postgres import forking  # noqa: F401

        post_migrate.connect(_run_sql_of_migrations, sender=self, dispatch_uid="django_pglock.apps")

        if django.VERSION < (6, 0) and find_spec("django_tasks") is not None:
            # Django 6 imports these by itself. The backport does so only if "django_tasks" is in INSTALLED_APPS.
            from django_tasks import checks as _backport_checks  # noqa: F401
            from django_tasks import signals as _backport_signals  # noqa: F401
        if getattr(settings, "TASKS", None):
            # Results, the admin and the worker know only functions that are registered, so every process imports the
            # modules "tasks" of all apps. A project that uses only locks imports none.
            autodiscover_modules("tasks")


def _run_sql_of_migrations(*, using: str, **kwargs: Any) -> None:
    from django_pglock.migrations._operations import run_without_migrations

    run_without_migrations(using)
