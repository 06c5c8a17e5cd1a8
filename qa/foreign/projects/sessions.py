"""One database on several aliases, each with another way to a session."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES, INSTALLED_APPS, TASKS

INSTALLED_APPS = [*INSTALLED_APPS, "qa.foreign.new_sessions"]
_default = DATABASES["default"]
DATABASES["token"] = {**_default, "ENGINE": "qa.foreign.backends.token", "USER": "cloud", "PASSWORD": "stale"}
DATABASES["minted"] = {**DATABASES["token"], "ENGINE": "qa.foreign.backends.minted"}
DATABASES["role"] = {**_default, "USER": "login", "OPTIONS": {"assume_role": "application"}}
DATABASES["pool"] = {**_default, "CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 0, "max_size": 3, "timeout": 10}}}
TASKS.update({alias: {**TASKS["default"], "OPTIONS": {"database": alias}} for alias in DATABASES if alias != "default"})
#: The tables are made where the receiver of connection_created says.
BEFORE_MIGRATING = "CREATE SCHEMA inside"
