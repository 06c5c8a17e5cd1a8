"""Settings of that project. The contestant is named by the environment; connections persist for all of them."""

import json
import os

APP, BACKEND = {
    "ours": ("django_pglock", "django_pglock.backend.PostgresBackend"),
    "django_absurd": ("django_absurd", "django_absurd.backends.AbsurdBackend"),
    "django_ox": ("django_ox", "django_ox.backend.OxBackend"),
    "django_tasks_db": ("django_tasks_db", "django_tasks_db.DatabaseBackend"),
}[os.environ["BENCH_CONTESTANT"]]

SECRET_KEY = "only-for-measuring"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ["PGHOST"],
        "USER": os.environ["PGUSER"],
        "NAME": os.environ["PGDATABASE"],
        "CONN_MAX_AGE": None,
    }
}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", APP, "bench.app"]
TASKS = {"default": {"BACKEND": BACKEND}}
DJANGO_PGLOCK = json.loads(os.environ.get("BENCH_PGLOCK", "{}"))
USE_TZ = True
