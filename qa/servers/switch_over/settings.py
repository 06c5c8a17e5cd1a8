"""A project whose DATABASES lists both servers: libpq connects to the one that takes writes."""

import os

from qa.chaos.settings import *  # noqa: F403

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": os.environ["SWITCH_OVER_HOSTS"],
        "PORT": "5432,5432",
        "OPTIONS": {"target_session_attrs": "read-write", "connect_timeout": 5},
    }
}
