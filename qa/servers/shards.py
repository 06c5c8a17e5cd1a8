"""Settings of a project whose tasks are on two servers, which the environment names."""

import environ

from tests.settings import *  # noqa: F403

BACKEND = "django_pglock.backend.PostgresBackend"
env = environ.Env()

DATABASES = {"default": env.db("NORTH_URL"), "south": env.db("SOUTH_URL")}
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": []},
    "south": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "south"}},
}
SILENCED_SYSTEM_CHECKS = ["django_pglock.W009"]
