"""Settings that all foreign projects have in common."""

from __future__ import annotations

import environ

env = environ.Env()

SECRET_KEY = "only-for-tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "qa.foreign.sample.urls"
MIDDLEWARE: list[str] = []

DATABASES = {"default": env.db("DATABASE_URL")}
DATABASES["default"]["CONN_MAX_AGE"] = None

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_pglock",
    "qa.foreign.sample",
]
TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}}
DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 0.5, "POLL_INTERVAL": 2.0}

#: The management command that makes the tables, and its options.
MIGRATE = ("migrate",)
#: What the project's database is given before that.
BEFORE_MIGRATING = ""
