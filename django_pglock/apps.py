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

from django_pglock.error_reading import one_line
from django_pglock.errors import ConfigurationError


class PGLockConfig(AppConfig):
    """Background tasks and locks on PostgreSQL."""

    name = "django_pglock"
    label = "django_pglock"
    verbose_name = _("Background tasks and locks")
    # Set here, so that a project with another DEFAULT_AUTO_FIELD does not need a migration of this app.
    default_auto_field = "django.db.models.BigAutoField"

    def __init__(self, app_name: str, app_module: Any) -> None:
        super().__init__(app_name, app_module)
        # Here and not in a system check: Django makes all AppConfigs before it imports any models, and the imports of
        # models and tasks would fail first, with a less helpful message.
        require_psycopg()
        require_django_tasks()

    def ready(self) -> None:
        from django_pglock import checks  # noqa: F401

        # Before the first request begins, which imports the views: a lock that is held for a response is freed by the
        # signal of the end of its request, and this module must have seen the signal of the beginning.
        from django_pglock.locks import responses  # noqa: F401
        from django_pglock.postgres import forking  # noqa: F401

        post_migrate.connect(_run_sql_of_migrations, sender=self, dispatch_uid="django_pglock.apps")

        if getattr(settings, "TASKS", None):
            # Results, the admin and the worker know only functions that are registered, so every process imports the
            # modules "tasks" of all apps. A project that uses only locks imports none.
            autodiscover_modules("tasks")


def require_psycopg() -> None:
    """Raise ``ConfigurationError`` if psycopg 3 cannot be imported, or finds no libpq."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"django_pglock needs psycopg 3, and the import of psycopg failed: {one_line(error)}. "
            "Install it with: python -m pip install 'psycopg[binary]>=3.2'"
        ) from None


def require_django_tasks() -> None:
    """Raise ``ConfigurationError`` without ``django.tasks``, of which the models have parts, also without ``TASKS``."""
    if django.VERSION < (6, 0) and find_spec("django_tasks") is None:
        raise ConfigurationError(
            "Django 5.2 has no django.tasks, which the app django_pglock needs. Install the backport with: python -m "
            "pip install 'django-tasks>=0.12', or upgrade to Django 6.0. Locks alone need no app in INSTALLED_APPS."
        )


def _run_sql_of_migrations(*, using: str, **kwargs: Any) -> None:
    from django_pglock.migrations._operations import run_without_migrations

    run_without_migrations(using)
