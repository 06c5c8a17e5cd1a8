"""The example project with an app of the tests' own."""

import django

from example_project.settings import *  # noqa: F403
from example_project.settings import INSTALLED_APPS, TASKS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.sample"]
TASKS = {"default": {**TASKS["default"], "QUEUES": []}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Frequent heartbeats, so that tests about dead workers need not wait for long.
DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 0.5, "POLL_INTERVAL": 2.0}
if django.VERSION >= (6, 1):
    # As startproject of this version writes it; without it, mail is deprecated.
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.console.EmailBackend"}}
