"""One database on several aliases, each with another way to a session."""

from tests.foreign.base import *  # noqa: F403
from tests.foreign.base import DATABASES, INSTALLED_APPS, TASKS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.foreign.new_sessions"]
_default = DATABASES["default"]
DATABASES["token"] = {**_default, "ENGINE": "tests.foreign.backends.token", "USER": "cloud", "PASSWORD": "stale"}
DATABASES["minted"] = {**DATABASES["token"], "ENGINE": "tests.foreign.backends.minted"}
DATABASES["role"] = {**_default, "USER": "login", "OPTIONS": {"assume_role": "application"}}
DATABASES["pool"] = {**_default, "CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 0, "max_size": 3, "timeout": 10}}}
TASKS.update({alias: {**TASKS["default"], "OPTIONS": {"database": alias}} for alias in DATABASES if alias != "default"})
#: The tables are made where the receiver of connection_created says.
BEFORE_MIGRATING = "CREATE SCHEMA inside"
