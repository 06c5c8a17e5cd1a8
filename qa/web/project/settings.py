"""One small project for all servers; what differs between them comes from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environ

env = environ.Env()

SECRET_KEY = "only-for-the-tests"
ALLOWED_HOSTS = ["127.0.0.1"]
DEBUG = env.bool("WEB_DEBUG", default=False)
ROOT_URLCONF = "qa.web.project.urls"
USE_TZ = True

#: The folder in which requests leave their marks and look for open gates.
GATES = Path(env.str("WEB_GATES"))


def database(url: str) -> dict[str, Any]:
    """Return the settings of a database, with the server's name for pg_stat_activity."""
    # PostgreSQL has to notice a client that was killed while it waited for a lock.
    options = {"application_name": env.str("WEB_NAME"), "options": "-c client_connection_check_interval=2s"}
    if env.bool("WEB_POOL", default=False):
        # Idle sessions are closed after a second, one a second. A session that stays open is in use, or leaked.
        options["pool"] = {"min_size": 1, "max_size": 16, "timeout": 30, "max_idle": 1}
    age = env.int("WEB_CONN_MAX_AGE", default=0)
    return {**env.db_url_config(url), "CONN_MAX_AGE": age, "CONN_HEALTH_CHECKS": True, "OPTIONS": options}


DATABASES = {"default": database(env.str("DATABASE_URL"))}
DJANGO_PGLOCK = {"SCOPE": env.str("WEB_SCOPE", default="auto")}

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_pglock"]
MIDDLEWARE = [
    "qa.web.project.middleware.stops",
    "qa.web.project.middleware.drops",
    "django.middleware.gzip.GZipMiddleware",
    "django.middleware.http.ConditionalGetMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {"loaders": [("django.template.loaders.locmem.Loader", {"page.html": "rendered {{ stop }}"})]},
    }
]
TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": [], "OPTIONS": {}}}

# The tests find 500 responses and reports of the package in this file.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"errors": {"class": "logging.FileHandler", "filename": env.str("WEB_ERRORS"), "level": "ERROR"}},
    "loggers": {name: {"handlers": ["errors"]} for name in ("django", "django_pglock", "asyncio")},
}
