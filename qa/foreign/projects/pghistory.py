"""django-pghistory with its triggers and its middleware."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "pgtrigger", "pghistory", "qa.foreign.tracked"]
MIDDLEWARE = ["pghistory.middleware.HistoryMiddleware"]
ROOT_URLCONF = "qa.foreign.tracked.urls"
# The tables and triggers of an app without migrations are made, too.
PGTRIGGER_INSTALL_ON_MIGRATE = True
PGHISTORY_MIDDLEWARE_METHODS = ("GET", "POST")
MIGRATE = ("migrate", "--run-syncdb")
