"""django-postgres-extra over Django's backend and over another package's, on Django 5.2, the last that it takes."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES, INSTALLED_APPS

DATABASES["default"]["ENGINE"] = "psqlextra.backend"
INSTALLED_APPS = ["django.contrib.postgres", "psqlextra", "django_prometheus", *INSTALLED_APPS]
POSTGRES_EXTRA_DB_BACKEND_BASE = "django_prometheus.db.backends.postgresql"
